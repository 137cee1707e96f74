"""The dense MLP in one launch of few long programs, which run beside the experts on a few multiprocessors of their own.

Library products fill every multiprocessor for a short time, and while they do the experts' loads stand still there. The
experts wait for memory and saturate it from three quarters of the chip, so here each program holds a multiprocessor for
long instead. Programs draw tiles from a counter: all of gate and up with GeGLU first, then, when the last of these is
stored, down. The weights are the products' 64-row operand, as in `experts`. Reference twin: `reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.ops.blocks import gelu_tanh_times, inside
from dgemma_kernels.ops.configs import dense_config
from dgemma_kernels.ops.mlp.kernel import gate_up_geglu


def dense_mlp(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, progress: Tensor) -> Tensor:
    """geglu(x @ gate_up_weight.T) @ down_weight.T; for few and for many tokens, and in float32, by library products.

    x: (M, D), gate_up_weight: (2F, D), gate rows first, down_weight: (D, F) → (M, D). progress: (2,) int32, zeros
    before and after, for the programs of one launch to count in: launches that share it must follow each other.

    Example: `dense_mlp(dense_in, gate_up, down, progress=torch.zeros(2, dtype=torch.int32, device="cuda"))`.
    """
    num_rows, width = x.shape
    hidden_width = down_weight.shape[1]
    if gate_up_weight.shape != (2 * hidden_width, width) or down_weight.shape[0] != width:
        raise ValueError(
            f"dense_mlp must be given (M, D), (2F, D) and (D, F), got {tuple(x.shape)}, {tuple(gate_up_weight.shape)} "
            f"and {tuple(down_weight.shape)}."
        )
    if not x.dtype == gate_up_weight.dtype == down_weight.dtype:
        raise ValueError(
            f"dense_mlp must be given tensors of one dtype, got {x.dtype}, {gate_up_weight.dtype}, {down_weight.dtype}."
        )
    if not all(tensor.is_contiguous() for tensor in (x, gate_up_weight, down_weight, progress)):
        raise ValueError("dense_mlp must be given contiguous tensors. Call .contiguous() on them first.")
    if progress.shape != (2,) or progress.dtype != torch.int32:
        raise ValueError(f"dense_mlp.progress must be (2,) int32, got {tuple(progress.shape)} {progress.dtype}.")
    config = dense_config(num_rows, x.device, x.dtype)
    if config is None:
        return torch.mm(gate_up_geglu(x, gate_up_weight), down_weight.T)
    hidden = torch.empty(num_rows, hidden_width, dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    _dense_mlp_kernel[(config.programs,)](
        x,
        gate_up_weight,
        down_weight,
        hidden,
        out,
        progress,
        num_rows,
        WIDTH=width,
        HIDDEN=hidden_width,
        ROWS=config.rows,
        EXACT_ROWS=num_rows % config.rows == 0,
        GATE_UP_COLS=config.gate_up_cols,
        DOWN_COLS=config.down_cols,
        DEPTH=config.depth,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


@triton.jit
def _gate_up_tile(
    x: tl.tensor,
    gate_up_weight: tl.tensor,
    hidden: tl.tensor,
    rows: tl.tensor,
    row_inside: tl.tensor,
    cols: tl.tensor,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    depth = tl.arange(0, DEPTH)
    col_inside = inside(cols, HIDDEN, HIDDEN % COLS == 0)
    gates = gate_up_weight + cols[:, None].to(tl.int64) * WIDTH + depth[None, :]
    inputs = x + rows[:, None].to(tl.int64) * WIDTH + depth[None, :]
    gate = tl.zeros([COLS, ROWS], tl.float32)
    up = tl.zeros([COLS, ROWS], tl.float32)
    for start in range(0, WIDTH, DEPTH):
        left = inside(depth, WIDTH - start, WIDTH % DEPTH == 0)[None, :]
        gate_w = tl.load(gates + start, mask=col_inside[:, None] & left, other=0.0)
        up_w = tl.load(gates + HIDDEN * WIDTH + start, mask=col_inside[:, None] & left, other=0.0)
        tokens = tl.load(inputs + start, mask=row_inside[:, None] & left, other=0.0).T
        gate = tl.dot(gate_w, tokens, gate, input_precision="ieee")
        up = tl.dot(up_w, tokens, up, input_precision="ieee")
    at = rows[:, None].to(tl.int64) * HIDDEN + cols[None, :]
    values = gelu_tanh_times(gate, up, hidden.dtype.element_ty).T
    tl.store(hidden + at, values, mask=row_inside[:, None] & col_inside[None, :])


@triton.jit
def _down_tile(
    hidden: tl.tensor,
    down_weight: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    row_inside: tl.tensor,
    cols: tl.tensor,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    depth = tl.arange(0, DEPTH)
    col_inside = inside(cols, WIDTH, WIDTH % COLS == 0)
    kernels = down_weight + cols[:, None].to(tl.int64) * HIDDEN + depth[None, :]
    inputs = hidden + rows[:, None].to(tl.int64) * HIDDEN + depth[None, :]
    sums = tl.zeros([COLS, ROWS], tl.float32)
    for start in range(0, HIDDEN, DEPTH):
        left = inside(depth, HIDDEN - start, HIDDEN % DEPTH == 0)[None, :]
        w = tl.load(kernels + start, mask=col_inside[:, None] & left, other=0.0)
        h = tl.load(inputs + start, mask=row_inside[:, None] & left, other=0.0)
        sums = tl.dot(w, h.T, sums, input_precision="ieee")
    at = rows[:, None].to(tl.int64) * WIDTH + cols[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty).T, mask=row_inside[:, None] & col_inside[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _dense_mlp_kernel(
    x: tl.tensor,
    gate_up_weight: tl.tensor,
    down_weight: tl.tensor,
    hidden: tl.tensor,
    out: tl.tensor,
    progress: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    EXACT_ROWS: tl.constexpr,
    GATE_UP_COLS: tl.constexpr,
    DOWN_COLS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    row_blocks = tl.cdiv(num_rows, ROWS)
    gate_up_tiles = tl.cdiv(HIDDEN, GATE_UP_COLS) * row_blocks
    all_tiles = gate_up_tiles + tl.cdiv(WIDTH, DOWN_COLS) * row_blocks
    taken, stored = progress, progress + 1
    tile = tl.atomic_add(taken, 1)
    while tile < gate_up_tiles:
        rows = tile % row_blocks * ROWS + tl.arange(0, ROWS)
        cols = tile // row_blocks * GATE_UP_COLS + tl.arange(0, GATE_UP_COLS)
        row_inside = inside(rows, num_rows, EXACT_ROWS)
        _gate_up_tile(x, gate_up_weight, hidden, rows, row_inside, cols, WIDTH, HIDDEN, ROWS, GATE_UP_COLS, DEPTH)
        tl.debug_barrier()  # the stores of all threads come before the one that counts
        tl.atomic_add(stored, 1, sem="release")
        tile = tl.atomic_add(taken, 1)
    # Every tile of gate and up was taken before this one, by a program that runs: it will be stored, even where some
    # programs of this launch have not found a multiprocessor yet.
    if tile < all_tiles:
        while tl.atomic_add(stored, 0, sem="acquire") < gate_up_tiles:
            pass
    while tile < all_tiles:
        at = tile - gate_up_tiles
        rows = at % row_blocks * ROWS + tl.arange(0, ROWS)
        cols = at // row_blocks * DOWN_COLS + tl.arange(0, DOWN_COLS)
        row_inside = inside(rows, num_rows, EXACT_ROWS)
        _down_tile(hidden, down_weight, out, rows, row_inside, cols, WIDTH, HIDDEN, ROWS, DOWN_COLS, DEPTH)
        tile = tl.atomic_add(taken, 1)
    # Every program ends by one number too many; after the last of these nobody counts any more.
    if tile == all_tiles + tl.num_programs(0) - 1:
        tl.store(taken, 0)
        tl.store(stored, 0)
