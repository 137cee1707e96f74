"""The door of training: the functions that it replaces, and what it sets up for a model.

| replaced | by |
|---|---|
| norms, GeGLU, heads, the residual stream | compiled functions, or kernels with their gradients (`layer.py`) |
| attention | kernels that skip what a mask hides; flash kernels; products for large heads (`attention.py`) |
| routing and products by expert | compiled functions, a kernel for groups; gradients without sorting (`experts.py`) |
| adapters | shared products, and experts whose backward keeps their output (`adapted_*.py`) |
| the passes over text and canvases | one joint pass per layer, for adapters (`together.py`) |
| the head | large slices with one kernel each (`head.py`) |
| a forward and backward pass | a CUDA graph (`replay.py`) |
| the optimizers | AdamW as one fused kernel, Muon's products in bfloat16 |

Without adapters, whole layers are compiled, unless `whole_layers` is False.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from dgemma.diffusion import draws
from dgemma.doors import plain, replaced
from dgemma.model import attention, experts, layers
from dgemma.model.backbone import Layer
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.released import require_experts
from dgemma.quantization import weights as quantized
from dgemma.quantization.weights import QuantizedWeight
from dgemma.train import canvases, head, one_pass, optimizer
from dgemma.train.lora import AdaptedExperts, AdaptedLinear, is_adapted
from dgemma.train.update import Updater
from dgemma_kernels.training import adapted_experts, adapted_linear, layer, together
from dgemma_kernels.training import attention as fast_attention
from dgemma_kernels.training import experts as fast_experts
from dgemma_kernels.training import head as fast_head
from dgemma_kernels.training.fused import compiled, fused, runs_kernels, start_compiler
from dgemma_kernels.training.replay import Replays, measure

_FLOAT8_SINCE = (8, 9)  # compute capability; the compiler has no float8 for older GPUs
_RECOMPILATIONS = 64  # all layers share one code object, all gradients another, and so their limits

_REPLACED: dict[Callable[..., Any], Callable[..., Any]] = {
    layers.rms_norm: layer.fast_rms_norm,
    layers.gated_gelu: layer.gated_gelu,
    layers.project: adapted_linear.project,
    attention.attend: fast_attention.attend,
    attention.Attention.project: layer.project_heads,
    Layer.feed_forward: layer.feed_forward,
    experts.router_input: fast_experts.router_input,
    experts.choose_experts: fast_experts.choose_experts,
    experts.group_by_expert: fast_experts.group_by_expert,
    experts.dispatch: fast_experts.dispatch,
    experts.combine: fast_experts.combine,
    experts.product_by_group: fast_experts.product_by_group,
    quantized.int_values: fused(plain(quantized.int_values)),
    quantized.float8_values: fused(plain(quantized.float8_values)),
    quantized.nvfp4_values: fused(plain(quantized.nvfp4_values)),
    AdaptedLinear.forward: adapted_linear.forward,
    AdaptedExperts.forward: adapted_experts.forward,
    head.cross_entropy: fast_head.cross_entropy,
    head.soft_embedding: fast_head.soft_embedding,
    one_pass.run_text_and_canvases: together.run_text_and_canvases,
}


@contextmanager
def accelerate_training(model: DiffusionGemma, *, replay: bool = True, whole_layers: bool = True) -> Iterator[None]:
    """Train faster within the context, on a GPU; losses and gradients are the same up to rounding.

    Add adapters before. Without adapters, whole layers are compiled, which takes a minute or two for every new number
    of rows. With whole_layers=False, only functions between products are, once for all numbers of rows: for runs whose
    rows end one by one, as in `PolicyGradient`. On one GPU, a pass whose shape comes for the third time is captured as
    a CUDA graph; replay=False saves the graphs' memory.

    Example: `with accelerate_training(model): train(model, objective, source, config, out="run")`.
    """
    require_experts(model, "accelerate_training")
    if model.device.type != "cuda" and not knobs.runtime.interpret:
        raise ValueError(
            f"accelerate_training model must be on a GPU, got one on {model.device}. Move it, or train without."
        )
    on_gpu = model.device.type == "cuda"
    own: dict[Callable[..., Any], Callable[..., Any]] = {
        Updater.measure: Replays() if replay else measure,
        canvases.uniform_at: _uniform_at,
        QuantizedWeight.decode: _decode,
    }
    with ExitStack() as stack:
        if on_gpu:  # elsewhere nothing is compiled
            own[optimizer.adamw] = partial(plain(optimizer.adamw), fused=True)
            own[optimizer.orthogonal] = partial(plain(optimizer.orthogonal), dtype=torch.bfloat16)
            start_compiler()  # its processes start while the caller does other work
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=_RECOMPILATIONS))
        if is_adapted(model):
            adapted_linear.make_neighbours(model)
        elif on_gpu and whole_layers:
            stack.enter_context(_compiled_layers(model))
        stack.enter_context(replaced(_REPLACED | own))
        yield


@contextmanager
def _compiled_layers(model: DiffusionGemma) -> Iterator[None]:
    """Compile whole layers. For adapters, small functions compile faster, and a CUDA graph launches them at once."""
    each = list(model.layers)
    try:
        for module in each:
            module.compile(dynamic=False)
        yield
    finally:
        for module in each:
            # torch has no public function for this. Compiling `forward` instead would not compile its hooks.
            module._compiled_call_impl = None


def _uniform_at(seeds: Tensor, block: Tensor, position: Tensor, word: Tensor) -> Tensor:
    draw = compiled(draws.uniform_at) if runs_kernels(seeds) else draws.uniform_at
    out: Tensor = draw(seeds, block, torch.zeros_like(block), position, word)
    return out


def _decode(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Decode all rows by one kernel without temporary values, where the compiler supports the format."""
    has_float8 = any(buffer.dtype == torch.float8_e4m3fn for buffer in weight.buffers())
    if weight.device.type != "cuda" or (has_float8 and torch.cuda.get_device_capability(weight.device) < _FLOAT8_SINCE):
        return plain(QuantizedWeight.decode)(weight, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    with torch.no_grad():
        return weight.decode_rows(slice(0, weight.shape[:-1].numel()), wide, dtype).view(weight.shape)
