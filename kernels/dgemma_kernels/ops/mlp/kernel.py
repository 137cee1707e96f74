"""GeGLU (gelu_tanh(gate) * up), and the dense MLP as one launch of a few long programs. Reference: `reference.py`.

The dense MLP runs at the same time as the experts. Library products would occupy every multiprocessor for a short time
and stop the experts' loads there. The experts saturate memory from three quarters of the multiprocessors. So each
program of `dense_mlp` occupies one of the remaining multiprocessors for a long time. Programs take tiles from a
counter: first all of gate and up with GeGLU, then down, once the last gate and up tile is stored. The weights are the
64-row operand of the products, as in `experts`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.blocks import gelu_tanh_times, inside, load_rows, rows_of, store_rows_rounded
from dgemma_kernels.formats import format_of
from dgemma_kernels.formats.float8 import Quantized
from dgemma_kernels.ops.configs import DenseConfig, dense_config


def geglu(gate_up: Tensor) -> Tensor:
    """Return gelu_tanh of the first half of the last axis times the second half. gate_up: (M, 2F) → (M, F).

    Example: `geglu(torch.mm(x, gate_up_weight.T))`.
    """
    assert gate_up.is_contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _geglu_kernel[(triton.cdiv(num_rows, 4), triton.cdiv(width, 256))](
        gate_up, out, num_rows, width, ROWS=4, BLOCK=256, num_warps=4
    )
    return out


def geglu_float8(gate_up: Tensor, row_scale: Tensor, col_scale: Tensor) -> Quantized:
    """Return geglu of gate_up times its scales, rounded to float8 with one scale per row. (M, 2F) → (M, F).

    row_scale: (M,), col_scale: (2F,) float32.

    Example: `geglu_float8(multiply_unscaled(x, weight, one), x.scale, weight.scale)`.
    """
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    assert row_scale.shape == (num_rows,)
    assert col_scale.shape == (2 * width,)
    values = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=gate_up.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=gate_up.device)
    launch = rows_of(num_rows, width)
    grid = (triton.cdiv(num_rows, launch["ROWS"]),)
    _geglu_float8_kernel[grid](gate_up, row_scale, col_scale, values, scale, num_rows, **launch)
    return Quantized(values=values, scale=scale, dtype=gate_up.dtype)


def dense_mlp(
    x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, progress: Tensor, *, config: DenseConfig | None = None
) -> Tensor:
    """Return geglu(x @ gate_up_weight.T) @ down_weight.T.

    x: (M, D), gate_up_weight: (2F, D), gate rows first, down_weight: (D, F) → (M, D). progress: (2,) int32 counters of
    one launch, zero before and after it; launches that share them must not run at the same time. Few tokens, many
    tokens and float32 use library products. `config` has the tiles, by default those of `configs.dense_config`.

    Example: `dense_mlp(dense_in, gate_up, down, progress=torch.zeros(2, dtype=torch.int32, device="cuda"))`.
    """
    num_rows, width = x.shape
    hidden_width = down_weight.shape[1]
    assert gate_up_weight.shape == (2 * hidden_width, width)
    assert all(tensor.is_contiguous() for tensor in (x, gate_up_weight, down_weight))
    config = config or dense_config(num_rows, x.device, format_of(x))
    if config is None:
        return torch.mm(geglu(torch.mm(x, gate_up_weight.T)), down_weight.T)
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


@triton.jit(do_not_specialize=["num_rows"])
def _geglu_float8_kernel(
    gate_up: tl.tensor,
    row_scale: tl.tensor,
    col_scale: tl.tensor,
    values: tl.tensor,
    scale: tl.tensor,
    num_rows: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    factor = tl.load(row_scale + row, mask=row < num_rows, other=0.0)[:, None]
    gate = load_rows(gate_up, row, num_rows, WIDTH, BLOCK, 2 * WIDTH)
    up = load_rows(gate_up + WIDTH, row, num_rows, WIDTH, BLOCK, 2 * WIDTH)
    # Each row loads all scales of columns: values loaded once for all rows would have to be exchanged between threads.
    gate_scale = load_rows(col_scale, row, num_rows, WIDTH, BLOCK, 0)
    up_scale = load_rows(col_scale + WIDTH, row, num_rows, WIDTH, BLOCK, 0)
    hidden = ()
    for i in tl.static_range(len(gate)):
        each = (gate[i] * (factor * gate_scale[i]), up[i] * (factor * up_scale[i]))
        hidden += (gelu_tanh_times(*each, gate_up.dtype.element_ty).to(tl.float32),)  # type: ignore[assignment]
    store_rows_rounded(values, scale, row, num_rows, hidden, WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def _geglu_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (cols < width)
    gate = tl.load(gate_up + row * 2 * width + cols, mask=mask).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + cols, mask=mask).to(tl.float32)
    tl.store(out + row * width + cols, gelu_tanh_times(gate, up, out.dtype.element_ty), mask=mask)


@triton.jit
def _multiply_tile(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    row_inside: tl.tensor,
    cols: tl.tensor,
    WIDTH: tl.constexpr,  # of x
    OUT: tl.constexpr,  # columns of the result
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
) -> None:
    """Compute a tile of x @ weight.T. If GATED, the weight has the rows of gate, then those of up; apply GeGLU."""
    depth = tl.arange(0, DEPTH)
    col_inside = inside(cols, OUT, OUT % COLS == 0)
    weights = weight + cols[:, None].to(tl.int64) * WIDTH + depth[None, :]
    inputs = x + rows[:, None].to(tl.int64) * WIDTH + depth[None, :]
    sums = tl.zeros([COLS, ROWS], tl.float32)
    up_sums = tl.zeros([COLS, ROWS], tl.float32)
    for start in range(0, WIDTH, DEPTH):
        left = inside(depth, WIDTH - start, WIDTH % DEPTH == 0)[None, :]
        w = tl.load(weights + start, mask=col_inside[:, None] & left, other=0.0)
        if GATED:
            up_w = tl.load(weights + OUT * WIDTH + start, mask=col_inside[:, None] & left, other=0.0)
        tokens = tl.load(inputs + start, mask=row_inside[:, None] & left, other=0.0).T
        sums = tl.dot(w, tokens, sums, input_precision="ieee")
        if GATED:
            up_sums = tl.dot(up_w, tokens, up_sums, input_precision="ieee")
    dtype: tl.constexpr = out.dtype.element_ty
    at = rows[:, None].to(tl.int64) * OUT + cols[None, :]
    values = gelu_tanh_times(sums, up_sums, dtype) if GATED else sums.to(dtype)
    tl.store(out + at, values.T, mask=row_inside[:, None] & col_inside[None, :])


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
        _multiply_tile(
            x, gate_up_weight, hidden, rows, row_inside, cols, WIDTH, HIDDEN, ROWS, GATE_UP_COLS, DEPTH, True
        )
        tl.debug_barrier()  # all threads store before one thread counts the tile
        tl.atomic_add(stored, 1, sem="release")
        tile = tl.atomic_add(taken, 1)
    # Before this tile was taken, running programs had taken every gate and up tile. So all of those will be stored,
    # even if other programs of this launch still wait for a multiprocessor.
    if tile < all_tiles:
        while tl.atomic_add(stored, 0, sem="acquire") < gate_up_tiles:
            pass
    while tile < all_tiles:
        at = tile - gate_up_tiles
        rows = at % row_blocks * ROWS + tl.arange(0, ROWS)
        cols = at // row_blocks * DOWN_COLS + tl.arange(0, DOWN_COLS)
        row_inside = inside(rows, num_rows, EXACT_ROWS)
        _multiply_tile(hidden, down_weight, out, rows, row_inside, cols, HIDDEN, WIDTH, ROWS, DOWN_COLS, DEPTH, False)
        tile = tl.atomic_add(taken, 1)
    # Every program ends by taking a number beyond the last tile. The last program to do so resets the counters.
    if tile == all_tiles + tl.num_programs(0) - 1:
        tl.store(taken, 0)
        tl.store(stored, 0)
