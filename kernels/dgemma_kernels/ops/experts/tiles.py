"""The work of one program of `kernel` on its tile: rows of one expert times a block of columns of its weights.

Plain and float8 weights share a function; scales of plain weights are None. So do packed and four-bit weights, which
are decoded. Tuples group the arguments and do not change the compiled code.
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


class TileOperands(NamedTuple):
    """The tensors of one product. Scales are None if the values are not float8."""

    rows: tl.tensor  # tokens, or hidden values
    row_scale: tl.tensor
    proj: Weights
    weights: tl.tensor  # of the router; None in gate_up
    pairs: tl.tensor
    out: tl.tensor
    out_scale: tl.tensor


class TileSizes(NamedTuple):
    """The constants of a launch."""

    WIDTH: tl.constexpr  # of a token
    HIDDEN: tl.constexpr
    NUM_ACTIVE: tl.constexpr
    ROWS: tl.constexpr  # of a tile, as are columns and depth
    COLS: tl.constexpr
    DEPTH: tl.constexpr
    BLOCK: tl.constexpr  # columns of float8 hidden values with one scale, or None
    GROUPS: tl.constexpr  # per plane of four-bit weights, or None
    ONE_SCALE: tl.constexpr
    DESCRIBED: tl.constexpr  # the weights are a tensor descriptor, not a pointer
    KEEP: tl.constexpr  # eviction policy of the output


class _Rows(NamedTuple):
    """A block of a tile's rows: the tile's first row, the offsets from it, and a mask of those inside the tile."""

    first: tl.tensor
    slots: tl.tensor
    inside: tl.tensor


class _Cols(NamedTuple):
    """A block of columns: the first, each of them, and a mask of those inside the matrix."""

    first: tl.tensor
    each: tl.tensor
    inside: tl.tensor


@triton.jit
def load_tile(tiles: tl.tensor, number: tl.tensor, max_tiles: tl.tensor) -> ExpertTile:
    """Load a tile; beyond `max_tiles` it has no rows. `max_tiles` is None if the tile is known to exist."""
    at = tiles + number * 3
    there = None if max_tiles is None else number < max_tiles
    other = None if max_tiles is None else 0
    return ExpertTile(tl.load(at, there, other), tl.load(at + 1, there, other), tl.load(at + 2, there, other))


@triton.jit
def _rows_of(tile: ExpertTile, START: tl.constexpr, ROWS: tl.constexpr) -> _Rows:
    slots = START + tl.arange(0, ROWS)
    return _Rows(tile.first, slots, slots < tile.num_rows)


@triton.jit
def _cols_from(first: tl.tensor, LIMIT: tl.constexpr, COLS: tl.constexpr) -> _Cols:
    each = first + tl.arange(0, COLS)
    return _Cols(first, each, inside(each, LIMIT, LIMIT % COLS == 0))


@triton.jit
def _pairs_of(operands: TileOperands, rows: _Rows) -> tl.tensor:
    return tl.load(operands.pairs + rows.first + rows.slots, mask=rows.inside, other=0)


@triton.jit
def _token_rows(operands: TileOperands, rows: _Rows, SIZE: tl.constexpr) -> tl.tensor:
    """Return a column of pointers to the rows' tokens."""
    token = _pairs_of(operands, rows) // SIZE.NUM_ACTIVE
    return operands.rows + token[:, None].to(tl.int64) * SIZE.WIDTH


@triton.jit
def _hidden_rows(operands: TileOperands, rows: _Rows, SIZE: tl.constexpr) -> tl.tensor:
    """Return a column of pointers to the rows."""
    return operands.rows + (rows.first + rows.slots)[:, None].to(tl.int64) * SIZE.HIDDEN


@triton.jit
def _load_scales(hidden_scale: tl.tensor, rows: _Rows, HIDDEN: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
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
    operands: TileOperands,
    gate: tl.tensor,
    up: tl.tensor,
    gate_scale: tl.tensor,
    up_scale: tl.tensor,
    rows: _Rows,
    cols: _Cols,
    SIZE: tl.constexpr,
) -> None:
    row = rows.first + rows.slots
    dtype = operands.out.dtype.element_ty
    if gate_scale is not None:
        # Loaded again, with a cache modifier: without it Triton would reuse the first load and keep it in 40 registers.
        pair = tl.load(operands.pairs + row, mask=rows.inside, other=0, cache_modifier=".ca")
        token_scale = tl.load(operands.row_scale + pair // SIZE.NUM_ACTIVE, mask=rows.inside, other=0.0)
        gate *= gate_scale[:, None] * token_scale[None, :]
        up *= up_scale[:, None] * token_scale[None, :]
    if operands.out_scale is None:
        hidden = gelu_tanh_times(gate, up, dtype).T
    else:
        hidden = gelu_tanh_times(gate, up, tl.float32)
        scale = float8_scale(hidden, 0)
        COLS: tl.constexpr = gate.shape[0]
        at_scale = operands.out_scale + row * triton.cdiv(SIZE.HIDDEN, COLS) + cols.first // COLS
        tl.store(at_scale, scale, mask=rows.inside)
        hidden = (hidden / scale[None, :]).to(dtype).T
    at = row[:, None].to(tl.int64) * SIZE.HIDDEN + cols.each[None, :]
    tl.store(operands.out + at, hidden, mask=rows.inside[:, None] & cols.inside[None, :])


@triton.jit
def _store_weighted(
    operands: TileOperands,
    sums: tl.tensor,
    scale: tl.tensor,
    pair: tl.tensor,
    rows: _Rows,
    cols: _Cols,
    SIZE: tl.constexpr,
) -> None:
    out = operands.out
    # Not loaded before the loop: there, the load of the first weights would wait for `pair`.
    weight = tl.load(operands.weights + pair, mask=rows.inside, other=0.0)
    if scale is not None:
        sums *= scale[:, None]
    if SIZE.ONE_SCALE:
        sums *= tl.load(operands.row_scale + rows.first + rows.slots, mask=rows.inside, other=0.0)[None, :]
    result = sums.to(out.dtype.element_ty).to(tl.float32) * weight[None, :]
    at = pair[:, None].to(tl.int64) * SIZE.WIDTH + cols.each[None, :]
    there = rows.inside[:, None] & cols.inside[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty).T, mask=there, eviction_policy=SIZE.KEEP)


@triton.jit
def gate_up_tile(
    operands: TileOperands, tile: ExpertTile, col: tl.tensor, SIZE: tl.constexpr, MORE: tl.constexpr
) -> None:
    """Compute a tile's rows by COLS columns. With MORE > 0, the tile has a second block of rows."""
    WIDTH: tl.constexpr = SIZE.WIDTH
    HIDDEN: tl.constexpr = SIZE.HIDDEN
    COLS: tl.constexpr = SIZE.COLS
    proj = operands.proj
    cols = _cols_from(col, HIDDEN, COLS)
    depth = tl.arange(0, SIZE.DEPTH)
    rows = _rows_of(tile, 0, SIZE.ROWS)
    inputs = _token_rows(operands, rows, SIZE) + depth[None, :]
    row = tile.expert * 2 * HIDDEN + col
    if not SIZE.DESCRIBED:
        gates = proj.data + (tile.expert.to(tl.int64) * 2 * HIDDEN + cols.each[:, None]) * WIDTH + depth[None, :]
    gate_scale, up_scale = None, None
    if proj.scale is not None:  # loaded here: after the loop they would wait for memory again
        gate_scale = tl.load(proj.scale + row + cols.each - col, mask=cols.inside, other=0.0)
        up_scale = tl.load(proj.scale + row + HIDDEN + cols.each - col, mask=cols.inside, other=0.0)
    gate = tl.zeros([COLS, SIZE.ROWS], tl.float32)
    up = tl.zeros([COLS, SIZE.ROWS], tl.float32)
    if MORE > 0:
        more = _rows_of(tile, SIZE.ROWS, MORE)
        more_inputs = _token_rows(operands, more, SIZE) + depth[None, :]
        more_gate = tl.zeros([COLS, MORE], tl.float32)
        more_up = tl.zeros([COLS, MORE], tl.float32)
    for start in range(0, WIDTH, SIZE.DEPTH):
        left = inside(depth, WIDTH - start, WIDTH % SIZE.DEPTH == 0)[None, :]
        # Weights first: their loads do not wait for the rows' addresses, which also come from memory.
        if SIZE.DESCRIBED:
            gate_w = proj.data.load([row, start])
            up_w = proj.data.load([row + HIDDEN, start])
        else:
            gate_w = tl.load(gates + start, mask=cols.inside[:, None] & left, other=0.0)
            up_w = tl.load(gates + HIDDEN * WIDTH + start, mask=cols.inside[:, None] & left, other=0.0)
        tokens = tl.load(inputs + start, mask=rows.inside[:, None] & left, other=0.0).T
        gate = _add_products(gate, gate_w, tokens, None, None, SIZE.ONE_SCALE)
        up = _add_products(up, up_w, tokens, None, None, SIZE.ONE_SCALE)
        if MORE > 0:
            more_tokens = tl.load(more_inputs + start, mask=more.inside[:, None] & left, other=0.0).T
            more_gate = _add_products(more_gate, gate_w, more_tokens, None, None, SIZE.ONE_SCALE)
            more_up = _add_products(more_up, up_w, more_tokens, None, None, SIZE.ONE_SCALE)
    _store_geglu(operands, gate, up, gate_scale, up_scale, rows, cols, SIZE)
    if MORE > 0:
        _store_geglu(operands, more_gate, more_up, gate_scale, up_scale, more, cols, SIZE)


@triton.jit
def down_tile(operands: TileOperands, tile: ExpertTile, col: tl.tensor, SIZE: tl.constexpr, MORE: tl.constexpr) -> None:
    """Compute a tile of down as `gate_up_tile` does. Float8 hidden values have one scale per BLOCK, or per row."""
    WIDTH: tl.constexpr = SIZE.WIDTH
    HIDDEN: tl.constexpr = SIZE.HIDDEN
    BLOCK: tl.constexpr = SIZE.BLOCK
    proj = operands.proj
    cols = _cols_from(col, WIDTH, SIZE.COLS)
    depth = tl.arange(0, SIZE.DEPTH)
    rows = _rows_of(tile, 0, SIZE.ROWS)
    pair = _pairs_of(operands, rows)
    inputs = _hidden_rows(operands, rows, SIZE) + depth[None, :]
    if not SIZE.DESCRIBED:
        kernels = proj.data + (tile.expert.to(tl.int64) * WIDTH + cols.each[:, None]) * HIDDEN + depth[None, :]
    scale, scales, more_scales = None, None, None
    if proj.scale is not None:
        scale = tl.load(proj.scale + tile.expert * WIDTH + cols.each, mask=cols.inside, other=0.0)
    if BLOCK is not None:
        scales = _load_scales(operands.row_scale, rows, HIDDEN, BLOCK)
    sums = tl.zeros([SIZE.COLS, SIZE.ROWS], tl.float32)
    if MORE > 0:
        more = _rows_of(tile, SIZE.ROWS, MORE)
        more_pair = _pairs_of(operands, more)
        more_inputs = _hidden_rows(operands, more, SIZE) + depth[None, :]
        more_sums = tl.zeros([SIZE.COLS, MORE], tl.float32)
        if BLOCK is not None:
            more_scales = _load_scales(operands.row_scale, more, HIDDEN, BLOCK)
    for start in range(0, HIDDEN, SIZE.DEPTH):
        left = inside(depth, HIDDEN - start, HIDDEN % SIZE.DEPTH == 0)[None, :]
        if SIZE.DESCRIBED:
            w = proj.data.load([tile.expert * WIDTH + col, start])
        else:
            w = tl.load(kernels + start, mask=cols.inside[:, None] & left, other=0.0)
        h = tl.load(inputs + start, mask=rows.inside[:, None] & left, other=0.0)
        block = start // BLOCK if BLOCK is not None else None
        sums = _add_products(sums, w, h.T, scales, block, SIZE.ONE_SCALE)
        if MORE > 0:
            more_h = tl.load(more_inputs + start, mask=more.inside[:, None] & left, other=0.0)
            more_sums = _add_products(more_sums, w, more_h.T, more_scales, block, SIZE.ONE_SCALE)
    _store_weighted(operands, sums, scale, pair, rows, cols, SIZE)
    if MORE > 0:
        _store_weighted(operands, more_sums, scale, more_pair, more, cols, SIZE)


@triton.jit
def decoded_gate_up_tile(operands: TileOperands, tile: ExpertTile, col: tl.tensor, SIZE: tl.constexpr) -> None:
    """Compute gate and up of packed or four-bit weights, whose blocks have the rows of both."""
    proj, block = operands.proj, col // SIZE.COLS
    BLOCKS: tl.constexpr = triton.cdiv(SIZE.HIDDEN, SIZE.COLS)
    rows = _rows_of(tile, 0, SIZE.ROWS)
    inputs = _token_rows(operands, rows, SIZE)
    if SIZE.GROUPS is None:
        sums = multiply_packed(
            inputs, rows.inside, proj, tile.expert, block, BLOCKS, SIZE.WIDTH, SIZE.ROWS, SIZE.DESCRIBED
        )
        gate, up = sums.reshape(2, SIZE.COLS, SIZE.ROWS).permute(1, 2, 0).split()
    else:
        gate, up = multiply_four_bit(
            inputs, rows.inside, proj, tile.expert, block, BLOCKS, SIZE.WIDTH, SIZE.ROWS, SIZE.DEPTH, SIZE.GROUPS
        )
    _store_geglu(operands, gate, up, None, None, rows, _cols_from(col, SIZE.HIDDEN, SIZE.COLS), SIZE)


@triton.jit
def decoded_down_tile(operands: TileOperands, tile: ExpertTile, col: tl.tensor, SIZE: tl.constexpr) -> None:
    """Compute a tile of down with packed or four-bit weights. Four-bit columns of a block are in two halves."""
    proj, block = operands.proj, col // SIZE.COLS
    WIDTH: tl.constexpr = SIZE.WIDTH
    BLOCKS: tl.constexpr = triton.cdiv(WIDTH, SIZE.COLS)
    rows = _rows_of(tile, 0, SIZE.ROWS)
    pair = _pairs_of(operands, rows)
    inputs = _hidden_rows(operands, rows, SIZE)
    if SIZE.GROUPS is None:
        sums = multiply_packed(
            inputs, rows.inside, proj, tile.expert, block, BLOCKS, SIZE.HIDDEN, SIZE.ROWS, SIZE.DESCRIBED
        )
        _store_weighted(operands, sums, None, pair, rows, _cols_from(col, WIDTH, SIZE.COLS), SIZE)
    else:
        low, high = multiply_four_bit(
            inputs, rows.inside, proj, tile.expert, block, BLOCKS, SIZE.HIDDEN, SIZE.ROWS, SIZE.DEPTH, SIZE.GROUPS
        )
        each = col + tl.arange(0, SIZE.COLS // 2)
        other = each + SIZE.COLS // 2
        EXACT: tl.constexpr = WIDTH % SIZE.COLS == 0
        _store_weighted(operands, low, None, pair, rows, _Cols(col, each, inside(each, WIDTH, EXACT)), SIZE)
        _store_weighted(operands, high, None, pair, rows, _Cols(col, other, inside(other, WIDTH, EXACT)), SIZE)
