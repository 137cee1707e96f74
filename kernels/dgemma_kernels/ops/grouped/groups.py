"""Choices of experts, grouped by expert for training, and the tiles of each group: neighbouring rows of one expert.

Groups are made by a counting sort in two launches. Reference: `reference.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SMALL_TILE, LARGE_TILE = 128, 256  # rows
MORE_ROWS = 32  # additional rows that a tile may have if this saves a tile
_FEW_ROWS = 144  # per expert on average, up to which tiles are small
_MOST_EXPERTS = 512
_CHOICES = 256  # per program in the sort
_BLOCKS = 64  # blocks of choices whose counts are added at once
_TILES = 4  # listed at once


def rows_per_tile(num_rows: int, num_experts: int) -> int:
    """Return the rows of a tile for `num_rows` rows in total: 128 if experts have few on average, else 256.

    Example: `rows_per_tile(77_760, 128)` is 256.
    """
    return SMALL_TILE if num_rows <= _FEW_ROWS * num_experts else LARGE_TILE


def fits_groups(num_experts: int) -> bool:
    """Return True if `group_choices` supports `num_experts` experts: 2, 4, 8, ... up to 512.

    Example: `fits_groups(128)` is True.
    """
    return 2 <= num_experts <= _MOST_EXPERTS and num_experts & (num_experts - 1) == 0


def group_choices(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort choices (M, A) by expert: return the choice of each row (R,), the row of each choice (M, A), ends and tiles.

    The choices of an expert keep their order. ends: (E,) int32, where the rows of each expert end. tiles: (1 + T, 3)
    int32, for `multiply`. The first row begins with the number of tiles and a zero. Every other row is (expert, first
    row, rows) of a tile. T is at least the number of tiles, which the host does not know.

    Example: `order, back, ends, tiles = group_choices(experts, 128)`.
    """
    assert experts.is_contiguous()
    assert fits_groups(num_experts)
    count = experts.numel()
    num_blocks = triton.cdiv(count, _CHOICES)
    counts = torch.empty(num_blocks, num_experts, dtype=torch.int32, device=experts.device)
    order, back = torch.empty(count, dtype=torch.int64, device=experts.device), torch.empty_like(experts)
    ends = counts.new_empty(num_experts)
    tile_rows = rows_per_tile(count, num_experts)
    num_tiles = count // (tile_rows + MORE_ROWS) + num_experts
    tiles = counts.new_empty(1 + num_tiles, 3)
    sizes = {"E": num_experts, "CHOICES": _CHOICES}
    _count_choices_kernel[(num_blocks,)](experts, counts, count, **sizes, num_warps=8)
    _place_choices_kernel[(num_blocks,)](
        experts,
        counts,
        order,
        back,
        ends,
        tiles,
        count,
        num_blocks,
        num_tiles,
        tile_rows,
        **sizes,
        BLOCKS=_BLOCKS,
        TILES=_TILES,
        MORE_ROWS=MORE_ROWS,
        num_warps=8,
    )
    return order, back, ends, tiles


@triton.jit
def _load_chosen(
    experts: tl.tensor, count: tl.tensor, E: tl.constexpr, CHOICES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the experts of this program's choices, (CHOICES,), and their one-hot code: (CHOICES, E).

    After the last choice, the expert is E.
    """
    choice = tl.program_id(0) * CHOICES + tl.arange(0, CHOICES)
    chosen = tl.load(experts + choice, choice < count, E).to(tl.int32)
    return chosen, (chosen[:, None] == tl.arange(0, E)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["count"])
def _count_choices_kernel(
    experts: tl.tensor, counts: tl.tensor, count: tl.tensor, E: tl.constexpr, CHOICES: tl.constexpr
) -> None:
    """Count the choices of each expert in this program's block of choices."""
    _, is_chosen = _load_chosen(experts, count, E, CHOICES)
    tl.store(counts + tl.program_id(0) * E + tl.arange(0, E), tl.sum(is_chosen, 0))


@triton.jit(do_not_specialize=["count", "num_blocks", "num_tiles", "tile_rows"])
def _place_choices_kernel(
    experts: tl.tensor,
    counts: tl.tensor,
    order: tl.tensor,
    back: tl.tensor,
    ends: tl.tensor,
    tiles: tl.tensor,
    count: tl.tensor,
    num_blocks: tl.tensor,
    num_tiles: tl.tensor,
    tile_rows: tl.tensor,
    E: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    MORE_ROWS: tl.constexpr,
) -> None:
    """Find the row of each choice in this program's block: after all choices of earlier experts, and earlier choices of
    the same expert. List this program's share of the tiles."""
    block, expert, number = tl.program_id(0), tl.arange(0, E), tl.arange(0, CHOICES)
    chosen, is_chosen = _load_chosen(experts, count, E, CHOICES)
    total, before = tl.zeros((E,), tl.int32), tl.zeros((E,), tl.int32)
    for begin in range(0, num_blocks, BLOCKS):
        others = begin + tl.arange(0, BLOCKS)
        found = tl.load(counts + others[:, None] * E + expert[None, :], (others < num_blocks)[:, None], 0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where((others < block)[:, None], found, 0), 0)
    until = tl.cumsum(total, 0)
    if block == 0:
        tl.store(ends + expert, until)
    for begin in range(block * TILES, num_tiles, num_blocks * TILES):
        _list_tiles(tiles, begin, num_tiles, total, until, tile_rows, E, TILES, MORE_ROWS)
    # Comparing each choice with the earlier ones is cheaper than a running count over a column per expert.
    is_earlier = (chosen[None, :] == chosen[:, None]) & (number[None, :] < number[:, None])
    free = until - total + before
    row = tl.sum(is_chosen * free[None, :], 1) + tl.sum(is_earlier.to(tl.int32), 1)
    choice = block * CHOICES + number
    tl.store(back + choice, row.to(tl.int64), choice < count)
    tl.store(order + row, choice.to(tl.int64), choice < count)


@triton.jit
def _list_tiles(
    tiles: tl.tensor,
    begin: tl.tensor,
    num_tiles: tl.tensor,
    size: tl.tensor,
    end: tl.tensor,
    tile_rows: tl.tensor,
    E: tl.constexpr,
    TILES: tl.constexpr,
    MORE: tl.constexpr,
) -> None:
    """Write tiles from number `begin` on. size, end: (E,), the number of each expert's rows and where they end.

    tiles: (1 + num_tiles, 3) int32. The first row has the number of tiles that exist, and a counter of `hopper` that is
    zero between launches. Every other row is a tile: its expert, first row and number of rows.

    An expert has as few tiles as possible, of at most tile_rows + MORE rows. The first `num_larger` ones have that
    many, the last has the rest, and the others have tile_rows.
    """
    count = tl.cdiv(size, tile_rows + MORE)
    num_larger = tl.cdiv(tl.maximum(size - tile_rows * count - MORE, 0), MORE)
    until = tl.cumsum(count, 0)
    expert, tile = tl.arange(0, E), begin + tl.arange(0, TILES)
    number = tile[:, None] - (until - count)[None, :]  # within the expert's tiles: (TILES, E)
    is_own = (number >= 0) & (number < count[None, :])
    first = number * tile_rows + tl.minimum(number, num_larger[None, :]) * MORE
    rows = tl.where(number < num_larger[None, :], tile_rows + MORE, tile_rows)
    rows = tl.where(number == (count - 1)[None, :], size[None, :] - first, rows)
    at, is_tile = tiles + 3 + tile * 3, tile < num_tiles
    tl.store(at, tl.sum(tl.where(is_own, expert[None, :], 0), 1), is_tile)
    tl.store(at + 1, tl.sum(tl.where(is_own, (end - size)[None, :] + first, 0), 1), is_tile)
    tl.store(at + 2, tl.sum(tl.where(is_own, rows, 0), 1), is_tile)
    if begin == 0:
        tl.store(tiles, tl.sum(count, 0))
        tl.store(tiles + 1, 0)
