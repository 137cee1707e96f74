"""The products of `kernel` on Hopper, in Gluon: copies and products run at the same time.

One program per multiprocessor takes items from a queue, each a tile of rows times a block of weights. Four warps copy
both into a ring in shared memory. While an item is stored, they already copy the next one. Two warpgroups multiply. The
weights are the left operand, so rows need not be rounded up to 64. The adapter's product is one more step of the depth.
The copy engine fills the columns after the adapter's rank with zeros.

The limits are the bandwidths of L2 and of shared memory. So items are as large as the registers for their sums allow:
128 rows of weights by up to 288 rows ("wide"), or 256 by up to 160 ("tall", for experts with few rows). Products of 256
rows are the fastest. Another product multiplies up to 32 more rows, where that saves a tile. Weights are copied in
units of 128 rows. A part is half a unit. For GeGLU, 8 rows of gate alternate with the same 8 of up, so that a thread
has both values. `experts.hopper_many` has this structure for inference.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from dgemma_kernels.ops.configs import num_multiprocessors
from dgemma_kernels.ops.grouped.tiles import SMALL_TILE, rows_per_tile
from dgemma_kernels.ops.hopper import (
    LINE,
    async_load,
    copy_by_threads,
    describe_lines,
    make_barriers,
    next_slot,
    slot_before,
    wait_for_products,
)

# Rows of a tile's first block, and of its second block.
_FEW, _ALL, _MORE = gl.constexpr(128), gl.constexpr(256), gl.constexpr(32)
_STAGES = gl.constexpr(4)  # slots of the ring
_UNIT, _PART, _DEPTH = gl.constexpr(128), gl.constexpr(64), gl.constexpr(64)
_FIELDS = gl.constexpr(5)  # of an item: its number, expert, first row, number of rows, block of weights

# Layouts of rows. A thread has 16 bytes.
_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # rows of 64 values
_HALF_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))  # rows of 32 values
_NUMBERS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class _HopperSizes(NamedTuple):
    """The kind of a product, and its sizes."""

    GATED: bool
    FLIPPED: bool
    GATHERED: bool
    WIDTH: int  # of the rows that it multiplies
    OUT: int  # columns of the result
    NUM_ACTIVE: int
    ADAPTER_DEPTH: int
    PARTS: int  # of an item, per warpgroup
    BLOCKS: int  # items per tile


def multiply(
    x: Tensor,
    weights: Tensor,
    narrow: Tensor,
    b: Tensor,
    tiles: Tensor,
    order: Tensor | None,
    *,
    gated: bool,
) -> Tensor:
    """Return x Wᵀ + narrow Bᵀ with the weights of each row's expert, (R, O), or GeGLU of it, (R, O / 2).

    narrow: (R, rank), grouped by expert. x: (R, I), also grouped by expert, or, with `order`, tokens (M, I). order:
    (R,), the choice of each row as token · A + a, where a is its index among the token's A choices. weights: (E, O, I),
    and b: (E, O, rank), both contiguous or both transposed. tiles: those of `choices.group_choices`.

    Example: `multiply(hidden, experts.down_proj, narrow, experts.down_lora_b, groups.tiles, None, gated=False)`.
    """
    flipped, (num_experts, num_cols, width), rank = not weights.is_contiguous(), weights.shape, b.shape[-1]
    num_rows, out_cols = narrow.shape[0], num_cols // 2 if gated else num_cols
    out = torch.empty(num_rows, out_cols, dtype=x.dtype, device=x.device)
    both = []
    for matrix in (weights, b):
        if gated:  # copies have 8 rows of gate, the same 8 of up, the next 8 of gate, and so on
            eights = matrix.view(2 * num_experts, num_cols // 16, 8, matrix.shape[-1]).transpose(0, 1)
            both.append(describe_lines(eights, [_UNIT.value // 16, 2, 8]))
        else:
            both.append(describe_lines(matrix.mT if flipped else matrix, [1, (_DEPTH if flipped else _UNIT).value]))
    blocks = [_ALL.value], [_FEW.value], [_MORE.value]
    _multiply_tokens_hopper_kernel[(num_multiprocessors(x.device),)](
        *(describe_lines(x, block) if order is None else x for block in blocks),
        *(describe_lines(narrow, block) for block in blocks),
        *both,
        order,
        tiles,
        out,
        GATED=gated,
        FLIPPED=flipped,
        WIDTH=width,
        OUT=out_cols,
        NUM_ACTIVE=num_rows // x.shape[0],
        RANK=rank,
        TALL=rows_per_tile(num_rows, num_experts) == SMALL_TILE,
        num_warps=4,
    )
    return out


@gluon.jit
def _multiply_tokens_hopper_kernel(
    rows: gl.tensor,  # descriptors of blocks of 256, 128 and 32; if gathered, all three are the tokens
    few_rows: gl.tensor,
    more_rows: gl.tensor,
    narrow: gl.tensor,  # descriptors of the same blocks
    few_narrow: gl.tensor,
    more_narrow: gl.tensor,
    weights: gl.tensor,  # descriptors of (F / 8, 2E, 8, I), (E, I, O) or (E, O, I)
    b: gl.tensor,
    order: gl.tensor,
    tiles: gl.tensor,
    out: gl.tensor,
    GATED: gl.constexpr,
    FLIPPED: gl.constexpr,
    WIDTH: gl.constexpr,
    OUT: gl.constexpr,
    NUM_ACTIVE: gl.constexpr,
    RANK: gl.constexpr,
    TALL: gl.constexpr,
) -> None:
    PARTS: gl.constexpr = 2 if TALL else 1
    BLOCK_OUT: gl.constexpr = PARTS * (_UNIT // 2 if GATED else _UNIT)
    BLOCKS: gl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    ADAPTER_DEPTH: gl.constexpr = 16 if RANK <= 16 else _DEPTH
    GATHERED: gl.constexpr = order is not None
    SIZE: gl.constexpr = _HopperSizes(GATED, FLIPPED, GATHERED, WIDTH, OUT, NUM_ACTIVE, ADAPTER_DEPTH, PARTS, BLOCKS)
    dtype: gl.constexpr = out.dtype.element_ty
    LINES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=LINE, element_bitwidth=16, rank=2)
    if GATED:
        w_smem = gl.allocate_shared_memory(dtype, [_STAGES * PARTS, _UNIT // 16, 2, 8, _DEPTH], weights.layout)
        HALVES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
        o_smem = gl.allocate_shared_memory(dtype, [2, 128, 32], HALVES)
    else:
        if FLIPPED:
            w_smem = gl.allocate_shared_memory(dtype, [_STAGES * PARTS * 2, 1, _DEPTH, _PART], weights.layout)
        else:
            w_smem = gl.allocate_shared_memory(dtype, [_STAGES * PARTS, 1, _UNIT, _DEPTH], weights.layout)
        o_smem = gl.allocate_shared_memory(dtype, [2, 32, 64], LINES)
    r_smem = gl.allocate_shared_memory(dtype, [_STAGES, _FEW if TALL else _ALL, _DEPTH], LINES)
    m_smem = gl.allocate_shared_memory(dtype, [_STAGES, _MORE, _DEPTH], LINES)
    full = make_barriers(_STAGES, 129 if GATHERED else 1)  # 128 threads copy the tokens
    free = make_barriers(_STAGES, 2)
    queued = (gl.allocate_shared_memory(gl.int32, [2 * _FIELDS, 1], _PLAIN), make_barriers(2, 1), make_barriers(2, 2))
    fence_async_shared()
    smem = (w_smem, r_smem, m_smem, o_smem)
    num_items = gl.load(tiles) * BLOCKS
    tables = (tiles, num_items, order)
    inputs = (rows, few_rows, more_rows, weights)
    adapters = (narrow, few_narrow, more_narrow, b)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_copy, (inputs, adapters, smem, full, free, queued, tables, SIZE)),
            (_multiply, (out, smem, full, free, queued, num_items, FIRST, SIZE)),
            (_multiply, (out, smem, full, free, queued, num_items, SECOND, SIZE)),
        ],
        [4, 4],
        [208, 208],  # registers per thread, which leaves 88 for the copying warps
    )


@gluon.jit
def _find(tables: gl.tuple, item: gl.tensor, SIZE: gl.constexpr) -> gl.tuple:
    """Return the fields of an item. Neighbours in the queue share a tile."""
    tiles, num_items, _ = tables
    at = tiles + 3 + gl.minimum(item, num_items - 1) // SIZE.BLOCKS * 3
    return item, gl.load(at), gl.load(at + 1), gl.load(at + 2), item % SIZE.BLOCKS


@gluon.jit
def _publish(queued: gl.tuple, tile: gl.tuple, turn: gl.tensor) -> None:
    """Hand an item to both warpgroups."""
    numbers, full, free = queued
    at = turn % 2
    mbarrier.wait(free.index(at), (turn // 2 & 1) ^ 1)
    for i in gl.static_range(_FIELDS):
        numbers.index(at * _FIELDS + i).store(gl.zeros([1], gl.int32, _NUMBERS) + tile[i])
    mbarrier.arrive(full.index(at))


@gluon.jit
def _receive(queued: gl.tuple, turn: gl.tensor) -> gl.tuple:
    """Wait for the next item and return its fields."""
    numbers, full, free = queued
    at = turn % 2
    mbarrier.wait(full.index(at), turn // 2 & 1)
    item = gl.max(numbers.index(at * _FIELDS).load(_NUMBERS), 0)
    expert = gl.max(numbers.index(at * _FIELDS + 1).load(_NUMBERS), 0)
    first = gl.max(numbers.index(at * _FIELDS + 2).load(_NUMBERS), 0)
    num_rows = gl.max(numbers.index(at * _FIELDS + 3).load(_NUMBERS), 0)
    block = gl.max(numbers.index(at * _FIELDS + 4).load(_NUMBERS), 0)
    mbarrier.arrive(free.index(at))
    return item, expert, first, num_rows, block


@gluon.jit
def _source(tables: gl.tuple, tile: gl.tuple, SIZE: gl.constexpr) -> gl.tuple:
    """Return the tokens of both blocks of a tile, and -1 for other rows.

    The second block begins after 128 rows in tiles of at most 160 rows, and after 256 rows in larger ones.
    """
    if SIZE.GATHERED:
        ROWS: gl.constexpr = _FEW if SIZE.PARTS == 2 else _ALL
        start = gl.where(tile[3] > _FEW + _MORE, ROWS, _FEW)
        row = gl.arange(0, ROWS, gl.SliceLayout(1, _ROWS))
        more_row = start + gl.arange(0, _MORE, gl.SliceLayout(1, _ROWS))
        return _tokens(tables, tile, row, start, SIZE), _tokens(tables, tile, more_row, tile[3], SIZE)
    else:  # noqa: RET505 (without `else`, Triton also compiles the code after the return)
        return ()


@gluon.jit
def _tokens(tables: gl.tuple, tile: gl.tuple, row: gl.tensor, end: gl.tensor, SIZE: gl.constexpr) -> gl.tensor:
    inside = row < gl.minimum(tile[3], end)
    choice = gl.load(tables[2] + tile[2] + row, mask=inside, other=0).to(gl.int32)
    return gl.where(inside, choice // SIZE.NUM_ACTIVE, -1)


@gluon.jit
def _copy(
    inputs: gl.tuple,
    adapters: gl.tuple,
    smem: gl.tuple,
    full: gl.tensor,
    free: gl.tensor,
    queued: gl.tuple,
    tables: gl.tuple,
    SIZE: gl.constexpr,
) -> None:
    """Start all copies, in the order of their use."""
    STEPS: gl.constexpr = SIZE.WIDTH // _DEPTH
    # Between copies, the next item is prepared in three parts. Each waits only for loads that were started in the
    # part before, so no copy is late.
    ONE: gl.constexpr = 2 if STEPS > 2 else STEPS
    TWO: gl.constexpr = 4 if STEPS > 4 else STEPS
    THREE: gl.constexpr = 6 if STEPS > 6 else STEPS
    queue, num_items = tables[0] + 1, tables[1]
    slot = num_items * 0
    phase = num_items * 0 + 1
    turn = num_items * 0
    tile = _find(tables, gl.program_id(0), SIZE)
    source = _source(tables, tile, SIZE)
    _publish(queued, tile, turn)
    while tile[0] < num_items:
        turn += 1
        for step in range(ONE):
            slot, phase = _copy_step(inputs, smem, full, free, source, tile, step * _DEPTH, slot, phase, SIZE)
        taken = gl.atomic_add(queue, 1, sem="relaxed")
        for step in range(ONE, TWO):
            slot, phase = _copy_step(inputs, smem, full, free, source, tile, step * _DEPTH, slot, phase, SIZE)
        if taken == num_items - 1:  # one number is taken per item, so this is the last: reset for the next launch
            gl.atomic_add(queue, -num_items, sem="relaxed")
        after = _find(tables, taken + gl.num_programs(0), SIZE)
        for step in range(TWO, THREE):
            slot, phase = _copy_step(inputs, smem, full, free, source, tile, step * _DEPTH, slot, phase, SIZE)
        later = _source(tables, after, SIZE)
        _publish(queued, after, turn)
        for step in range(THREE, STEPS):
            slot, phase = _copy_step(inputs, smem, full, free, source, tile, step * _DEPTH, slot, phase, SIZE)
        slot, phase = _copy_step(adapters, smem, full, free, (), tile, 0, slot, phase, SIZE)
        tile = after
        source = later


@gluon.jit
def _copy_step(
    inputs: gl.tuple,
    smem: gl.tuple,
    full: gl.tensor,
    free: gl.tensor,
    source: gl.tuple,
    tile: gl.tuple,
    start: gl.tensor,
    slot: gl.tensor,
    phase: gl.tensor,
    SIZE: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Start the copies of 64 columns of weights and rows. source: the tokens, if threads copy them."""
    rows, few_rows, more_rows, weights = inputs
    _, r_smem, m_smem, _ = smem
    _, _, first, num_rows, _ = tile
    BYTES: gl.constexpr = SIZE.PARTS * _UNIT * LINE  # of weights
    mbarrier.wait(free.index(slot), phase)
    is_few = num_rows <= _FEW + _MORE  # the first block has 128 rows
    has_more = num_rows > gl.where(is_few, _FEW, _ALL)
    bar = full.index(slot)
    target = r_smem.index(slot)
    more = m_smem.index(slot)
    if len(source) > 0:
        mbarrier.expect(bar, BYTES)
        _load_weights(weights, tile, start, bar, smem[0], slot, SIZE)
        column = start + gl.expand_dims(gl.arange(0, _DEPTH, gl.SliceLayout(0, _ROWS)), 0)
        token = gl.expand_dims(source[0], 1)
        copy_by_threads(target, rows + (token * SIZE.WIDTH + column), mask=token >= 0)
        if has_more:
            more_token = gl.expand_dims(source[1], 1)
            copy_by_threads(more, rows + (more_token * SIZE.WIDTH + column), mask=more_token >= 0)
    else:
        if SIZE.GATHERED:
            fence_async_shared()  # threads wrote the slot's rows before
        if is_few:
            if has_more:
                mbarrier.expect(bar, BYTES + (_FEW + _MORE) * LINE)
                async_load(more_rows, [first + _FEW, start], bar, more)
            else:
                mbarrier.expect(bar, BYTES + _FEW * LINE)
            async_load(few_rows, [first, start], bar, target.slice(0, _FEW))
        elif SIZE.PARTS == 1:
            if has_more:
                mbarrier.expect(bar, BYTES + (_ALL + _MORE) * LINE)
                async_load(more_rows, [first + _ALL, start], bar, more)
            else:
                mbarrier.expect(bar, BYTES + _ALL * LINE)
            async_load(rows, [first, start], bar, target)
        _load_weights(weights, tile, start, bar, smem[0], slot, SIZE)
    if SIZE.GATHERED:
        async_copy.mbarrier_arrive(bar, increment_count=False)
    return next_slot(slot, phase, _STAGES)


@gluon.jit
def _load_weights(
    weights: gl.tensor,
    tile: gl.tuple,
    start: gl.tensor,
    bar: gl.tensor,
    w_smem: gl.tensor,
    slot: gl.tensor,
    SIZE: gl.constexpr,
) -> None:
    _, expert, _, _, block = tile
    for i in gl.static_range(SIZE.PARTS):
        unit = block * SIZE.PARTS + i
        place = slot * SIZE.PARTS + i
        if SIZE.GATED:
            async_load(weights, [unit * (_UNIT // 16), expert * 2, 0, start], bar, w_smem.index(place))
        elif SIZE.FLIPPED:
            for part in gl.static_range(2):
                async_load(weights, [expert, start, unit * _UNIT + part * _PART], bar, w_smem.index(place * 2 + part))
        else:
            async_load(weights, [expert, unit * _UNIT, start], bar, w_smem.index(place))


@gluon.jit
def _multiply(
    out: gl.tensor,
    smem: gl.tuple,
    full: gl.tensor,
    free: gl.tensor,
    queued: gl.tuple,
    num_items: gl.tensor,
    WG: gl.constexpr,
    SIZE: gl.constexpr,
) -> None:
    """Compute half of the parts of every item, as one of two warpgroups."""
    slot = num_items * 0
    phase = num_items * 0
    turn = num_items * 0
    rings = (smem, full, free)
    tile = _receive(queued, turn)
    while tile[0] < num_items:
        if SIZE.PARTS == 1 and tile[3] > _ALL:
            slot, phase = _multiply_item(out, rings, tile, slot, phase, _ALL, _MORE, WG, SIZE)
        elif SIZE.PARTS == 1 and tile[3] > _FEW + _MORE:
            slot, phase = _multiply_item(out, rings, tile, slot, phase, _ALL, 0, WG, SIZE)
        elif tile[3] > _FEW:
            slot, phase = _multiply_item(out, rings, tile, slot, phase, _FEW, _MORE, WG, SIZE)
        else:
            slot, phase = _multiply_item(out, rings, tile, slot, phase, _FEW, 0, WG, SIZE)
        turn += 1
        tile = _receive(queued, turn)


@gluon.jit
def _multiply_item(
    out: gl.tensor,
    rings: gl.tuple,
    tile: gl.tuple,
    slot: gl.tensor,
    phase: gl.tensor,
    NUM: gl.constexpr,
    MORE: gl.constexpr,
    WG: gl.constexpr,
    SIZE: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Multiply NUM + MORE rows by this warpgroup's parts of the weights and of B, and store the result."""
    smem, _, free = rings
    STEPS: gl.constexpr = SIZE.WIDTH // _DEPTH
    DEPTH: gl.constexpr = SIZE.ADAPTER_DEPTH
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NUM, 16])
    MORE_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _MORE, 16])
    zeros = gl.zeros((_PART, NUM), gl.float32, SUMS)
    more_zeros = gl.zeros((_PART, _MORE), gl.float32, MORE_SUMS)
    sums = (zeros, zeros, more_zeros, more_zeros)  # first block of rows: both parts; second block: both parts
    for step in range(STEPS):
        sums = _multiply_step(rings, slot, phase, sums, step > 0, NUM, MORE, _DEPTH, WG, SIZE)
        if step > 0:
            mbarrier.arrive(free.index(slot_before(slot, _STAGES)))
        slot, phase = next_slot(slot, phase, _STAGES)
    sums = _multiply_step(rings, slot, phase, sums, True, NUM, MORE, DEPTH, WG, SIZE)
    mbarrier.arrive(free.index(slot_before(slot, _STAGES)))
    low, high, more_low, more_high = wait_for_products(sums, 0, MORE, SIZE.PARTS)
    mbarrier.arrive(free.index(slot))
    slot, phase = next_slot(slot, phase, _STAGES)
    part = (tile[4] * 2 + WG) * SIZE.PARTS
    buffer = smem[3].index(WG)
    if MORE > 0:  # first, because it frees registers
        _store(out, buffer, tile, more_low, part, NUM, SIZE)
        if SIZE.PARTS == 2:
            _store(out, buffer, tile, more_high, part + 1, NUM, SIZE)
    _store(out, buffer, tile, low, part, 0, SIZE)
    if SIZE.PARTS == 2:
        _store(out, buffer, tile, high, part + 1, 0, SIZE)
    return slot, phase


@gluon.jit
def _multiply_step(
    rings: gl.tuple,
    slot: gl.tensor,
    phase: gl.tensor,
    sums: gl.tuple,
    use_sums: gl.tensor,
    NUM: gl.constexpr,
    MORE: gl.constexpr,
    DEPTH: gl.constexpr,
    WG: gl.constexpr,
    SIZE: gl.constexpr,
) -> gl.tuple:
    """Start the products of a slot's first DEPTH columns, and wait for those before."""
    smem, full, _ = rings
    low, high, more_low, more_high = sums
    mbarrier.wait(full.index(slot), phase)
    if SIZE.GATHERED:
        fence_async_shared()  # the rows were written by threads, and the products read them by another path
    rows = smem[1].index(slot).slice(0, NUM).slice(0, DEPTH, dim=1).permute((1, 0))
    more = smem[2].index(slot).slice(0, DEPTH, dim=1).permute((1, 0))
    weights = _weights(smem[0], slot, WG * SIZE.PARTS, DEPTH, SIZE)
    low = warpgroup_mma(weights, rows, low, use_acc=use_sums, is_async=True)
    if MORE > 0:
        more_low = warpgroup_mma(weights, more, more_low, use_acc=use_sums, is_async=True)
    if SIZE.PARTS == 2:
        high_weights = _weights(smem[0], slot, WG * 2 + 1, DEPTH, SIZE)
        high = warpgroup_mma(high_weights, rows, high, use_acc=use_sums, is_async=True)
        if MORE > 0:
            more_high = warpgroup_mma(high_weights, more, more_high, use_acc=use_sums, is_async=True)
    RUNNING: gl.constexpr = SIZE.PARTS * (2 if MORE > 0 else 1)  # products of a step
    return wait_for_products((low, high, more_low, more_high), RUNNING, MORE, SIZE.PARTS)


@gluon.jit
def _weights(
    w_smem: gl.tensor, slot: gl.tensor, PART: gl.constexpr, DEPTH: gl.constexpr, SIZE: gl.constexpr
) -> gl.tensor:
    """Return the first DEPTH columns of one of the parts of a slot's weights."""
    if SIZE.FLIPPED:
        weights = w_smem.index(slot * (2 * SIZE.PARTS) + PART).reshape((_DEPTH, _PART))
        return weights.slice(0, DEPTH).permute((1, 0))
    else:  # noqa: RET505 (without `else`, Triton also compiles the code after the return)
        unit = w_smem.index(slot * SIZE.PARTS + PART // 2).reshape((_UNIT, _DEPTH))
        return unit.slice(PART % 2 * _PART, _PART).slice(0, DEPTH, dim=1)


@gluon.jit
def _store(
    out: gl.tensor,
    buffer: gl.tensor,
    tile: gl.tuple,
    sums: gl.tensor,
    part: gl.tensor,
    FIRST: gl.constexpr,
    SIZE: gl.constexpr,
) -> None:
    """Store the products of a part of the weights with the tile's rows from FIRST on. If gated, apply GeGLU first."""
    dtype: gl.constexpr = out.dtype.element_ty
    NUM: gl.constexpr = sums.shape[1]
    if SIZE.GATED:
        gate, up = sums.reshape((4, 2, 8, NUM)).permute((0, 2, 3, 1)).split()
        # As in `blocks.gelu_tanh_times`, which Triton 3.6 cannot call from here.
        gate = gate.to(dtype).to(gl.float32)
        root = gl.rsqrt(1.0 + gl.exp2(gate * (-2.302208198 - 0.1029432397 * gate * gate)))
        gate *= root * root
        hidden = (gate.to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)).to(dtype)
        _store_rows(out, buffer, tile, hidden.reshape((32, NUM)), part, FIRST, SIZE)
    else:
        _store_rows(out, buffer, tile, sums.to(dtype), part, FIRST, SIZE)


@gluon.jit
def _store_rows(
    out: gl.tensor,
    buffer: gl.tensor,
    tile: gl.tuple,
    values: gl.tensor,
    part: gl.tensor,
    FIRST: gl.constexpr,
    SIZE: gl.constexpr,
) -> None:
    """Store columns of values as rows, as many at a time as fit the shared buffer."""
    COLS: gl.constexpr = values.shape[0]
    NUM: gl.constexpr = values.shape[1]
    if buffer.shape[0] < NUM:
        halves = values.reshape((COLS, 2, NUM // 2)).permute((0, 2, 1)).split()
        _store_rows(out, buffer, tile, halves[0], part, FIRST, SIZE)
        _store_rows(out, buffer, tile, halves[1], part, FIRST + NUM // 2, SIZE)
    else:
        LAYOUT: gl.constexpr = _HALF_ROWS if SIZE.GATED else _ROWS
        row = FIRST + gl.arange(0, NUM, gl.SliceLayout(1, LAYOUT))
        column = part * COLS + gl.expand_dims(gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT)), 0)
        inside = gl.expand_dims(row < tile[3], 1) & (column < SIZE.OUT)
        space = buffer.slice(0, NUM)
        space.store(values.permute((1, 0)))
        gl.store(out + (gl.expand_dims((tile[2] + row) * SIZE.OUT, 1) + column), space.load(LAYOUT), mask=inside)
