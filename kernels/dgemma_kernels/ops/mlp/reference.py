"""The dense MLP in plain PyTorch, the reference for `kernel`."""

import torch.nn.functional as F
from torch import Tensor

from dgemma_kernels.formats.float8 import Quantized, quantize


def geglu(gate_up: Tensor) -> Tensor:
    """Return gelu_tanh of the first half times the second half. (M, 2F) → (M, F)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def geglu_float8(gate_up: Tensor, row_scale: Tensor, col_scale: Tensor) -> Quantized:
    """Return geglu of gate_up times its scales, rounded to float8. (M, 2F), (M,), (2F,) → (M, F)."""
    return quantize(geglu((gate_up * row_scale[:, None] * col_scale).to(gate_up.dtype)))


def dense_mlp(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, progress: Tensor) -> Tensor:
    """Return geglu(x @ gate_up_weight.T) @ down_weight.T: (M, D), (2F, D), (D, F) → (M, D). `progress` is not used."""
    return geglu(x @ gate_up_weight.T) @ down_weight.T
