"""Objectives of public fine-tuning recipes and of papers, and models prepared for training.

Each objective is a function of the model's config. Recipes also differ in the weights that they train. `prepare` adds
the adapter of a recipe, or freezes the routers. `balanced_routers` balances the load of the experts while a model is
trained from random weights (Switch Transformers, arXiv:2101.03961). Without it, a router soon prefers the experts that
happened to learn first, and the others are never trained.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dgemma.checks import require, typed
from dgemma.diffusion.noise import HybridNoise, MaskNoise, UniformNoise
from dgemma.diffusion.schedule import Linear, Schedule
from dgemma.model.attention import Attention
from dgemma.model.config import ModelConfig
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.experts import Router, Routing
from dgemma.model.vision.tower import VisionAttention
from dgemma.train.lora import LoRA, add_lora
from dgemma.train.losses import Bound, LeaveOneOut
from dgemma.train.objective import Objective


@typed
def dgemma(config: ModelConfig, **changes: Any) -> Objective:
    """The published loss over all canvases in one pass: a token mean per step, without the fill after cut answers.

    Example: `recipes.dgemma(model.config, causal_weight=0.5)`.
    """
    return _fine_tuning(config, {"canvases": "all", "truncated": "unscored"}, changes)


@typed
def official_jax(config: ModelConfig, **changes: Any) -> Objective:
    """Google's JAX fine-tuning: a mean per example. Without self-conditioning, the signal is the mean embedding."""
    return _fine_tuning(config, {"self_cond_off": "zero_logits", "reduction": "example"}, changes)


@typed
def trl(config: ModelConfig, **changes: Any) -> Objective:
    """TRL: a token mean per micro-batch. The causal term skips the fill; after cut answers no term scores it."""
    return _fine_tuning(config, {"reduction": "micro_batch", "causal_fill": False, "truncated": "unscored"}, changes)


@typed
def unsloth(config: ModelConfig, **changes: Any) -> Objective:
    """Unsloth: TRL's objective."""
    return trl(config, **changes)


@typed
def nemo(config: ModelConfig, **changes: Any) -> Objective:
    """NeMo: t up to 1, a mean over all tokens of the step."""
    return _fine_tuning(config, {"t_range": (1e-3, 1.0), "reduction": "global"}, changes)


@typed
def megatron(config: ModelConfig, **changes: Any) -> Objective:
    """Megatron: t up to 1, a token mean per process, rows with cut answers rejected."""
    return _fine_tuning(config, {"t_range": (1e-3, 1.0), "reduction": "process", "truncated": "rejected"}, changes)


@typed
def leave_one_out(config: ModelConfig, **changes: Any) -> Objective:
    """The published loss for a network whose logits ignore the token at their own position (arXiv:2605.22765)."""
    return _fine_tuning(config, {"loss": LeaveOneOut()}, changes)


@typed
def mdlm(config: ModelConfig, *, mask_token_id: int = 4, schedule: Schedule | None = None, **changes: Any) -> Objective:
    """MDLM (arXiv:2406.07524): the bound of mask noise; the mask is never proposed; no causal term."""
    noise = MaskNoise(config.vocab_size, mask_token_id=mask_token_id, schedule=schedule or Linear())
    return _bound(config, {"noise": noise}, changes)


@typed
def llada(config: ModelConfig, *, mask_token_id: int = 4, **changes: Any) -> Objective:
    """LLaDA (arXiv:2502.09992): MDLM's bound with the mask in the softmax, and a mean per example."""
    defaults = {"loss": Bound(propose_mask=True), "reduction": "example"}
    return mdlm(config, mask_token_id=mask_token_id, **{**defaults, **changes})


@typed
def block_diffusion(
    config: ModelConfig, *, mask_token_id: int = 4, schedule: Schedule | None = None, **changes: Any
) -> Objective:
    """BD3-LM (arXiv:2503.09573): MDLM's bound over all blocks of a text at once, each given the clean blocks before.

    Example: `recipes.block_diffusion(config, canvas_len=16, schedule=ClippedLinear(low=0.3, high=0.8))`.
    """
    return mdlm(config, mask_token_id=mask_token_id, schedule=schedule, **{"canvases": "all", **changes})


@typed
def duo(config: ModelConfig, *, schedule: Schedule | None = None, **changes: Any) -> Objective:
    """Duo (arXiv:2506.10892): the exact bound of uniform noise.

    The network's softmax is the leave-one-out prediction itself; it is not converted.
    """
    noise = UniformNoise(config.vocab_size, schedule=schedule or Linear())
    return _bound(config, {"noise": noise, "loss": Bound(parametrisation="loo")}, changes)


@typed
def gidd(config: ModelConfig, *, mask_token_id: int = 4, uniform_share: float = 0.2, **changes: Any) -> Objective:
    """GIDD (arXiv:2503.04482): mask and uniform noise, and dynamic weights instead of the bound's exact ones."""
    noise = HybridNoise(config.vocab_size, mask_token_id=mask_token_id, uniform_share=uniform_share)
    loss = Bound(parametrisation="loo", weights="dynamic", max_weight=2.0)
    return _bound(config, {"noise": noise, "loss": loss, "t_range": (1e-4, 1 - 1e-4)}, changes)


def prepare(model: DiffusionGemma, recipe: str) -> None:
    """Prepare a model for a fine-tuning recipe: add its adapter, or freeze the routers for Megatron, which has none.

    TRL and Unsloth put separate adapters on tied weights, which cannot be merged. Here the adapter is always shared.

    Example: `recipes.prepare(model, "megatron"); train(model, recipes.megatron(model.config), ...)`.
    """
    adapters = {
        "dgemma": LoRA(),
        "official_jax": LoRA(rank=8),
        "trl": LoRA(rank=16, alpha=32.0, targets=("attention", "dense")),
        "unsloth": LoRA(rank=16, alpha=32.0, targets=("attention", "dense")),
        "megatron": None,
    }
    require(recipe in adapters, "prepare recipe", f"be among {', '.join(adapters)}", recipe, "Or call add_lora.")
    lora = adapters[recipe]
    if lora is not None:
        add_lora(model, lora)
        return
    for module in model.modules():
        if isinstance(module, Router):
            module.requires_grad_(False)


@torch.no_grad()
def soften_attention(model: DiffusionGemma) -> None:
    """Make the attention of random weights less peaked: set each query norm to head_dim^-1/2.

    Queries and keys are normalised and their product is not scaled. With unit norms, the scores of a new model have a
    standard deviation of sqrt(head_dim), so its attention is almost one-hot and learns slowly.

    Example: `model = DiffusionGemma(config); soften_attention(model)`.
    """
    for module in model.modules():
        if isinstance(module, Attention | VisionAttention):
            module.q_norm.weight.fill_(module.head_dim**-0.5)


def _fine_tuning(config: ModelConfig, defaults: dict[str, Any], changes: dict[str, Any]) -> Objective:
    common = {
        "noise": UniformNoise(config.vocab_size),
        "canvas_len": config.canvas_length,
        "fill_token": config.eos_token_id,
    }
    return Objective(**{**common, **defaults, **changes})


def _bound(config: ModelConfig, defaults: dict[str, Any], changes: dict[str, Any]) -> Objective:
    common = {"loss": Bound(), "causal_weight": 0.0, "self_cond_prob": 0.0, "t_range": (1e-3, 1.0)}
    return _fine_tuning(config, {**common, **defaults}, changes)


@contextmanager
def balanced_routers(model: nn.Module, weight: float) -> Iterator[None]:
    """In every backward pass, add a loss per router: weight · E · Σ_e (share of e) · (mean probability of e).

    The share counts the choices of a forward pass and has no gradient. The sum is smallest when all E experts are
    chosen equally often. The reported losses do not contain it.

    Example: `with balanced_routers(model, 0.01): train(model, objective, source, config, out="run")`.
    """
    require(weight >= 0, "balanced_routers weight", "be at least 0", weight, "0.01 is usual.")
    hook = partial(_balance, weight=weight)
    routers = [module for module in model.modules() if isinstance(module, Router) and weight]
    handles = [router.register_forward_hook(hook) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _balance(router: nn.Module, inputs: Any, routing: Routing, *, weight: float) -> Routing:
    num_tokens, num_experts = routing.probabilities.shape
    expert = torch.arange(num_experts, device=routing.experts.device)
    share = (routing.experts.reshape(-1, 1) == expert).to(routing.probabilities.dtype).mean(0)  # (E,)
    slope = (share * (weight * num_experts / max(1, num_tokens))).expand(num_tokens, num_experts)
    return routing._replace(weights=_WithSlope.apply(routing.weights, routing.probabilities, slope))


class _WithSlope(torch.autograd.Function):
    """Return the weights unchanged; in the backward pass, add `slope` to the gradient of the probabilities."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, probabilities: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return weights.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (slope,) = ctx.saved_tensors
        return grad, slope, None
