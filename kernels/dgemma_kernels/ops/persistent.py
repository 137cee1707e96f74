"""The persistent grouped product on Hopper, in Gluon: rows times the weights of their expert, as copies go on.

One program per multiprocessor takes items from a queue. An item is a tile of rows times a block of weights. Four warps
copy both into a ring in shared memory. While an item is stored, they already copy the next one. Two warpgroups
multiply. The weights are the left operand, so rows need not be rounded up to 64.

    queue ──take──> copying warps ──publish──> handover: the next two items ──receive──> two warpgroups
                         │                                                                 │      │
                    wait free, copy                                            wait full, multiply  store
                         ▼                                                                 ▼      ▼
    ring:   │ weights, rows, more rows │ … │ … │ … │   slot: 128 bytes of the depth      sums   buffer ──> out

The limits are the bandwidths of L2 and of shared memory. So an item is as large as the registers for its sums allow:
either 128 rows of weights by up to 288 rows ("wide"), or 256 by up to 160 ("tall", for experts with fewer rows). In
wide items, one instruction multiplies 256 rows. So each weight is read once from shared memory; two instructions of 128
would read it twice. Another product multiplies up to 32 more rows, where that saves a tile. Weights are copied in units
of 128 rows. A part is half a unit. For GeGLU, 8 rows of gate alternate with the same 8 of up, so that a thread has both
values. The product of an adapter is one more step of the depth. The copy engine fills the columns after its rank with
zeros.

A launch may have two products. Items of the second follow those of the first in the queue. Each waits until all items
of its tile in the first product are stored. Items are taken in order, and only by running programs. So the items that
it waits for are complete or being computed. `experts.hopper_many` and `grouped.hopper` have the launches.
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dgemma_kernels.blocks import wait_for_launches_before
from dgemma_kernels.ops.hopper import async_load, copy_by_threads, make_barriers, thread_barrier

TALL_ROWS, WIDE_ROWS = 160, 288  # of a tile
UNIT = gl.constexpr(128)  # rows of weights of one copy
# Rows of a tile's first block: 128 in tall tiles, 128 or 256 in wide ones.
_FEW, _ALL = gl.constexpr(128), gl.constexpr(256)
_MORE = gl.constexpr(32)  # rows of the second block
_STAGES = gl.constexpr(4)  # slots of the ring; with 3, a program waits for memory
_LINE = gl.constexpr(128)  # bytes per row in a slot, and the swizzle width
_FIELDS = gl.constexpr(6)  # of an item

# Layouts of rows. A thread has 16 bytes.
_ROWS16 = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # rows of 64 values of 2 bytes
_ROWS8 = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))  # rows of 128 values of 1 byte
_HALF16 = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))  # rows of 32 values of 2 bytes
_NUMBERS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Product(NamedTuple):
    """The kind of a product, and its sizes. All are constants of the compiled kernel."""

    GATED: bool  # ends in GeGLU
    FLIPPED: bool  # the weights are transposed in memory
    GATHERED: bool  # rows are tokens, which threads copy
    WIDTH: int  # of the rows that it multiplies
    OUT: int  # columns of the result
    NUM_ACTIVE: int  # choices per token
    TALL: bool
    UNITS: int  # of a weight matrix
    BLOCKS: int  # items per tile
    ADAPTER_DEPTH: int = 0  # columns of the adapter's step; 0 without an adapter
    HALVES_BEFORE: int = 0  # half items per tile in the previous product of this launch; 0 if this is the first
    COUNTED: bool = False  # its finished halves are counted, for the product after it


class Operands(NamedTuple):
    """The tensors of one product."""

    rows: gl.tensor  # descriptors of blocks of 256, 128 and 32; if gathered, `rows` are the tokens
    few_rows: gl.tensor
    more_rows: gl.tensor
    row_scale: gl.tensor  # None if the rows are not float8
    proj: gl.tensor  # descriptor of (O / 16, 2E, 8, I) if gated, of (E, I, O) if flipped, else of (E * O, I)
    proj_scale: gl.tensor
    weights: gl.tensor  # routing weights by choice; None if results stay in the order of the tiles
    out: gl.tensor
    adapter: gl.tensor = None  # `Operands` whose rows and weights are the last step, or None


class Tables(NamedTuple):
    """The tiles, and counters."""

    pairs: gl.tensor  # the choice of each row as token * A + a
    tiles: gl.tensor  # expert, first row and number of rows of each
    num_tiles: gl.tensor
    finished: gl.tensor  # half items of the first product, by tile
    queue: gl.tensor  # the next item; zero between launches


class _Item(NamedTuple):
    """A tile of rows times a block of weights."""

    number: gl.tensor  # in the queue
    tile: gl.tensor
    expert: gl.tensor
    first: gl.tensor  # row
    num_rows: gl.tensor
    block: gl.tensor


class _Ring(NamedTuple):
    """Slots in shared memory, and their barriers."""

    weights: gl.tensor
    rows: gl.tensor
    more_rows: gl.tensor
    full: gl.tensor
    free: gl.tensor


class _Handover(NamedTuple):
    """The next two items in shared memory: their fields, the rows of their results, and a factor for each row."""

    fields: gl.tensor
    targets: gl.tensor
    factors: gl.tensor
    full: gl.tensor
    free: gl.tensor


class _Buffers(NamedTuple):
    """Shared memory for the results of an item: a buffer, and this item's parts of `_Handover`."""

    buffer: gl.tensor
    targets: gl.tensor
    factors: gl.tensor


class _Memory(NamedTuple):
    """All shared memory of a program: the ring, the handover, and a buffer for each warpgroup's results."""

    ring: _Ring
    handover: _Handover
    stored: gl.tensor


class _Slot(NamedTuple):
    """A slot of the ring, and the phase of its barriers."""

    index: gl.tensor
    phase: gl.tensor


def describe_rows(rows: Tensor) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """Describe the three blocks of rows that a step copies.

    Example: `Operands(*describe_rows(hidden), None, proj, None, None, out)`.
    """
    return _describe(rows, [_ALL.value]), _describe(rows, [_FEW.value]), _describe(rows, [_MORE.value])


def describe_weights(weights: Tensor, *, gated: bool = False, flipped: bool = False) -> TensorDescriptor:
    """Describe units of weights (E, O, I), which are contiguous or, if `flipped`, transposed.

    Example: `describe_weights(experts.gate_up_proj, gated=True)`.
    """
    num_experts, num_cols, width = weights.shape
    if gated:  # copies have 8 rows of gate, the same 8 of up, the next 8 of gate, and so on
        eights = weights.view(2 * num_experts, num_cols // 16, 8, width).transpose(0, 1)
        return _describe(eights, [UNIT.value // 16, 2, 8])
    return _describe(weights.mT, [1, 64]) if flipped else _describe(weights.view(-1, width), [UNIT.value])


def _describe(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Describe blocks of _LINE bytes in the last dimension. block: their sizes in the other dimensions."""
    size = tensor.element_size()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=_LINE.value, element_bitwidth=8 * size, rank=tensor.ndim)
    return TensorDescriptor.from_tensor(tensor, [*block, _LINE.value // size], layout)


@gluon.jit
def multiply_queue(
    first: Operands,
    second: Operands,
    tables: Tables,
    FIRST: gl.constexpr,
    SECOND: gl.constexpr,
    DEPENDENT: gl.constexpr,
) -> None:
    """Compute one product, or two if `SECOND` is not None. `tables.num_tiles` points to the number of tiles."""
    WEIGHTED: gl.constexpr = first.weights is not None or SECOND is not None
    SCALED: gl.constexpr = WEIGHTED or first.row_scale is not None
    dtype: gl.constexpr = first.proj.dtype
    BITS: gl.constexpr = first.proj.layout.element_bitwidth
    DEPTH: gl.constexpr = 8 * _LINE // BITS
    LINES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=_LINE, element_bitwidth=BITS, rank=2)
    SLOTS: gl.constexpr = _STAGES * (2 if FIRST.TALL else 1) * (2 if FIRST.FLIPPED else 1)  # of weights
    WHOLE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    STORED: gl.constexpr = 64 if FIRST.GATED and FIRST.ADAPTER_DEPTH > 0 else 32  # rows at a time
    stored = gl.allocate_shared_memory(first.out.dtype.element_ty, [2, STORED, 64], WHOLE)
    ring = _Ring(
        gl.allocate_shared_memory(dtype, [SLOTS, 64 if FIRST.FLIPPED else UNIT, DEPTH], LINES),
        gl.allocate_shared_memory(dtype, [_STAGES, _FEW if FIRST.TALL else _ALL, DEPTH], LINES),
        gl.allocate_shared_memory(dtype, [_STAGES, _MORE, DEPTH], LINES),
        make_barriers(_STAGES, 129 if FIRST.GATHERED else 1),  # 128 threads copy tokens
        make_barriers(_STAGES, 2),
    )
    handover = _Handover(
        gl.allocate_shared_memory(gl.int32, [2 * _FIELDS, 1], _PLAIN),
        gl.allocate_shared_memory(gl.int32, [2, 512 if WEIGHTED else 16], _PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, 512 if SCALED else 16], _PLAIN),
        make_barriers(2, 1),
        make_barriers(2, 2),
    )
    fence_async_shared()
    wait_for_launches_before(DEPENDENT)
    tables = Tables(tables.pairs, tables.tiles, gl.load(tables.num_tiles), tables.finished, tables.queue)
    memory = _Memory(ring, handover, stored)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_copy, (first, second, memory, tables, FIRST, SECOND)),
            (_multiply, (first, second, memory, tables, ZERO, FIRST, SECOND)),
            (_multiply, (first, second, memory, tables, ONE, FIRST, SECOND)),
        ],
        [4, 4],
        [208, 208],  # registers per thread, which leaves 88 for the copying warps
    )


@gluon.jit
def _next(slot: _Slot) -> _Slot:
    last = slot.index == _STAGES - 1
    return _Slot(gl.where(last, 0, slot.index + 1), gl.where(last, slot.phase ^ 1, slot.phase))


@gluon.jit
def _free_before(ring: _Ring, slot: _Slot) -> None:
    """Mark the slot before this one as free."""
    # Computed, not carried through the loop: of two variables that are equal before a loop, Triton 3.6 loses one.
    before = gl.where(slot.index == 0, _STAGES - 1, slot.index - 1)
    mbarrier.arrive(ring.free.index(before))


@gluon.jit
def _find(tables: Tables, number: gl.tensor, num_before: gl.tensor, SIZE: gl.constexpr) -> _Item:
    """Return item `number`. The items of this product start at number `num_before`. Neighbours share a tile."""
    tile = gl.minimum((number - num_before) // SIZE.BLOCKS, tables.num_tiles - 1)
    at = tables.tiles + tile * 3
    return _Item(number, tile, gl.load(at), gl.load(at + 1), gl.load(at + 2), (number - num_before) % SIZE.BLOCKS)


@gluon.jit
def _num_finished(tables: Tables, item: _Item, SIZE: gl.constexpr) -> gl.tensor:
    """Return the number of finished half items of this tile in the previous product."""
    if SIZE.HALVES_BEFORE > 0:
        return gl.load(tables.finished + item.tile, volatile=True)
    else:  # noqa: RET505 (without `else`, Triton also compiles the code after the return)
        return item.number * 0


@gluon.jit
def _publish(
    operands: Operands, handover: _Handover, tables: Tables, item: _Item, turn: gl.tensor, SIZE: gl.constexpr
) -> None:
    """Hand an item to both warpgroups."""
    WEIGHTED: gl.constexpr = operands.weights is not None
    SCALED: gl.constexpr = WEIGHTED or operands.row_scale is not None
    at = turn % 2
    lane = gl.arange(0, 512, _NUMBERS)
    inside = lane < item.num_rows
    if SCALED:
        pair = gl.load(tables.pairs + item.first + lane, mask=inside, other=0)
        if not WEIGHTED:
            factor = gl.load(operands.row_scale + pair // SIZE.NUM_ACTIVE, mask=inside, other=0.0)
        else:
            factor = gl.load(operands.weights + pair, mask=inside, other=0.0)
            if operands.row_scale is not None:
                factor *= gl.load(operands.row_scale + item.first + lane, mask=inside, other=0.0)
    mbarrier.wait(handover.free.index(at), (turn // 2 & 1) ^ 1)
    for i in gl.static_range(_FIELDS):
        handover.fields.index(at * _FIELDS + i).store(gl.zeros([1], gl.int32, _NUMBERS) + item[i])
    if WEIGHTED:
        handover.targets.index(at).store(pair)
    if SCALED:
        handover.factors.index(at).store(factor)
    mbarrier.arrive(handover.full.index(at))


@gluon.jit
def _receive(handover: _Handover, turn: gl.tensor) -> _Item:
    """Wait for the next item and return its fields."""
    at = turn % 2
    mbarrier.wait(handover.full.index(at), turn // 2 & 1)
    number = gl.max(handover.fields.index(at * _FIELDS).load(_NUMBERS), 0)
    tile = gl.max(handover.fields.index(at * _FIELDS + 1).load(_NUMBERS), 0)
    expert = gl.max(handover.fields.index(at * _FIELDS + 2).load(_NUMBERS), 0)
    first = gl.max(handover.fields.index(at * _FIELDS + 3).load(_NUMBERS), 0)
    num_rows = gl.max(handover.fields.index(at * _FIELDS + 4).load(_NUMBERS), 0)
    block = gl.max(handover.fields.index(at * _FIELDS + 5).load(_NUMBERS), 0)
    return _Item(number, tile, expert, first, num_rows, block)


@gluon.jit
def _tokens(
    tables: Tables,
    item: _Item,
    start: gl.tensor,
    limit: gl.tensor,
    NUM: gl.constexpr,
    LAYOUT: gl.constexpr,
    SIZE: gl.constexpr,
) -> gl.tensor:
    """Return the tokens of NUM rows, and -1 for rows at or after `limit` or the end of the tile."""
    lane = start + gl.arange(0, NUM, gl.SliceLayout(1, LAYOUT))
    inside = lane < gl.minimum(item.num_rows, limit)
    pair = gl.load(tables.pairs + item.first + lane, mask=inside, other=0).to(gl.int32)
    return gl.where(inside, pair // SIZE.NUM_ACTIVE, -1)


@gluon.jit
def _source(tables: Tables, item: _Item, LAYOUT: gl.constexpr, SIZE: gl.constexpr) -> gl.tuple:
    """Return the tokens of both blocks of a tile. Rows that are not gathered are in the order of the tiles."""
    if SIZE.GATHERED:
        ROWS: gl.constexpr = _FEW if SIZE.TALL else _ALL
        start = gl.where(item.num_rows > _FEW + _MORE, ROWS, _FEW)
        rows = _tokens(tables, item, 0, start, ROWS, LAYOUT, SIZE)
        more = _tokens(tables, item, start, start + _MORE, _MORE, LAYOUT, SIZE)
        return rows, more
    else:  # noqa: RET505
        return ()


@gluon.jit
def _copy(
    first: Operands, second: Operands, memory: _Memory, tables: Tables, FIRST: gl.constexpr, SECOND: gl.constexpr
) -> None:
    """Start all copies, in the order of their use."""
    zero = tables.num_tiles * 0
    slot = _Slot(zero, zero + 1)
    num_first = tables.num_tiles * FIRST.BLOCKS
    if SECOND is None:
        span = (zero, num_first, gl.num_programs(0))
        _copy_items(first, memory, tables, gl.program_id(0), slot, zero, span, FIRST)
    else:  # items wait for others, so only a running program may take one
        total = num_first + tables.num_tiles * SECOND.BLOCKS
        number = gl.atomic_add(tables.queue, 1, sem="relaxed")
        _end_queue(tables, number, total, zero)
        number, slot, turn = _copy_items(first, memory, tables, number, slot, zero, (zero, total, zero), FIRST)
        _copy_items(second, memory, tables, number, slot, turn, (num_first, total, zero), SECOND)


@gluon.jit
def _end_queue(tables: Tables, taken: gl.tensor, total: gl.tensor, num_given: gl.tensor) -> None:
    """Set the queue to zero for the next launch if `taken` is the last number that this launch takes.

    A program takes one number per item, and one more at its start if `num_given` is 0.
    """
    end = total + gl.num_programs(0) - num_given
    if taken == end - 1:
        gl.atomic_add(tables.queue, -end, sem="relaxed")


@gluon.jit
def _copy_items(
    operands: Operands,
    memory: _Memory,
    tables: Tables,
    number: gl.tensor,
    slot: _Slot,
    turn: gl.tensor,
    span: gl.tuple,
    SIZE: gl.constexpr,
) -> gl.tuple:
    """Copy item `number` and further items from the queue, until this product has none left.

    span: where this product's items start, the number of items in the launch, and the number of the first item in the
    queue. If it is not 0, program i begins with item i. turn: the number of items so far. Returns the next item's
    number, slot and turn.
    """
    ring, handover = memory.ring, memory.handover
    num_before, total, num_given = span
    DEPTH: gl.constexpr = ring.rows.shape[2]
    LAYOUT: gl.constexpr = _ROWS16 if DEPTH == 64 else _ROWS8
    STEPS: gl.constexpr = (SIZE.WIDTH + DEPTH - 1) // DEPTH
    # Between copies, the next item is prepared in three parts. Each waits only for loads that were started in the
    # part before, so no copy is late.
    ONE: gl.constexpr = 2 if STEPS > 2 else STEPS
    TWO: gl.constexpr = 4 if STEPS > 4 else STEPS
    THREE: gl.constexpr = 6 if STEPS > 6 else STEPS
    end = num_before + tables.num_tiles * SIZE.BLOCKS
    item = _find(tables, number, num_before, SIZE)
    source = _source(tables, item, LAYOUT, SIZE)
    num_finished = _num_finished(tables, item, SIZE)
    if not SIZE.COUNTED or number < end:
        _publish(operands, handover, tables, item, turn, SIZE)
    while item.number < end:
        turn += 1
        if SIZE.HALVES_BEFORE > 0:
            while num_finished < SIZE.HALVES_BEFORE:
                num_finished = _num_finished(tables, item, SIZE)
            # Threads wrote the hidden values, and the copy engine reads them by another path.
            gl.inline_asm_elementwise(
                "fence.acq_rel.gpu; fence.proxy.async.global; // $0", "=r", [], gl.int32, False, 1
            )
        for step in range(ONE):
            slot = _copy_step(operands, ring, source, item, step * DEPTH, slot, SIZE)
        taken = gl.atomic_add(tables.queue, 1, sem="relaxed")
        for step in range(ONE, TWO):
            slot = _copy_step(operands, ring, source, item, step * DEPTH, slot, SIZE)
        _end_queue(tables, taken, total, num_given)
        after = _find(tables, taken + num_given, num_before, SIZE)
        for step in range(TWO, THREE):
            slot = _copy_step(operands, ring, source, item, step * DEPTH, slot, SIZE)
        later = _source(tables, after, LAYOUT, SIZE)
        num_finished = _num_finished(tables, after, SIZE)
        if not SIZE.COUNTED or after.number < end:  # else the next product publishes its first item
            _publish(operands, handover, tables, after, turn, SIZE)
        for step in range(THREE, STEPS):
            slot = _copy_step(operands, ring, source, item, step * DEPTH, slot, SIZE)
        if SIZE.ADAPTER_DEPTH > 0:
            slot = _copy_step(operands.adapter, ring, (), item, 0, slot, SIZE)
        item = after
        source = later
    return item.number, slot, turn


@gluon.jit
def _copy_step(
    operands: Operands, ring: _Ring, source: gl.tuple, item: _Item, start: gl.tensor, slot: _Slot, SIZE: gl.constexpr
) -> _Slot:
    """Start the copies of 128 bytes of each row, from column `start` on. source: the tokens, if threads copy them."""
    block, num_rows = item.block, item.num_rows
    DEPTH: gl.constexpr = ring.rows.shape[2]
    UNIT_BYTES: gl.constexpr = UNIT * _LINE
    at = slot.index
    mbarrier.wait(ring.free.index(at), slot.phase)
    bar = ring.full.index(at)
    target = ring.rows.index(at)
    more = ring.more_rows.index(at)
    is_few = num_rows <= _FEW + _MORE  # the first block has 128 rows
    has_more = num_rows > gl.where(is_few, _FEW, _ALL)
    if len(source) > 0:
        LAYOUT: gl.constexpr = _ROWS16 if DEPTH == 64 else _ROWS8
        if SIZE.TALL:
            if block * 2 + 1 < SIZE.UNITS:
                mbarrier.expect(bar, 2 * UNIT_BYTES)
                _load_unit(operands, item, start, ring, at, 1, SIZE)
            else:
                mbarrier.expect(bar, UNIT_BYTES)
            _load_unit(operands, item, start, ring, at, 0, SIZE)
        else:
            mbarrier.expect(bar, UNIT_BYTES)
            _load_unit(operands, item, start, ring, at, 0, SIZE)
        column = start + gl.expand_dims(gl.arange(0, DEPTH, gl.SliceLayout(0, LAYOUT)), 0)
        token = gl.expand_dims(source[0], 1)
        copy_by_threads(target, operands.rows + (token * SIZE.WIDTH + column), mask=token >= 0)
        if has_more:
            more_token = gl.expand_dims(source[1], 1)
            copy_by_threads(more, operands.rows + (more_token * SIZE.WIDTH + column), mask=more_token >= 0)
        async_copy.mbarrier_arrive(bar, increment_count=False)
    else:
        UNITS: gl.constexpr = 2 if SIZE.TALL else 1
        if SIZE.GATHERED or SIZE.HALVES_BEFORE > 0:
            fence_async_shared()  # threads wrote to this slot before
            mbarrier.arrive(bar, count=128)
        if is_few:
            if has_more:
                mbarrier.expect(bar, UNITS * UNIT_BYTES + (_FEW + _MORE) * _LINE)
                async_load(operands.more_rows, [item.first + _FEW, start], bar, more)
            else:
                mbarrier.expect(bar, UNITS * UNIT_BYTES + _FEW * _LINE)
            async_load(operands.few_rows, [item.first, start], bar, target.slice(0, _FEW))
        elif not SIZE.TALL:
            if has_more:
                mbarrier.expect(bar, UNITS * UNIT_BYTES + (_ALL + _MORE) * _LINE)
                async_load(operands.more_rows, [item.first + _ALL, start], bar, more)
            else:
                mbarrier.expect(bar, UNITS * UNIT_BYTES + _ALL * _LINE)
            async_load(operands.rows, [item.first, start], bar, target)
        for i in gl.static_range(UNITS):
            _load_unit(operands, item, start, ring, at, i, SIZE)
    return _next(slot)


@gluon.jit
def _load_unit(
    operands: Operands, item: _Item, start: gl.tensor, ring: _Ring, slot: gl.tensor, N: gl.constexpr, SIZE: gl.constexpr
) -> None:
    """Start to copy unit N of an item's block."""
    UNITS: gl.constexpr = 2 if SIZE.TALL else 1
    unit = item.block * UNITS + N
    at = slot * UNITS + N
    bar = ring.full.index(slot)
    proj = operands.proj
    if SIZE.GATED:
        target = ring.weights.index(at)
        eights = target._reinterpret(target.dtype, [UNIT // 16, 2, 8, target.shape[1]], proj.layout)
        async_load(proj, [unit * (UNIT // 16), item.expert * 2, 0, start], bar, eights)
    elif SIZE.FLIPPED:
        for part in gl.static_range(2):
            target = ring.weights.index(at * 2 + part)
            matrix = target._reinterpret(target.dtype, [1, 64, 64], proj.layout)
            async_load(proj, [item.expert, start, unit * UNIT + part * 64], bar, matrix)
    else:  # rows beyond the last of this expert are not stored
        async_load(proj, [item.expert * SIZE.OUT + unit * UNIT, start], bar, ring.weights.index(at))


@gluon.jit
def _multiply(
    first: Operands,
    second: Operands,
    memory: _Memory,
    tables: Tables,
    WG: gl.constexpr,
    FIRST: gl.constexpr,
    SECOND: gl.constexpr,
) -> None:
    """Compute half of the columns of every item, as one of two warpgroups."""
    zero = tables.num_tiles * 0
    end = tables.num_tiles * FIRST.BLOCKS
    slot, turn = _multiply_items(first, memory, tables, _Slot(zero, zero), zero, end, WG, FIRST)
    if SECOND is not None:
        end += tables.num_tiles * SECOND.BLOCKS
        _multiply_items(second, memory, tables, slot, turn, end, WG, SECOND)


@gluon.jit
def _multiply_items(
    operands: Operands,
    memory: _Memory,
    tables: Tables,
    slot: _Slot,
    turn: gl.tensor,
    end: gl.tensor,
    WG: gl.constexpr,
    SIZE: gl.constexpr,
) -> tuple[_Slot, gl.tensor]:
    """Multiply all items before number `end` of the queue, and return the slot and turn of the item after them."""
    ring, handover = memory.ring, memory.handover
    buffer = memory.stored.index(WG)
    if SIZE.GATED:
        HALF: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
        buffer = buffer._reinterpret(buffer.dtype, [2 * buffer.shape[0], 32], HALF)
    item = _receive(handover, turn)
    while item.number < end:
        buffers = _Buffers(buffer, handover.targets.index(turn % 2), handover.factors.index(turn % 2))
        num_rows = item.num_rows
        if SIZE.TALL:
            # With an odd number of units, the last item has one unit, and each warpgroup has a part of it.
            if SIZE.UNITS % 2 > 0 and item.block == SIZE.BLOCKS - 1:
                if num_rows > _FEW:
                    slot = _multiply_item(operands, ring, buffers, item, slot, _FEW, _MORE, 1, WG, SIZE)
                else:
                    slot = _multiply_item(operands, ring, buffers, item, slot, _FEW, 0, 1, WG, SIZE)
            elif num_rows > _FEW:
                slot = _multiply_item(operands, ring, buffers, item, slot, _FEW, _MORE, 2, WG, SIZE)
            else:
                slot = _multiply_item(operands, ring, buffers, item, slot, _FEW, 0, 2, WG, SIZE)
        elif num_rows > _ALL:
            slot = _multiply_item(operands, ring, buffers, item, slot, _ALL, _MORE, 1, WG, SIZE)
        elif num_rows > _FEW + _MORE:
            slot = _multiply_item(operands, ring, buffers, item, slot, _ALL, 0, 1, WG, SIZE)
        elif num_rows > _FEW:
            slot = _multiply_item(operands, ring, buffers, item, slot, _FEW, _MORE, 1, WG, SIZE)
        else:
            slot = _multiply_item(operands, ring, buffers, item, slot, _FEW, 0, 1, WG, SIZE)
        if SIZE.COUNTED:
            gl.inline_asm_elementwise("fence.proxy.async.global; // $0", "=r", [], gl.int32, False, 1)
            thread_barrier()  # all threads store before one thread counts this half of the item
            gl.atomic_add(tables.finished + item.tile, 1, sem="release")
        mbarrier.arrive(handover.free.index(turn % 2))
        turn += 1
        item = _receive(handover, turn)
    return slot, turn


@gluon.jit
def _multiply_item(
    operands: Operands,
    ring: _Ring,
    buffers: _Buffers,
    item: _Item,
    slot: _Slot,
    NUM: gl.constexpr,
    MORE: gl.constexpr,
    PARTS: gl.constexpr,
    WG: gl.constexpr,
    SIZE: gl.constexpr,
) -> _Slot:
    """Multiply NUM + MORE rows by both parts of a unit (PARTS = 2) or by one part, and store the result."""
    DEPTH: gl.constexpr = ring.rows.shape[2]
    STEPS: gl.constexpr = (SIZE.WIDTH + DEPTH - 1) // DEPTH
    K: gl.constexpr = DEPTH // 4
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NUM, K])
    MORE_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _MORE, K])
    low = gl.zeros((64, NUM), gl.float32, SUMS)
    high = gl.zeros((64, NUM), gl.float32, SUMS)
    more_low = gl.zeros((64, _MORE), gl.float32, MORE_SUMS)
    more_high = gl.zeros((64, _MORE), gl.float32, MORE_SUMS)
    sums = (low, high, more_low, more_high)  # of the first block of rows by both parts, and of the second block
    for step in range(STEPS):
        sums = _multiply_step(ring, sums, slot, step, NUM, MORE, PARTS, DEPTH, WG, SIZE)
        if step > 0:
            _free_before(ring, slot)
        slot = _next(slot)
    if SIZE.ADAPTER_DEPTH > 0:
        sums = _multiply_step(ring, sums, slot, STEPS, NUM, MORE, PARTS, SIZE.ADAPTER_DEPTH, WG, SIZE)
        _free_before(ring, slot)
        slot = _next(slot)
    low, high, more_low, more_high = _wait_for_products(sums, 0, MORE, PARTS)
    _free_before(ring, slot)
    unit = item.block * (2 if SIZE.TALL else 1) + (WG if PARTS == 2 else 0)
    part = unit * 2 + (0 if PARTS == 2 else WG)
    if MORE > 0:  # first, because it frees registers
        _store(operands, buffers, item, more_low, part, NUM, SIZE)
        if PARTS == 2:
            _store(operands, buffers, item, more_high, part + 1, NUM, SIZE)
    _store(operands, buffers, item, low, part, 0, SIZE)
    if PARTS == 2:
        _store(operands, buffers, item, high, part + 1, 0, SIZE)
    return slot


@gluon.jit
def _multiply_step(
    ring: _Ring,
    sums: gl.tuple,
    slot: _Slot,
    step: gl.tensor,
    NUM: gl.constexpr,
    MORE: gl.constexpr,
    PARTS: gl.constexpr,
    COLS: gl.constexpr,
    WG: gl.constexpr,
    SIZE: gl.constexpr,
) -> gl.tuple:
    """Start the products of a slot's first COLS columns, and wait for those of the step before."""
    low, high, more_low, more_high = sums
    at = slot.index
    mbarrier.wait(ring.full.index(at), slot.phase)
    if SIZE.GATHERED:
        fence_async_shared()  # the rows were written by threads, and the products read them by another path
    unit = at * 2 + (WG if PARTS == 2 else 0) if SIZE.TALL else at
    w_low = _part(ring, unit, 0 if PARTS == 2 else WG, COLS, SIZE)
    w_high = _part(ring, unit, 1, COLS, SIZE)
    rows = ring.rows.index(at).slice(0, NUM).slice(0, COLS, dim=1).permute((1, 0))
    low = warpgroup_mma(w_low, rows, low, use_acc=step > 0, is_async=True)
    if PARTS == 2:
        high = warpgroup_mma(w_high, rows, high, use_acc=step > 0, is_async=True)
    if MORE > 0:
        more = ring.more_rows.index(at).slice(0, COLS, dim=1).permute((1, 0))
        more_low = warpgroup_mma(w_low, more, more_low, use_acc=step > 0, is_async=True)
        if PARTS == 2:
            more_high = warpgroup_mma(w_high, more, more_high, use_acc=step > 0, is_async=True)
    RUNNING: gl.constexpr = PARTS * (2 if MORE > 0 else 1)  # products of a step
    return _wait_for_products((low, high, more_low, more_high), RUNNING, MORE, PARTS)


@gluon.jit
def _part(ring: _Ring, unit: gl.tensor, PART: gl.constexpr, COLS: gl.constexpr, SIZE: gl.constexpr) -> gl.tensor:
    """Return the first COLS columns of half a unit."""
    if SIZE.FLIPPED:
        return ring.weights.index(unit * 2 + PART).slice(0, COLS).permute((1, 0))
    else:  # noqa: RET505
        return ring.weights.index(unit).slice(64 * PART, 64).slice(0, COLS, dim=1)


@gluon.jit
def _wait_for_products(sums: gl.tuple, RUNNING: gl.constexpr, MORE: gl.constexpr, PARTS: gl.constexpr) -> gl.tuple:
    """Wait until at most RUNNING products run, and return all sums."""
    low, high, more_low, more_high = sums
    if MORE > 0 and PARTS == 2:
        low, high, more_low, more_high = warpgroup_mma_wait(RUNNING, deps=(low, high, more_low, more_high))
    elif MORE > 0:
        low, more_low = warpgroup_mma_wait(RUNNING, deps=(low, more_low))
    elif PARTS == 2:
        low, high = warpgroup_mma_wait(RUNNING, deps=(low, high))
    else:
        low = warpgroup_mma_wait(RUNNING, deps=(low,))
    return low, high, more_low, more_high


@gluon.jit
def _store(
    operands: Operands,
    buffers: _Buffers,
    item: _Item,
    sums: gl.tensor,
    part: gl.tensor,
    FIRST: gl.constexpr,
    SIZE: gl.constexpr,
) -> None:
    """Store the products of 64 rows of weights with the tile's rows from FIRST on. If gated, apply GeGLU first."""
    dtype: gl.constexpr = operands.out.dtype.element_ty
    NUM: gl.constexpr = sums.shape[1]
    MMA: gl.constexpr = sums.type.layout
    line = gl.arange(0, 64, gl.SliceLayout(1, MMA))
    if SIZE.GATED:
        if operands.row_scale is not None:
            # Line 16 b + 8 u + i is row 8 b + i of gate (u = 0) or of up (u = 1).
            row = part * 32 + line // 16 * 8 + line % 8 + line // 8 % 2 * SIZE.OUT
            scale = gl.load(operands.proj_scale + item.expert * (2 * SIZE.OUT) + row)
            by_row = buffers.factors.slice(FIRST, NUM).load(gl.SliceLayout(0, MMA))
            sums = sums * (gl.expand_dims(scale, 1) * gl.expand_dims(by_row, 0))
        gate, up = sums.reshape((4, 2, 8, NUM)).permute((0, 2, 3, 1)).split()
        # As in `blocks.gelu_tanh_times`, which Triton 3.6 cannot call from here.
        gate = gate.to(dtype).to(gl.float32)
        root = gl.rsqrt(1.0 + gl.exp2(gate * (-2.302208198 - 0.1029432397 * gate * gate)))
        gate *= root * root
        hidden = (gate.to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)).to(dtype)
        _store_rows(operands, buffers, item, hidden.reshape((32, NUM)), part, FIRST, SIZE)
    else:
        if operands.row_scale is not None:
            scale = gl.load(operands.proj_scale + item.expert * SIZE.OUT + part * 64 + line)
            sums = sums * gl.expand_dims(scale, 1)
        _store_rows(operands, buffers, item, sums.to(dtype), part, FIRST, SIZE)


@gluon.jit
def _store_rows(
    operands: Operands,
    buffers: _Buffers,
    item: _Item,
    values: gl.tensor,
    part: gl.tensor,
    FIRST: gl.constexpr,
    SIZE: gl.constexpr,
) -> None:
    """Store columns of values as rows, as many at a time as fit the shared buffer, times routing weights if any."""
    COLS: gl.constexpr = values.shape[0]
    NUM: gl.constexpr = values.shape[1]
    if buffers.buffer.shape[0] < NUM:
        halves = values.reshape((COLS, 2, NUM // 2)).permute((0, 2, 1)).split()
        _store_rows(operands, buffers, item, halves[0], part, FIRST, SIZE)
        _store_rows(operands, buffers, item, halves[1], part, FIRST + NUM // 2, SIZE)
    else:
        LAYOUT: gl.constexpr = _HALF16 if SIZE.GATED else _ROWS16
        ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
        lane = FIRST + gl.arange(0, NUM, ROW)
        inside = gl.expand_dims(lane < item.num_rows, 1)
        each = part * COLS + gl.expand_dims(gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT)), 0)
        if 2 * SIZE.UNITS * COLS > SIZE.OUT:
            inside = inside & (each < SIZE.OUT)
        space = buffers.buffer.slice(0, NUM)
        space.store(values.permute((1, 0)))
        rows = space.load(LAYOUT)
        if operands.weights is None:
            target = (item.first + lane) * SIZE.OUT
        else:
            target = buffers.targets.slice(FIRST, NUM).load(ROW) * SIZE.OUT
            weight = gl.expand_dims(buffers.factors.slice(FIRST, NUM).load(ROW), 1)
            rows = (rows.to(gl.float32) * weight).to(operands.out.dtype.element_ty)
        gl.store(operands.out + (gl.expand_dims(target, 1) + each), rows, mask=inside)
