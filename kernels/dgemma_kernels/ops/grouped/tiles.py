"""The tiles of grouped products: a tile is neighbouring rows (tokens) of one expert.

`choices.group_choices` lists the tiles of `hopper`. The other kernels find a tile from its number.
"""

import triton
import triton.language as tl

SMALL_TILE, LARGE_TILE = 128, 256  # rows
MORE_ROWS = 32  # additional rows that a tile may have if this saves a tile
_FEW_ROWS = 144  # per expert on average, up to which tiles are small


def rows_per_tile(num_rows: int, num_experts: int) -> int:
    """Return the rows of a tile for `num_rows` rows in total: 128 if experts have few on average, else 256.

    Example: `rows_per_tile(77_760, 128)` is 256.
    """
    return SMALL_TILE if num_rows <= _FEW_ROWS * num_experts else LARGE_TILE


@triton.jit
def list_tiles(
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


@triton.jit
def find_tile(
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
