"""GeGLU, gelu_tanh(gate) * up, alone and after the dense gate and up product. Reference twin: `reference`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.ops.blocks import gelu_tanh_times


def geglu(gate_up: Tensor) -> Tensor:
    """gelu_tanh of the first half of the last axis, times the second half. gate_up: (M, 2F) → (M, F).

    Example: `geglu(torch.mm(x, gate_up_weight.T))`.
    """
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or not gate_up.is_contiguous():
        raise ValueError(f"geglu.gate_up must be contiguous (M, 2F), got {tuple(gate_up.shape)}.")
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _geglu_kernel[(num_rows, triton.cdiv(width, 1024))](gate_up, out, width, BLOCK=1024, num_warps=4)
    return out


def gate_up_geglu(x: Tensor, gate_up_weight: Tensor) -> Tensor:
    """geglu(x @ gate_up_weight.T): a library product, which one kernel for both does not beat, then GeGLU.

    x: (M, D), gate_up_weight: (2F, D), gate rows first → (M, F).

    Example: `hidden = gate_up_geglu(dense_in, torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))`.
    """
    if x.ndim != 2 or gate_up_weight.ndim != 2 or gate_up_weight.shape[1] != x.shape[1] or gate_up_weight.shape[0] % 2:
        raise ValueError(
            f"gate_up_geglu must be given (M, D) and (2F, D), got {tuple(x.shape)} and {tuple(gate_up_weight.shape)}."
        )
    if x.dtype != gate_up_weight.dtype or not (x.is_contiguous() and gate_up_weight.is_contiguous()):
        raise ValueError(
            f"gate_up_geglu must be given contiguous tensors of one dtype, got {x.dtype} and {gate_up_weight.dtype}."
        )
    return geglu(torch.mm(x, gate_up_weight.T))


@triton.jit
def _geglu_kernel(gate_up: tl.tensor, out: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    gate = tl.load(gate_up + row * 2 * width + cols, mask=mask).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + cols, mask=mask).to(tl.float32)
    tl.store(out + row * width + cols, gelu_tanh_times(gate, up, out.dtype.element_ty), mask=mask)
