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

from torch import Tensor

from dgemma_kernels.formats.float8 import Quantized, quantize
from dgemma_kernels.formats.packed import Packed, pack

ExpertWeights = Tensor | Quantized | Packed
Encoder = Callable[[Tensor], ExpertWeights]

# Encoders of gate_up (E, 2F, D), gate rows first, and of down (E, D, F).
ENCODERS: dict[str, tuple[Encoder, Encoder]] = {
    "bf16": (Tensor.detach, Tensor.detach),
    "packed": (partial(pack, gated=True), pack),
    "fp8": (quantize, quantize),
}


def format_of(weights: ExpertWeights) -> str:
    """Return the key of these weights in `ops.configs.EXPERTS`; plain weights wider than 2 bytes are "float32".

    Example: `expert_config(256, x.device, format_of(gate_up_proj)).rows`.
    """
    if isinstance(weights, Packed):
        return "packed"
    if isinstance(weights, Quantized):
        return "fp8"
    return "bf16" if weights.element_size() <= 2 else "float32"


def decode(x: ExpertWeights) -> Tensor:
    """Return the values that `x` encodes: a plain tensor unchanged, float8 in float64, packed in its own dtype.

    Example: `decode(layer.expert_down).shape` is `(128, 2816, 704)`.
    """
    return x if isinstance(x, Tensor) else x.decode()


def stored_tensors(x: ExpertWeights) -> tuple[Tensor, ...]:
    """Return every tensor that stores `x`.

    Example: `sum(t.nbytes for t in stored_tensors(layer.expert_down))`.
    """
    return (x,) if isinstance(x, Tensor) else x.tensors()
