"""Products with the B of adapters of linear layers that have the same input, and their gradients.

The B (N_l, rank) of all layers are stacked in one matrix. Each layer has its own `rank` columns of `narrow`, which is A
of all layers times the input. Memory bandwidth limits these products. Library products reach a third to a half of it,
and need one to three launches per layer. `expand_gradient` reads the gradient of the outputs once, and returns the
gradients of `narrow` and of B. It splits its sums, and a second launch adds the parts in a fixed order. Reference:
`reference.py`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLS = 64, 128  # of a tile
_GRAD_ROWS = 128  # of a tile of the gradient
_SPLIT = 2048  # columns of a program of the gradient of `expand`
_PARTS, _VALUES = 16, 256  # of a block that is summed at once
_LEAST = 16  # depth of a product on tensor cores
_MOST_LAYERS, _MOST_RANK = 3, 64


def fits(num_layers: int, rank: int) -> bool:
    """Return True if these kernels support `num_layers` layers of this rank.

    Example: `fits(3, 8)` is True.
    """
    return num_layers <= _MOST_LAYERS and rank <= _MOST_RANK


def expand(narrow: Tensor, b: Tensor, widths: Sequence[int]) -> Tensor:
    """Return narrow_l B_lᵀ of each layer l, next to each other: (M, N).

    narrow: (M, layers · rank). b: (N, rank), the rows of each layer's B. widths: the layers' numbers of rows, N in all.

    Example: `expand(x @ a.T, b, [4096, 2048, 2048])`.
    """
    rank = _check(narrow, b, widths)
    num_rows, num_cols = narrow.shape[0], b.shape[0]
    out = narrow.new_empty(num_rows, num_cols)
    grid = sum(triton.cdiv(width, _COLS) for width in widths), triton.cdiv(num_rows, _ROWS)
    _expand_kernel[grid](
        narrow,
        b,
        out,
        num_rows,
        num_cols,
        *_first_two(widths),
        LAYERS=len(widths),
        RANK=rank,
        DEPTH=max(_LEAST, triton.next_power_of_2(rank)),
        ROWS=_ROWS,
        COLS=_COLS,
    )
    return out


def expand_gradient(
    grad: Tensor, narrow: Tensor, b: Tensor, widths: Sequence[int], *, scale: float
) -> tuple[Tensor, Tensor]:
    """Return scale · the gradient of `narrow` (M, layers · rank), and the gradient of b (N, rank).

    grad: (M, N), the gradient of `expand(narrow, b, widths)`. Its rows may have gaps between them.

    Example: `of_narrow, of_b = expand_gradient(grad, narrow, b, [4096, 2048, 2048], scale=2.0)`.
    """
    rank = _check(narrow, b, widths)
    num_rows, num_cols = grad.shape
    assert (num_rows, num_cols, 1) == (narrow.shape[0], b.shape[0], grad.stride(1))
    splits = [triton.cdiv(width, _SPLIT) for width in widths]
    num_blocks = triton.cdiv(num_rows, _GRAD_ROWS)
    of_narrow_parts = torch.empty(sum(splits), num_rows, rank, dtype=torch.float32, device=grad.device)
    of_b_parts = torch.empty(num_blocks, num_cols, rank, dtype=torch.float32, device=grad.device)
    sizes = {"LAYERS": len(widths), "RANK": rank}
    _expand_gradient_kernel[sum(splits), num_blocks](
        grad,
        narrow,
        b,
        of_narrow_parts,
        of_b_parts,
        num_rows,
        num_cols,
        grad.stride(0),
        *_first_two(widths),
        **sizes,
        DEPTH=max(_LEAST, triton.next_power_of_2(rank)),
        ROWS=_GRAD_ROWS,
        COLS=_COLS,
        SPLIT=_SPLIT,
        num_warps=8,
        num_stages=3,
    )
    of_narrow, of_b = torch.empty_like(narrow), torch.empty_like(b)
    grid = triton.cdiv(of_b.numel(), _VALUES) + triton.cdiv(of_narrow.numel(), _VALUES)
    _add_parts_kernel[(grid,)](
        of_narrow_parts,
        of_b_parts,
        of_narrow,
        of_b,
        scale,
        num_rows,
        num_cols,
        num_blocks,
        sum(splits),
        *_first_two(splits),
        **sizes,
        SPLITS=triton.next_power_of_2(max(splits)),
        PARTS=_PARTS,
        VALUES=_VALUES,
    )
    return of_narrow, of_b


def _first_two(sizes: Sequence[int]) -> tuple[int, int]:
    return sizes[0], sizes[1] if len(sizes) > 1 else 0


def _check(narrow: Tensor, b: Tensor, widths: Sequence[int]) -> int:
    """Return the rank."""
    (num_rows, rank), num_layers = b.shape, len(widths)
    assert fits(num_layers, rank)
    assert sum(widths) == num_rows
    assert narrow.shape[1] == num_layers * rank
    assert narrow.is_contiguous()
    assert b.is_contiguous()
    return rank


@triton.jit
def _find_columns(
    block: tl.tensor, num_cols: tl.tensor, first: tl.tensor, second: tl.tensor, LAYERS: tl.constexpr, SIZE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the layer of a block of SIZE columns, the block's first column, and the end of the layer's columns.

    Each layer begins a new block. first, second: the widths of the first two layers.
    """
    layer, start, end = block * 0, block * SIZE, num_cols
    if LAYERS > 1:
        before = tl.cdiv(first, SIZE)
        is_later = block >= before
        layer = is_later.to(tl.int32)
        start = tl.where(is_later, first + (block - before) * SIZE, start)
        end = tl.where(is_later, num_cols, first)
    if LAYERS > 2:
        before = tl.cdiv(first, SIZE) + tl.cdiv(second, SIZE)
        is_later = block >= before
        end = tl.where(is_later, num_cols, tl.minimum(end, first + second))
        layer += is_later.to(tl.int32)
        start = tl.where(is_later, first + second + (block - before) * SIZE, start)
    return layer, start, end


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    narrow: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_cols: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    LAYERS: tl.constexpr,
    RANK: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    layer, start, end = _find_columns(tl.program_id(0), num_cols, first, second, LAYERS, COLS)
    col, depth = start + tl.arange(0, COLS), tl.arange(0, DEPTH)
    is_col, is_depth = col < end, depth < RANK
    weights = tl.load(b + col[None, :] * RANK + depth[:, None], is_col[None, :] & is_depth[:, None], 0.0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    at = narrow + row[:, None] * (LAYERS * RANK) + layer * RANK + depth[None, :]
    product = tl.dot(tl.load(at, is_row[:, None] & is_depth[None, :], 0.0), weights)
    place = out + row.to(tl.int64)[:, None] * num_cols + col[None, :]
    tl.store(place, product.to(out.dtype.element_ty), is_row[:, None] & is_col[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _expand_gradient_kernel(
    grad: tl.tensor,
    narrow: tl.tensor,
    b: tl.tensor,
    of_narrow_parts: tl.tensor,
    of_b_parts: tl.tensor,
    num_rows: tl.tensor,
    num_cols: tl.tensor,
    row_stride: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    LAYERS: tl.constexpr,
    RANK: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Sum over SPLIT columns for `narrow`, and over ROWS rows for `b`."""
    split, block = tl.program_id(0), tl.program_id(1)
    layer, start, end = _find_columns(split, num_cols, first, second, LAYERS, SPLIT)
    row, depth = block * ROWS + tl.arange(0, ROWS), tl.arange(0, DEPTH)
    is_row, is_depth = row < num_rows, depth < RANK
    at = narrow + row[:, None] * (LAYERS * RANK) + layer * RANK + depth[None, :]
    low = tl.load(at, is_row[:, None] & is_depth[None, :], 0.0)
    grad_rows = grad + row.to(tl.int64)[:, None] * row_stride
    of_b_rows = of_b_parts + block.to(tl.int64) * num_cols * RANK
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    for begin in range(start, tl.minimum(start + SPLIT, end), COLS):
        col = begin + tl.arange(0, COLS)
        is_col = col < end
        tile = tl.load(grad_rows + col[None, :], is_row[:, None] & is_col[None, :], 0.0)
        in_b = is_col[:, None] & is_depth[None, :]
        weights = tl.load(b + col[:, None] * RANK + depth[None, :], in_b, 0.0)
        total = tl.dot(tile, weights, total)
        of_b = tl.dot(tile.T, low)
        tl.store(of_b_rows + col[:, None] * RANK + depth[None, :], of_b, in_b)
    place = (split * num_rows + row).to(tl.int64)[:, None] * RANK + depth[None, :]
    tl.store(of_narrow_parts + place, total, is_row[:, None] & is_depth[None, :])


@triton.jit
def _add_all(
    parts: tl.tensor,
    out: tl.tensor,
    num_parts: tl.tensor,
    size: tl.tensor,
    PARTS: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    """Add the parts (num_parts, size) of this program's values."""
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_value = value < size
    total = tl.zeros((VALUES,), tl.float32)
    for begin in range(0, num_parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        at = parts + part.to(tl.int64)[:, None] * size + value[None, :]
        total += tl.sum(tl.load(at, (part < num_parts)[:, None] & is_value[None, :], 0.0), 0)
    tl.store(out + value, total.to(out.dtype.element_ty), is_value)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "num_splits", "first", "second"])
def _add_parts_kernel(
    of_narrow_parts: tl.tensor,
    of_b_parts: tl.tensor,
    of_narrow: tl.tensor,
    of_b: tl.tensor,
    scale: tl.tensor,
    num_rows: tl.tensor,
    num_cols: tl.tensor,
    num_blocks: tl.tensor,
    num_splits: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    LAYERS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    """Add the parts of both gradients: of b over the blocks of rows, of narrow over the splits of each layer.

    first, second: the numbers of splits of the first two layers.
    """
    num_programs = tl.cdiv(num_cols * RANK, VALUES)
    if tl.program_id(0) < num_programs:
        _add_all(of_b_parts, of_b, num_blocks, num_cols * RANK, PARTS, VALUES)
    else:
        value = (tl.program_id(0) - num_programs) * VALUES + tl.arange(0, VALUES)
        row, place = value // (LAYERS * RANK), value % (LAYERS * RANK)
        layer = place // RANK
        is_value = row < num_rows
        start = tl.where(layer == 0, 0, tl.where(layer == 1, first, first + second))
        count = tl.where(layer == LAYERS - 1, num_splits - start, tl.where(layer == 0, first, second))
        total = tl.zeros((VALUES,), tl.float32)
        for split in tl.static_range(SPLITS):
            at = ((start + split) * num_rows + row).to(tl.int64) * RANK + place % RANK
            total += tl.load(of_narrow_parts + at, is_value & (split < count), 0.0)
        tl.store(of_narrow + value, (total * scale).to(of_narrow.dtype.element_ty), is_value)
