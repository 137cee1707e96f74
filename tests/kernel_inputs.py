"""Inputs for tests of the kernels (routings, a small model with every feature), and the relative error of a result."""

from typing import Any

import torch
from torch import Tensor

import dgemma
from dgemma.model.config import FULL, SLIDING
from dgemma_kernels.ops import configs
from dgemma_kernels.ops.router import reference
from dgemma_kernels.ops.router.kernel import ExpertTiles

NUM_EXPERTS = 6


def error(got: Tensor, want: Tensor) -> float:
    """Return the error relative to `want`, in float64."""
    return ((got.double() - want).norm() / want.norm()).item()


def draw_routing(name: str) -> Tensor:
    """Experts (tokens, k), different within a token."""
    generator = torch.Generator().manual_seed(7)
    spread, inner = (
        torch.stack([torch.randperm(n, generator=generator)[:2] for _ in range(40)])
        for n in (NUM_EXPERTS, NUM_EXPERTS - 2)
    )
    return {
        "one-token": spread[:1],
        "even": spread,
        "one-expert-has-every-row": torch.full((75, 1), 4),
        "two-experts-have-no-rows": inner + 1,
    }[name].int()


def sort_choices(index: Tensor, format: str = "bf16", *, rows: int | None = None) -> ExpertTiles:
    """Sort choices of `draw_routing` into tiles, by default with the rows of tiles for weights of this format."""
    rows = rows or configs.expert_config(index.shape[0], index.device, format).rows
    return reference.sort_by_expert(index, reference.count_pairs(index, NUM_EXPERTS), rows)


def draw_tokens(*shape: int, seed: int = 0) -> Tensor:
    """Draw tokens of `make_model`."""
    tokens = torch.randint(40, shape, generator=torch.Generator().manual_seed(seed))
    return tokens.to("cuda" if torch.cuda.is_available() else "cpu")


def logits_of(model: dgemma.Denoiser) -> Tensor:
    """Return the logits of a canvas, with self-conditioning, and of the causal mode, after two ragged prompts."""
    prompt, canvas = draw_tokens(2, 7), draw_tokens(2, 4, seed=1)
    real = torch.ones_like(prompt)
    real[1, :2] = 0
    before = torch.randn(2, 4, model.config.vocab_size, generator=torch.Generator().manual_seed(4)).to(canvas.device)
    with torch.no_grad():
        cache = model.encode(prompt, attention_mask=real)
        denoised = model.denoise(canvas, cache, self_cond=before).logits
        return torch.cat(
            [denoised, model.causal_logits(canvas[:, :2], cache), model.causal_logits(canvas[:, 3:], cache)], 1
        )


def make_model(device: torch.device, **changes: Any) -> dgemma.DiffusionGemma:
    """Two layers, one of each kind, random norms and scalars."""
    config = dgemma.presets.tiny().replace(
        vocab_size=40,
        canvas_length=4,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        layer_types=(SLIDING, FULL),
        sliding_window=5,
        num_attention_heads=2,
        num_key_value_heads=2,
        global_head_dim=16,
        num_experts=4,
    )
    model = dgemma.DiffusionGemma(config.replace(**changes)).requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1 + 0.2 * noise)
    for layer in model.layers:
        layer.layer_scalar.fill_(0.8)
        layer.causal_layer_scalar.fill_(0.9)
    return model.to(device)
