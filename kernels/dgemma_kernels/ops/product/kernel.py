"""Products that are slow in cuBLAS: of one row, or next to other kernels. Reference: `reference.py`.

The product of one row is limited by reading the weight. A program loads its rows of the weight at once, into registers.
On Hopper it does so before it waits for the previous kernel (programmatic dependent launch), so memory is busy while
small kernels before it run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dgemma_kernels.blocks import inside, wait_for_launches_before
from dgemma_kernels.formats.float8 import Quantized, values_and_scale
from dgemma_kernels.ops.configs import dependent_launch

_DEPTH = 1024  # columns per load
# Programs have two warps if a float8 weight has at least this many rows. Then a thread loads 16 bytes at once.
_MANY = 16_384
_TILE = 128  # rows, columns and depth of a tile of float8 operands


def multiply_row(x: Tensor | Quantized, weight: Tensor | Quantized, *, early: bool = True) -> Tensor:
    """Return x @ weight.T of one row: (1, K), (N, K) → (1, N). Sums are float32 and round once.

    The weight may be float8, with a plain or a float8 row. With `early`, programs start during the previous kernel.

    Example: `multiply_row(x[:1], layer.qkv)`.
    """
    (row, row_scale), (matrix, scale) = values_and_scale(x), values_and_scale(weight)
    assert x.shape == (1, weight.shape[1])
    assert row.is_contiguous()
    assert matrix.is_contiguous()
    num_cols, width = weight.shape
    out = torch.empty(1, num_cols, dtype=x.dtype, device=row.device)
    at_once = max(1, 12 // triton.cdiv(width, _DEPTH))  # so that four programs share a multiprocessor's registers
    cols = min(4, 1 << (at_once.bit_length() - 1))
    _multiply_row_kernel[(triton.cdiv(num_cols, cols),)](
        row,
        row_scale,
        matrix,
        scale,
        out,
        num_cols,
        WIDTH=width,
        COLS=cols,
        DEPTH=_DEPTH,
        EXACT=num_cols % cols == 0,
        num_warps=2 if scale is not None and num_cols >= _MANY else 4,
        maxnreg=128,
        **(dependent_launch(row.device) if early else {"DEPENDENT": False}),
    )
    return out


def multiply_beside(x: Quantized, weight: Quantized) -> Tensor:
    """Return the product of the values of float8 operands, without their scales: (M, K), (N, K) → (M, N).

    It is for the second stream of a forward. A program of a library's product uses all registers of a multiprocessor.
    So small kernels on the first stream wait for it. This product runs on fewer multiprocessors, and its programs leave
    registers to others.

    Example: `multiply_beside(dense_in, layer.gate_up)`.
    """
    (num_rows, depth), num_cols = x.shape, weight.shape[0]
    out = torch.empty(num_rows, num_cols, dtype=x.dtype, device=x.values.device)
    _multiply_tiles_kernel[(triton.cdiv(num_rows, _TILE), triton.cdiv(num_cols, _TILE))](
        *(TensorDescriptor.from_tensor(each.values, [_TILE, _TILE]) for each in (x, weight)),
        out,
        num_rows,
        num_cols,
        depth,
        TILE=_TILE,
        num_warps=8,
        num_stages=4,
    )
    return out


@triton.jit
def _multiply_tiles_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_cols: tl.tensor,
    depth: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    first_row, first_col = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    sums = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, depth, TILE):
        rows = x.load([first_row, start])  # zeros beyond the last row, column or depth
        cols = weight.load([first_col, start])
        sums = tl.dot(rows, cols.T, sums)
    row, col = first_row + tl.arange(0, TILE), first_col + tl.arange(0, TILE)
    at = row.to(tl.int64)[:, None] * num_cols + col[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=(row < num_rows)[:, None] & (col < num_cols)[None, :])


@triton.jit(do_not_specialize=["num_cols"])
def _multiply_row_kernel(
    x: tl.tensor,
    x_scale: tl.tensor | None,
    weight: tl.tensor,
    weight_scale: tl.tensor | None,
    out: tl.tensor,
    num_cols: tl.tensor,
    WIDTH: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    depth = tl.arange(0, DEPTH)
    col_inside = inside(col, num_cols, EXACT)
    matrix = weight + col[:, None].to(tl.int64) * WIDTH + depth[None, :]
    parts = ()
    for start in tl.static_range(0, WIDTH, DEPTH):
        left = inside(depth, WIDTH - start, WIDTH - start >= DEPTH)
        parts += (tl.load(matrix + start, mask=col_inside[:, None] & left[None, :], other=0.0),)  # type: ignore[assignment]
    if weight_scale is not None:
        scale = tl.load(weight_scale + col, mask=col_inside, other=0.0)
    wait_for_launches_before(DEPENDENT)
    sums = tl.zeros([COLS, DEPTH], tl.float32)
    for at in tl.static_range(len(parts)):
        left = inside(depth, WIDTH - at * DEPTH, WIDTH - at * DEPTH >= DEPTH)
        inputs = tl.load(x + at * DEPTH + depth, mask=left, other=0.0)
        sums += parts[at].to(tl.float32) * inputs.to(tl.float32)[None, :]
    result = tl.sum(sums, 1)
    if weight_scale is not None:
        result *= scale
    if x_scale is not None:
        result *= tl.load(x_scale)
    tl.store(out + col, result.to(out.dtype.element_ty), mask=col_inside)
