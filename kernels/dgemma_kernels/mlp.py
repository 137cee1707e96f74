"""GeGLU, gelu_tanh(gate) * up, alone and as the end of the dense gate and up product. Reference twin: `reference`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.blocks import gelu_tanh_times, inside
from dgemma_kernels.configs import dense_config


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
    """geglu(x @ gate_up_weight.T) in one launch. x: (M, D), gate_up_weight: (2F, D), gate rows first → (M, F).

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
    config = dense_config(x.shape[0], x.device)
    num_tokens, width = x.shape
    hidden_width = gate_up_weight.shape[0] // 2
    out = torch.empty(num_tokens, hidden_width, dtype=x.dtype, device=x.device)
    row_tiles = triton.cdiv(num_tokens, config.rows)
    _gate_up_geglu_kernel[(row_tiles * triton.cdiv(hidden_width, config.tile.cols),)](
        x,
        gate_up_weight,
        out,
        num_tokens,
        row_tiles,
        WIDTH=width,
        HIDDEN=hidden_width,
        ROWS=config.rows,
        COLS=config.tile.cols,
        DEPTH=config.tile.depth,
        num_warps=config.tile.warps,
        num_stages=config.tile.stages,
    )
    return out


@triton.jit
def _geglu_kernel(gate_up: tl.tensor, out: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    gate = tl.load(gate_up + row * 2 * width + cols, mask=mask).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + cols, mask=mask).to(tl.float32)
    tl.store(out + row * width + cols, gelu_tanh_times(gate, up, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "row_tiles"])
def _gate_up_geglu_kernel(
    x: tl.tensor,
    gate_up_weight: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    row_tiles: tl.tensor,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    # Row tiles fastest: programs that read the same weights run side by side, so that memory is read once.
    rows = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) // row_tiles * COLS + tl.arange(0, COLS)
    depth = tl.arange(0, DEPTH)
    row_inside = rows < num_tokens
    col_inside = inside(cols, HIDDEN, HIDDEN % COLS == 0)
    inputs = x + rows[:, None].to(tl.int64) * WIDTH + depth[None, :]
    gates = gate_up_weight + cols[:, None].to(tl.int64) * WIDTH + depth[None, :]
    gate = tl.zeros([COLS, ROWS], tl.float32)
    up = tl.zeros([COLS, ROWS], tl.float32)
    for start in range(0, WIDTH, DEPTH):
        left = inside(depth, WIDTH - start, WIDTH % DEPTH == 0)[None, :]
        gate_w = tl.load(gates + start, mask=col_inside[:, None] & left, other=0.0)
        up_w = tl.load(gates + HIDDEN * WIDTH + start, mask=col_inside[:, None] & left, other=0.0)
        tokens = tl.load(inputs + start, mask=row_inside[:, None] & left, other=0.0).T
        gate = tl.dot(gate_w, tokens, gate, input_precision="ieee")
        up = tl.dot(up_w, tokens, up, input_precision="ieee")
    hidden = gelu_tanh_times(gate, up, out.dtype.element_ty).T
    at = rows[:, None].to(tl.int64) * HIDDEN + cols[None, :]
    tl.store(out + at, hidden, mask=row_inside[:, None] & col_inside[None, :])
