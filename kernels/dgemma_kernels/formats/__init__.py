"""Storage formats of the experts' weights: plain tensors, and one module for each other format.

A format provides:

- an encoder, a PyTorch function of weights (E, N, K), listed in `ENCODERS` under the name that `accelerate` takes;
- a frozen class with the `shape` and `dtype` of the weights it encodes, `tensors()` (every tensor it stores) and
  `decode()` (the weights in plain PyTorch, which the reference multiplies);
- tiles for each GPU, in `ops.configs.EXPERTS` under the same name;
- a product in `ops.experts.tiles`; `ops.experts.kernel` passes it `tensors()` and chooses it by the class.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dgemma.quantization.rounding import quantize as quantize_weight
from dgemma.quantization.weights import Float8Weight, IntWeight, NvFp4Weight, QuantizedWeight, Weight
from dgemma_kernels.formats.float8 import Quantized, quantize
from dgemma_kernels.formats.fourbit import FourBit, arrange
from dgemma_kernels.formats.packed import Packed, pack

ExpertWeights = Tensor | Quantized | Packed | FourBit


def _keep(weights: Weight, dtype: torch.dtype, *, gated: bool) -> Tensor:
    return _plain(weights, "bf16").detach()


def _pack(weights: Weight, dtype: torch.dtype, *, gated: bool) -> Packed:
    return pack(_plain(weights, "packed"), gated=gated)


def _to_float8(weights: Weight, dtype: torch.dtype, *, gated: bool) -> Quantized:
    if isinstance(weights, Float8Weight):
        return Quantized(values=weights.values, scale=weights.scale, dtype=dtype)
    return quantize(_plain(weights, "fp8"))


def _to_four_bit(weights: Weight, dtype: torch.dtype, *, gated: bool, format: str) -> FourBit:
    if isinstance(weights, Tensor):
        weights = quantize_weight(weights, format)
    if not isinstance(weights, IntWeight | NvFp4Weight) or weights.format != format:
        raise _other_format(weights, format)
    return arrange(weights, dtype=dtype, gated=gated)


def _plain(weights: Weight, format: str) -> Tensor:
    if isinstance(weights, Tensor):
        return weights
    raise _other_format(weights, format)


def _other_format(weights: QuantizedWeight, format: str) -> ValueError:
    return ValueError(
        f"accelerate weights must be the format of the model's experts, {weights.format}, got {format!r}. "
        f"The kernels cannot convert {weights.format} to another format."
    )


# Encoders of experts' weights: gate_up (E, 2F, D), gate rows first, with `gated`, and down (E, D, F) without. All take
# plain weights. Those of fp8, int4 and nvfp4 also take weights that already have the format, and do not decode them.
# `dtype` is that of the rows that the weights multiply.
ENCODERS: dict[str, Callable[..., ExpertWeights]] = {
    "bf16": _keep,
    "packed": _pack,
    "fp8": _to_float8,
    "int4": partial(_to_four_bit, format="int4"),
    "nvfp4": partial(_to_four_bit, format="nvfp4"),
}


def format_of(weights: ExpertWeights) -> str:
    """Return the key of these weights in `ops.configs.EXPERTS`; plain weights wider than 2 bytes are "float32".

    Example: `expert_config(256, x.device, format_of(gate_up_proj)).rows`.
    """
    if isinstance(weights, Packed):
        return "packed"
    if isinstance(weights, FourBit):
        return weights.kind
    if isinstance(weights, Quantized):
        return "fp8"
    return "bf16" if weights.element_size() <= 2 else "float32"


def decode(x: ExpertWeights) -> Tensor:
    """Return the values that `x` encodes: of `Packed` in its dtype, of others in float64; a plain tensor as it is.

    Example: `decode(layer.expert_down).shape` is `(128, 2816, 704)`.
    """
    return x if isinstance(x, Tensor) else x.decode()


def stored_tensors(x: ExpertWeights) -> tuple[Tensor, ...]:
    """Return every tensor that stores `x`.

    Example: `sum(t.nbytes for t in stored_tensors(layer.expert_down))`.
    """
    return (x,) if isinstance(x, Tensor) else x.tensors()
