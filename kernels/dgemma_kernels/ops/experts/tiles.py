"""The work of one program of `kernel` on its tile: rows of one expert times a block of columns of its weights.

Plain and float8 weights share a function; scales of plain weights are None. Packed and four-bit
weights have functions of their own. Tuples group the arguments and do not change the compiled code.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from dgemma_kernels.blocks import float8_scale, gelu_tanh_times, inside
from dgemma_kernels.formats.fourbit import multiply_four_bit
from dgemma_kernels.formats.packed import Weights, multiply_packed


class ExpertTile(NamedTuple):
    """One entry of `ExpertTiles`: rows of one expert, neighbours in the order of `ExpertTiles.pairs`."""

    expert: tl.tensor
    first: tl.tensor
    num_rows: tl.tensor


class Values(NamedTuple):
    """Values, and their scales if they are float8, else None."""

    data: tl.tensor
    scale: tl.tensor


class Rows(NamedTuple):
    """A block of a tile's rows: the tile's first row, the offsets from it, and a mask of those inside the tile."""

    first: tl.tensor
    slots: tl.tensor
    inside: tl.tensor


class Cols(NamedTuple):
    """A block of columns: the first, each of them, and a mask of those inside the matrix."""

    first: tl.tensor
    each: tl.tensor
    inside: tl.tensor


class Sizes(NamedTuple):
    """The widths of a token and of hidden values; rows, columns and depth of a tile."""

    WIDTH: tl.constexpr
    HIDDEN: tl.constexpr
    ROWS: tl.constexpr
    COLS: tl.constexpr
    DEPTH: tl.constexpr


@triton.jit
def load_tile(tiles: tl.tensor, number: tl.tensor, max_tiles: tl.tensor) -> ExpertTile:
    """Load a tile; beyond `max_tiles` it has no rows. `max_tiles` is None if the tile is known to exist."""
    at = tiles + number * 3
    there = None if max_tiles is None else number < max_tiles
    other = None if max_tiles is None else 0
    return ExpertTile(tl.load(at, there, other), tl.load(at + 1, there, other), tl.load(at + 2, there, other))


@triton.jit
def _rows_of(tile: ExpertTile, START: tl.constexpr, ROWS: tl.constexpr) -> Rows:
    slots = START + tl.arange(0, ROWS)
    return Rows(tile.first, slots, slots < tile.num_rows)


@triton.jit
def _cols_from(first: tl.tensor, LIMIT: tl.constexpr, COLS: tl.constexpr) -> Cols:
    each = first + tl.arange(0, COLS)
    return Cols(first, each, inside(each, LIMIT, LIMIT % COLS == 0))


@triton.jit
def _token_rows(x: tl.tensor, pairs: tl.tensor, rows: Rows, WIDTH: tl.constexpr, NUM_ACTIVE: tl.constexpr) -> tl.tensor:
    """Return a column of pointers to the rows' tokens."""
    token = tl.load(pairs + rows.first + rows.slots, mask=rows.inside, other=0) // NUM_ACTIVE
    return x + token[:, None].to(tl.int64) * WIDTH


@triton.jit
def _hidden_rows(hidden: tl.tensor, rows: Rows, HIDDEN: tl.constexpr) -> tl.tensor:
    """Return a column of pointers to the rows."""
    return hidden + (rows.first + rows.slots)[:, None].to(tl.int64) * HIDDEN


@triton.jit
def _load_scales(hidden_scale: tl.tensor, rows: Rows, HIDDEN: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Load the scales of all blocks of these rows, (rows, blocks rounded up to a power of two).

    All scales are loaded before the loop. Prefetching one block ahead would still stall on L2 in every iteration.
    """
    BLOCKS: tl.constexpr = triton.cdiv(HIDDEN, BLOCK)
    block = tl.arange(0, triton.next_power_of_2(BLOCKS))[None, :]
    row = (rows.first + rows.slots)[:, None]
    return tl.load(hidden_scale + row * BLOCKS + block, mask=rows.inside[:, None] & (block < BLOCKS), other=0.0)


@triton.jit
def _add_products(
    sums: tl.tensor, w: tl.tensor, rows: tl.tensor, scales: tl.tensor, block: tl.tensor, ONE_SCALE: tl.constexpr
) -> tl.tensor:
    """Return sums + w @ rows; for float8, the products of a block are multiplied by the rows' scales of that block.

    Hopper accumulates float8 products with 14 bits. So only the products of one block are accumulated that way, and
    blocks are added in float32. (`max_num_imprecise_acc` does the same, but waits after each instruction.) With
    ONE_SCALE all products are accumulated that way, as in library products.
    """
    if ONE_SCALE or not w.dtype.is_fp8():
        sums = tl.dot(w, rows, sums, input_precision="ieee")
    elif scales is None:
        sums += tl.dot(w, rows)
    else:
        scale = tl.sum(tl.where(tl.arange(0, scales.shape[1])[None, :] == block, scales, 0.0), 1)
        sums += tl.dot(w, rows) * scale[None, :]
    return sums


@triton.jit
def _store_geglu(
    out: Values,
    gate: tl.tensor,
    up: tl.tensor,
    gate_scale: tl.tensor,
    up_scale: tl.tensor,
    x_scale: tl.tensor,
    pairs: tl.tensor,
    rows: Rows,
    cols: Cols,
    HIDDEN: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
) -> None:
    row = rows.first + rows.slots
    dtype = out.data.dtype.element_ty
    if x_scale is not None:
        # Loaded again, with a cache modifier: without it Triton would reuse the first load and keep it in 40 registers.
        token = tl.load(pairs + row, mask=rows.inside, other=0, cache_modifier=".ca") // NUM_ACTIVE
        token_scale = tl.load(x_scale + token, mask=rows.inside, other=0.0)
        gate *= gate_scale[:, None] * token_scale[None, :]
        up *= up_scale[:, None] * token_scale[None, :]
    if out.scale is None:
        hidden = gelu_tanh_times(gate, up, dtype).T
    else:
        hidden = gelu_tanh_times(gate, up, tl.float32)
        scale = float8_scale(hidden, 0)
        COLS: tl.constexpr = gate.shape[0]
        tl.store(out.scale + row * triton.cdiv(HIDDEN, COLS) + cols.first // COLS, scale, mask=rows.inside)
        hidden = (hidden / scale[None, :]).to(dtype).T
    at = row[:, None].to(tl.int64) * HIDDEN + cols.each[None, :]
    tl.store(out.data + at, hidden, mask=rows.inside[:, None] & cols.inside[None, :])


@triton.jit
def _store_weighted(
    out: tl.tensor,
    sums: tl.tensor,
    scale: tl.tensor,
    row_scale: tl.tensor,
    weights: tl.tensor,
    pair: tl.tensor,
    rows: Rows,
    cols: Cols,
    WIDTH: tl.constexpr,
    KEEP: tl.constexpr,
) -> None:
    # Not loaded before the loop: there, the load of the first weights would wait for `pair`.
    weight = tl.load(weights + pair, mask=rows.inside, other=0.0)
    if scale is not None:
        sums *= scale[:, None]
    if row_scale is not None:
        sums *= tl.load(row_scale + rows.first + rows.slots, mask=rows.inside, other=0.0)[None, :]
    result = sums.to(out.dtype.element_ty).to(tl.float32) * weight[None, :]
    at = pair[:, None].to(tl.int64) * WIDTH + cols.each[None, :]
    there = rows.inside[:, None] & cols.inside[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty).T, mask=there, eviction_policy=KEEP)


@triton.jit
def request_gate_up(
    weights: tl.tensor, expert: tl.tensor, num_ahead: tl.tensor, col: tl.tensor, SIZE: tl.constexpr
) -> None:
    """Prefetch the first 256 bytes of each float8 row of this tile into L2, if `expert` < `num_ahead`."""
    lane = tl.arange(0, 2 * SIZE.COLS)
    at = col + lane % SIZE.COLS
    row = (expert * 2 + lane // SIZE.COLS) * SIZE.HIDDEN + at
    there = (expert < num_ahead) & (at < SIZE.HIDDEN)
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], 256; mov.u32 $0, 0;}",
        "=r,l,r",
        [weights + row.to(tl.int64) * SIZE.WIDTH, there.to(tl.int32)],
        tl.int32,
        False,
        1,
    )


@triton.jit
def gate_up_tile(
    x: Values,
    proj: Weights,
    out: Values,
    pairs: tl.tensor,
    tile: ExpertTile,
    col: tl.tensor,
    SIZE: tl.constexpr,
    MORE: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    DESCRIBED: tl.constexpr,
) -> None:
    """Compute a tile's rows by COLS columns. The weights are a tensor descriptor if DESCRIBED, else a pointer."""
    WIDTH: tl.constexpr = SIZE.WIDTH
    HIDDEN: tl.constexpr = SIZE.HIDDEN
    COLS: tl.constexpr = SIZE.COLS
    cols = _cols_from(col, HIDDEN, COLS)
    depth = tl.arange(0, SIZE.DEPTH)
    rows = _rows_of(tile, 0, SIZE.ROWS)
    inputs = _token_rows(x.data, pairs, rows, WIDTH, NUM_ACTIVE) + depth[None, :]
    row = tile.expert * 2 * HIDDEN + col
    if not DESCRIBED:
        gates = proj.data + (tile.expert.to(tl.int64) * 2 * HIDDEN + cols.each[:, None]) * WIDTH + depth[None, :]
    gate_scale, up_scale = None, None
    if proj.scale is not None:  # loaded here: after the loop they would wait for memory again
        gate_scale = tl.load(proj.scale + row + cols.each - col, mask=cols.inside, other=0.0)
        up_scale = tl.load(proj.scale + row + HIDDEN + cols.each - col, mask=cols.inside, other=0.0)
    gate = tl.zeros([COLS, SIZE.ROWS], tl.float32)
    up = tl.zeros([COLS, SIZE.ROWS], tl.float32)
    if MORE > 0:
        more = _rows_of(tile, SIZE.ROWS, MORE)
        more_inputs = _token_rows(x.data, pairs, more, WIDTH, NUM_ACTIVE) + depth[None, :]
        more_gate = tl.zeros([COLS, MORE], tl.float32)
        more_up = tl.zeros([COLS, MORE], tl.float32)
    for start in range(0, WIDTH, SIZE.DEPTH):
        left = inside(depth, WIDTH - start, WIDTH % SIZE.DEPTH == 0)[None, :]
        # Weights first: their loads do not wait for the rows' addresses, which also come from memory.
        if DESCRIBED:
            gate_w = proj.data.load([row, start])
            up_w = proj.data.load([row + HIDDEN, start])
        else:
            gate_w = tl.load(gates + start, mask=cols.inside[:, None] & left, other=0.0)
            up_w = tl.load(gates + HIDDEN * WIDTH + start, mask=cols.inside[:, None] & left, other=0.0)
        tokens = tl.load(inputs + start, mask=rows.inside[:, None] & left, other=0.0).T
        gate = _add_products(gate, gate_w, tokens, None, None, ONE_SCALE)
        up = _add_products(up, up_w, tokens, None, None, ONE_SCALE)
        if MORE > 0:
            more_tokens = tl.load(more_inputs + start, mask=more.inside[:, None] & left, other=0.0).T
            more_gate = _add_products(more_gate, gate_w, more_tokens, None, None, ONE_SCALE)
            more_up = _add_products(more_up, up_w, more_tokens, None, None, ONE_SCALE)
    _store_geglu(out, gate, up, gate_scale, up_scale, x.scale, pairs, rows, cols, HIDDEN, NUM_ACTIVE)
    if MORE > 0:
        _store_geglu(out, more_gate, more_up, gate_scale, up_scale, x.scale, pairs, more, cols, HIDDEN, NUM_ACTIVE)


@triton.jit
def packed_gate_up_tile(
    x: Values,
    proj: Weights,
    out: Values,
    pairs: tl.tensor,
    tile: ExpertTile,
    col: tl.tensor,
    SIZE: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    DESCRIBED: tl.constexpr,
) -> None:
    """Compute gate and up in one product: in a block, the packed rows of gate are followed by those of up."""
    rows = _rows_of(tile, 0, SIZE.ROWS)
    inputs = _token_rows(x.data, pairs, rows, SIZE.WIDTH, NUM_ACTIVE)
    BLOCKS: tl.constexpr = triton.cdiv(SIZE.HIDDEN, SIZE.COLS)
    block = col // SIZE.COLS
    sums = multiply_packed(inputs, rows.inside, proj, tile.expert, block, BLOCKS, SIZE.WIDTH, SIZE.ROWS, DESCRIBED)
    gate, up = sums.reshape(2, SIZE.COLS, SIZE.ROWS).permute(1, 2, 0).split()
    cols = _cols_from(col, SIZE.HIDDEN, SIZE.COLS)
    _store_geglu(out, gate, up, None, None, None, pairs, rows, cols, SIZE.HIDDEN, NUM_ACTIVE)


@triton.jit
def four_bit_gate_up_tile(
    x: Values,
    proj: Weights,
    out: Values,
    pairs: tl.tensor,
    tile: ExpertTile,
    col: tl.tensor,
    SIZE: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Compute gate and up, whose codes share words."""
    rows = _rows_of(tile, 0, SIZE.ROWS)
    inputs = _token_rows(x.data, pairs, rows, SIZE.WIDTH, NUM_ACTIVE)
    gate, up = multiply_four_bit(
        inputs,
        rows.inside,
        proj,
        tile.expert,
        col // SIZE.COLS,
        triton.cdiv(SIZE.HIDDEN, SIZE.COLS),
        SIZE.WIDTH,
        SIZE.ROWS,
        SIZE.DEPTH,
        GROUPS,
    )
    cols = _cols_from(col, SIZE.HIDDEN, SIZE.COLS)
    _store_geglu(out, gate, up, None, None, None, pairs, rows, cols, SIZE.HIDDEN, NUM_ACTIVE)


@triton.jit
def down_tile(
    hidden: Values,
    proj: Weights,
    weights: tl.tensor,
    pairs: tl.tensor,
    out: tl.tensor,
    tile: ExpertTile,
    col: tl.tensor,
    SIZE: tl.constexpr,
    MORE: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    DESCRIBED: tl.constexpr,
    KEEP: tl.constexpr,
) -> None:
    """Compute a tile of down as `gate_up_tile` does. Float8 hidden values have one scale per BLOCK, or per row."""
    WIDTH: tl.constexpr = SIZE.WIDTH
    HIDDEN: tl.constexpr = SIZE.HIDDEN
    cols = _cols_from(col, WIDTH, SIZE.COLS)
    depth = tl.arange(0, SIZE.DEPTH)
    rows = _rows_of(tile, 0, SIZE.ROWS)
    pair = tl.load(pairs + tile.first + rows.slots, mask=rows.inside, other=0)
    inputs = _hidden_rows(hidden.data, rows, HIDDEN) + depth[None, :]
    if not DESCRIBED:
        kernels = proj.data + (tile.expert.to(tl.int64) * WIDTH + cols.each[:, None]) * HIDDEN + depth[None, :]
    scale, scales, more_scales, row_scale = None, None, None, None
    if proj.scale is not None:
        scale = tl.load(proj.scale + tile.expert * WIDTH + cols.each, mask=cols.inside, other=0.0)
    if ONE_SCALE:
        row_scale = hidden.scale
    if BLOCK is not None:
        scales = _load_scales(hidden.scale, rows, HIDDEN, BLOCK)
    sums = tl.zeros([SIZE.COLS, SIZE.ROWS], tl.float32)
    if MORE > 0:
        more = _rows_of(tile, SIZE.ROWS, MORE)
        more_pair = tl.load(pairs + tile.first + more.slots, mask=more.inside, other=0)
        more_inputs = _hidden_rows(hidden.data, more, HIDDEN) + depth[None, :]
        more_sums = tl.zeros([SIZE.COLS, MORE], tl.float32)
        if BLOCK is not None:
            more_scales = _load_scales(hidden.scale, more, HIDDEN, BLOCK)
    for start in range(0, HIDDEN, SIZE.DEPTH):
        left = inside(depth, HIDDEN - start, HIDDEN % SIZE.DEPTH == 0)[None, :]
        if DESCRIBED:
            w = proj.data.load([tile.expert * WIDTH + col, start])
        else:
            w = tl.load(kernels + start, mask=cols.inside[:, None] & left, other=0.0)
        h = tl.load(inputs + start, mask=rows.inside[:, None] & left, other=0.0)
        block = start // BLOCK if BLOCK is not None else None
        sums = _add_products(sums, w, h.T, scales, block, ONE_SCALE)
        if MORE > 0:
            more_h = tl.load(more_inputs + start, mask=more.inside[:, None] & left, other=0.0)
            more_sums = _add_products(more_sums, w, more_h.T, more_scales, block, ONE_SCALE)
    _store_weighted(out, sums, scale, row_scale, weights, pair, rows, cols, WIDTH, KEEP)
    if MORE > 0:
        _store_weighted(out, more_sums, scale, row_scale, weights, more_pair, more, cols, WIDTH, KEEP)


@triton.jit
def packed_down_tile(
    hidden: Values,
    proj: Weights,
    weights: tl.tensor,
    pairs: tl.tensor,
    out: tl.tensor,
    tile: ExpertTile,
    col: tl.tensor,
    SIZE: tl.constexpr,
    DESCRIBED: tl.constexpr,
    KEEP: tl.constexpr,
) -> None:
    """Compute a tile of down with packed weights."""
    rows = _rows_of(tile, 0, SIZE.ROWS)
    pair = tl.load(pairs + tile.first + rows.slots, mask=rows.inside, other=0)
    inputs = _hidden_rows(hidden.data, rows, SIZE.HIDDEN)
    BLOCKS: tl.constexpr = triton.cdiv(SIZE.WIDTH, SIZE.COLS)
    block = col // SIZE.COLS
    sums = multiply_packed(inputs, rows.inside, proj, tile.expert, block, BLOCKS, SIZE.HIDDEN, SIZE.ROWS, DESCRIBED)
    cols = _cols_from(col, SIZE.WIDTH, SIZE.COLS)
    _store_weighted(out, sums, None, None, weights, pair, rows, cols, SIZE.WIDTH, KEEP)


@triton.jit
def four_bit_down_tile(
    hidden: Values,
    proj: Weights,
    weights: tl.tensor,
    pairs: tl.tensor,
    out: tl.tensor,
    tile: ExpertTile,
    col: tl.tensor,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    KEEP: tl.constexpr,
) -> None:
    """Compute a tile of down with weights of four bits. The columns of a block are in two halves."""
    rows = _rows_of(tile, 0, SIZE.ROWS)
    pair = tl.load(pairs + tile.first + rows.slots, mask=rows.inside, other=0)
    inputs = _hidden_rows(hidden.data, rows, SIZE.HIDDEN)
    low, high = multiply_four_bit(
        inputs,
        rows.inside,
        proj,
        tile.expert,
        col // SIZE.COLS,
        triton.cdiv(SIZE.WIDTH, SIZE.COLS),
        SIZE.HIDDEN,
        SIZE.ROWS,
        SIZE.DEPTH,
        GROUPS,
    )
    each = col + tl.arange(0, SIZE.COLS // 2)
    other = each + SIZE.COLS // 2
    EXACT: tl.constexpr = SIZE.WIDTH % SIZE.COLS == 0
    low_cols = Cols(col, each, inside(each, SIZE.WIDTH, EXACT))
    high_cols = Cols(col, other, inside(other, SIZE.WIDTH, EXACT))
    _store_weighted(out, low, None, None, weights, pair, rows, low_cols, SIZE.WIDTH, KEEP)
    _store_weighted(out, high, None, None, weights, pair, rows, high_cols, SIZE.WIDTH, KEEP)
