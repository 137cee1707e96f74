"""Products with the B of adapters of linear layers that have the same input.

The B (N_l, rank) of all layers are stacked in one matrix. Each layer has its own `rank` columns of `narrow`, which is A
of all layers times the input. Memory bandwidth limits these products. Library products reach a third to a half of it,
and need one launch per layer. Reference: `reference.py`.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLS = 64, 128  # of a tile
_LEAST = 16  # depth of a product on tensor cores
_MOST_LAYERS, _MOST_RANK = 3, 64


def fits(num_layers: int, rank: int) -> bool:
    """Return True if `expand` supports `num_layers` layers of this rank.

    Example: `fits(3, 8)` is True.
    """
    return num_layers <= _MOST_LAYERS and rank <= _MOST_RANK


def expand(narrow: Tensor, b: Tensor, widths: Sequence[int]) -> Tensor:
    """Return narrow_l B_lᵀ of each layer l, next to each other: (M, N).

    narrow: (M, layers · rank). b: (N, rank), the rows of each layer's B. widths: the layers' numbers of rows, N in all.

    Example: `expand(x @ a.T, b, [4096, 2048, 2048])`.
    """
    (num_rows, _), (num_cols, rank), num_layers = narrow.shape, b.shape, len(widths)
    assert fits(num_layers, rank)
    assert sum(widths) == num_cols
    assert narrow.shape[1] == num_layers * rank
    assert narrow.is_contiguous()
    assert b.is_contiguous()
    out = narrow.new_empty(num_rows, num_cols)
    grid = sum(triton.cdiv(width, _COLS) for width in widths), triton.cdiv(num_rows, _ROWS)
    _expand_kernel[grid](
        narrow,
        b,
        out,
        num_rows,
        num_cols,
        widths[0],
        widths[1] if num_layers > 1 else 0,
        LAYERS=num_layers,
        RANK=rank,
        DEPTH=max(_LEAST, triton.next_power_of_2(rank)),
        ROWS=_ROWS,
        COLS=_COLS,
    )
    return out


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
    rows = tl.load(at, is_row[:, None] & is_depth[None, :], 0.0)
    product = tl.dot(rows, weights, input_precision="ieee")
    place = out + row.to(tl.int64)[:, None] * num_cols + col[None, :]
    tl.store(place, product.to(out.dtype.element_ty), is_row[:, None] & is_col[None, :])
