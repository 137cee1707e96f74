"""Two gradients of the experts' adapters from one read of the rows. Reference: `reference.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLS = 128, 128  # of a tile
_PARTS, _VALUES = 8, 512  # of a block that is summed at once
_LEAST = 16  # depth of a product on tensor cores


def contract_and_outer(
    rows: Tensor, narrow: Tensor, weights: Tensor, ends: Tensor, *, scale: float, by_row: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return two products of the rows: with their experts' weights, (R, rank), and with `narrow`, (E, N, rank).

    The first is scale · by_row · row @ W_e, with the expert e of each row. The second is rowsᵀ @ narrow over the rows
    of each expert; if the weights are transposed in memory, so is this product. rows: (R, N), and narrow: (R, rank),
    grouped by expert. weights: (E, N, rank), contiguous or transposed. ends: (E,) int32, where the group of each expert
    ends. by_row: (R,). Sums are in float32, in a fixed order.

    Example: `of_narrow, of_b = contract_and_outer(of_out, narrow, experts.gate_up_lora_b, groups.ends, scale=2.0)`.
    """
    (num_rows, width), (num_experts, _, rank) = rows.shape, weights.shape
    flipped = not weights.is_contiguous()
    stored = weights.mT if flipped else weights
    assert all(x is None or x.is_contiguous() for x in (rows, narrow, stored, ends, by_row))
    num_tiles = num_rows // _ROWS + num_experts  # an upper bound
    parts = torch.empty(num_tiles, width * rank, dtype=torch.float32, device=rows.device)
    of_narrow, outer = torch.empty_like(narrow), torch.empty_like(stored)
    sizes = {"EXPERTS": num_experts, "EXPERT_BLOCK": triton.next_power_of_2(num_experts), "ROWS": _ROWS}
    _contract_and_outer_kernel[(num_tiles,)](
        rows,
        narrow,
        stored,
        ends,
        by_row,
        of_narrow,
        parts,
        scale,
        WIDTH=width,
        RANK=rank,
        DEPTH=max(_LEAST, triton.next_power_of_2(rank)),
        FLIPPED=flipped,
        COLS=_COLS,
        **sizes,
        num_warps=8,
        num_stages=3,
    )
    _add_tiles_kernel[num_experts, triton.cdiv(width * rank, _VALUES)](
        parts, ends, outer, SIZE=width * rank, PARTS=_PARTS, VALUES=_VALUES, **sizes
    )
    return of_narrow, outer.mT if flipped else outer


@triton.jit
def _contract_and_outer_kernel(
    rows: tl.tensor,
    narrow: tl.tensor,
    weights: tl.tensor,
    ends: tl.tensor,
    by_row: tl.tensor,
    of_narrow: tl.tensor,
    parts: tl.tensor,
    scale: tl.tensor,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    DEPTH: tl.constexpr,
    FLIPPED: tl.constexpr,
    COLS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Sum over all columns for `of_narrow`, and over the rows of this program's tile for `parts`."""
    tile = tl.program_id(0)
    expert, start, end = _find_tile(ends, tile, EXPERTS, EXPERT_BLOCK, ROWS)
    if expert < EXPERTS:
        row, depth = start + tl.arange(0, ROWS), tl.arange(0, DEPTH)
        is_row, is_depth = row < end, depth < RANK
        at = row[:, None] * RANK + depth[None, :]
        in_narrow = is_row[:, None] & is_depth[None, :]
        low = tl.load(narrow + at, in_narrow, 0.0)
        total = tl.zeros((ROWS, DEPTH), tl.float32)
        for begin in range(0, WIDTH, COLS):
            col = begin + tl.arange(0, COLS)
            is_col = col < WIDTH
            place = rows + row.to(tl.int64)[:, None] * WIDTH + col[None, :]
            block = tl.load(place, is_row[:, None] & is_col[None, :], 0.0)
            if FLIPPED:
                offset = depth[None, :] * WIDTH + col[:, None]
            else:
                offset = col[:, None] * RANK + depth[None, :]
            inside = is_col[:, None] & is_depth[None, :]
            adapter = tl.load(weights + expert * (WIDTH * RANK) + offset, inside, 0.0)
            total = tl.dot(block, adapter, total, input_precision="ieee")
            part = tl.dot(block.T, low, input_precision="ieee")
            tl.store(parts + tile.to(tl.int64) * (WIDTH * RANK) + offset, part, inside)
        factor = scale if by_row is None else scale * tl.load(by_row + row, is_row, 0.0)[:, None]
        tl.store(of_narrow + at, (total * factor).to(of_narrow.dtype.element_ty), in_narrow)


@triton.jit
def _add_tiles_kernel(
    parts: tl.tensor,
    ends: tl.tensor,
    out: tl.tensor,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    VALUES: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Add the parts of the tiles of an expert."""
    expert, experts = tl.program_id(0), tl.arange(0, EXPERT_BLOCK)
    group_ends = tl.load(ends + experts, experts < EXPERTS, 0)
    starts = tl.load(ends + experts - 1, (experts > 0) & (experts < EXPERTS), 0)
    num_tiles = tl.cdiv(group_ends - starts, ROWS)
    first = tl.sum(tl.where(experts < expert, num_tiles, 0), 0)
    end = first + tl.sum(tl.where(experts == expert, num_tiles, 0), 0)
    value = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    is_value = value < SIZE
    total = tl.zeros((VALUES,), tl.float32)
    for begin in range(first, end, PARTS):
        tile = begin + tl.arange(0, PARTS)
        at = parts + tile.to(tl.int64)[:, None] * SIZE + value[None, :]
        total += tl.sum(tl.load(at, (tile < end)[:, None] & is_value[None, :], 0.0), 0)
    tl.store(out + expert.to(tl.int64) * SIZE + value, total.to(out.dtype.element_ty), is_value)


@triton.jit
def _find_tile(
    ends: tl.tensor, tile: tl.tensor, EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the expert of tile number `tile`, the tile's first row, and the end of the expert's rows.

    Tiles of an expert begin ROWS rows apart. If there is no tile with this number, the expert is EXPERTS or more.
    """
    experts = tl.arange(0, EXPERT_BLOCK)
    group_ends = tl.load(ends + experts, experts < EXPERTS, 0)
    starts = tl.load(ends + experts - 1, (experts > 0) & (experts < EXPERTS), 0)
    num_tiles = tl.cdiv(group_ends - starts, ROWS)
    tile_ends = tl.cumsum(num_tiles, 0)
    expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    is_own = experts == expert
    start = tl.sum(tl.where(is_own, starts + (tile - tile_ends + num_tiles) * ROWS, 0), 0)
    return expert, start, tl.sum(tl.where(is_own, group_ends, 0), 0)
