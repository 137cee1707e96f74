"""The experts' two products for many tokens on Hopper, in Gluon: copies and products run at the same time.

One program per multiprocessor takes items from a queue. An item is a tile of rows times a block of weights. Four warps
copy both into a ring in shared memory. While an item is stored, they already copy the next one. Two warpgroups
multiply. The weights are the left operand, so rows need not be rounded up to 64.

The limits are the bandwidths of L2 and of shared memory. So an item is as large as the registers for its sums allow:
either 128 rows of weights by up to 288 rows of tokens ("wide"), or 256 by up to 160 ("tall", for experts with fewer
tokens). In wide items, one instruction multiplies 256 rows of tokens. So each weight is read once from shared memory;
two instructions of 128 would read it twice. Weights are copied in units of 128 rows. A part is half a unit. In gate_up,
8 rows of gate alternate with the same 8 of up, so that a thread has both values for GeGLU.

With both products in one launch, items of down follow those of gate_up in the queue. An item of down waits until all
items of its tile in gate_up are stored. Items are taken in order, and only by running programs. So the items that it
waits for are complete or being computed.

`kernel.multiply_experts`, `expert_gate_up` and `expert_down` select it. `kernel` has the same products in Triton.
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

from dgemma_kernels.formats import Quantized
from dgemma_kernels.formats.float8 import values_and_scale
from dgemma_kernels.ops.configs import dependent_launch, num_multiprocessors
from dgemma_kernels.ops.hopper import (
    LINE,
    async_load,
    copy_by_threads,
    describe_lines,
    make_barriers,
    next_slot,
    slot_before,
    thread_barrier,
    wait_for_products,
)
from dgemma_kernels.ops.router.kernel import ExpertTiles

TALL_ROWS, WIDE_ROWS = 160, 288  # of a tile
# Rows of tokens in a tile's first block: 128 in tall tiles, 128 or 256 in wide ones.
_FEW, _ALL = gl.constexpr(128), gl.constexpr(256)
_MORE = gl.constexpr(32)  # rows of the second block
_STAGES = gl.constexpr(4)  # slots of the ring; with 3, a program waits for memory
_UNIT = gl.constexpr(128)  # rows of weights of one copy
_FIELDS = gl.constexpr(6)  # of an item

# Layouts of rows. A thread has 16 bytes.
_ROWS16 = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # rows of 64 values of 2 bytes
_ROWS8 = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))  # rows of 128 values of 1 byte
_HALF16 = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))  # rows of 32 values of 2 bytes
_NUMBERS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class _ProductSizes(NamedTuple):
    """One of the two products, and its sizes."""

    GATED: bool
    WIDTH: int  # of the rows that it multiplies
    OUT: int  # columns of the result
    NUM_ACTIVE: int
    TALL: bool
    UNITS: int  # of a weight matrix
    BLOCKS: int  # items per tile
    HALVES_BEFORE: int  # half items per tile in the previous product of this launch; 0 if this is the first
    COUNTED: bool  # its finished halves are counted, for the product after it


class _Operands(NamedTuple):
    """The tensors of one product."""

    rows: gl.tensor  # in down, descriptors of blocks of 256, 128 and 32
    few_rows: gl.tensor
    more_rows: gl.tensor
    row_scale: gl.tensor  # None if the rows are not float8
    proj: gl.tensor  # descriptor of (F / 8, 2E, 8, D) or (E * D, F)
    proj_scale: gl.tensor
    weights: gl.tensor  # None in gate_up
    out: gl.tensor


class _Tables(NamedTuple):
    """The tiles, and counters."""

    pairs: gl.tensor
    tiles: gl.tensor
    num_tiles: gl.tensor
    finished: gl.tensor
    queue: gl.tensor


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


class _Place(NamedTuple):
    """The next slot of the ring, its phase, and the number of items so far."""

    slot: gl.tensor
    phase: gl.tensor
    turn: gl.tensor


def expert_gate_up(x: Tensor | Quantized, gate_up_proj: Tensor | Quantized, tiles: ExpertTiles) -> Tensor:
    """Return geglu(x[token] @ gate_up_proj[expert].T) as `kernel.expert_gate_up` does. Inputs may be float8; the result
    never is.

    The tiles have at most TALL_ROWS or WIDE_ROWS rows.

    Example: `hidden = expert_gate_up(expert_in, experts.gate_up_proj, tiles)`.
    """
    hidden = _empty_hidden(x, gate_up_proj, tiles)
    _launch(_gate_up_operands(x, gate_up_proj, hidden), _NONE, tiles)
    return hidden


def expert_down(
    hidden: Tensor | Quantized, down_proj: Tensor | Quantized, weights: Tensor, tiles: ExpertTiles
) -> Tensor:
    """Return weights[token, k] * (hidden[pair] @ down_proj[expert].T) at [token, k], as `kernel.expert_down` does.

    Float8 hidden values have one scale per row.

    Example: `rows = expert_down(hidden, experts.down_proj, weights, tiles)`.
    """
    down = _down_operands(hidden, down_proj, weights, tiles)
    _launch(_NONE, down, tiles)
    return down.out


def multiply_experts(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, weights: Tensor, tiles: ExpertTiles) -> Tensor:
    """Return both products in one launch, which computes the first items of down while the last of gate_up run.

    No earlier launch may have used the tiles.

    Example: `rows = multiply_experts(expert_in, experts.gate_up_proj, experts.down_proj, weights, tiles)`.
    """
    hidden = _empty_hidden(x, gate_up_proj, tiles)
    down = _down_operands(hidden, down_proj, weights, tiles)
    _launch(_gate_up_operands(x, gate_up_proj, hidden), down, tiles)
    return down.out


_NONE = _Operands(*[None] * 8)


def _empty_hidden(x: Tensor | Quantized, gate_up_proj: Tensor | Quantized, tiles: ExpertTiles) -> Tensor:
    rows, _ = values_and_scale(x)
    return torch.empty(tiles.pairs.numel(), gate_up_proj.shape[1] // 2, dtype=x.dtype, device=rows.device)


def _gate_up_operands(x: Tensor | Quantized, gate_up_proj: Tensor | Quantized, hidden: Tensor) -> _Operands:
    rows, row_scale = values_and_scale(x)
    values, scale = values_and_scale(gate_up_proj)
    num_experts, double, width = values.shape
    # Copies have 8 rows of gate, the same 8 of up, the next 8 of gate, and so on.
    eights = values.view(2 * num_experts, double // 16, 8, width).transpose(0, 1)
    return _Operands(
        rows, None, None, row_scale, describe_lines(eights, [_UNIT.value // 16, 2, 8]), scale, None, hidden
    )


def _down_operands(
    hidden: Tensor | Quantized, down_proj: Tensor | Quantized, weights: Tensor, tiles: ExpertTiles
) -> _Operands:
    rows, row_scale = values_and_scale(hidden)
    values, scale = values_and_scale(down_proj)
    num_tokens, width = tiles.pairs.numel() // tiles.num_active, rows.shape[1]
    out = torch.empty(num_tokens, tiles.num_active, values.shape[1], dtype=hidden.dtype, device=rows.device)
    all_rows, few_rows, more_rows = (describe_lines(rows, [size.value]) for size in (_ALL, _FEW, _MORE))
    proj = describe_lines(values.view(-1, width), [_UNIT.value])
    return _Operands(all_rows, few_rows, more_rows, row_scale, proj, scale, weights, out)


def _launch(up: _Operands, down: _Operands, tiles: ExpertTiles) -> None:
    out = up.out if down.out is None else down.out
    wide, narrow = (up.rows, up.out) if down.out is None else (down.out, down.rows.base)
    _experts_many_kernel[(num_multiprocessors(out.device),)](
        up.rows,
        up.row_scale,
        up.proj,
        up.proj_scale,
        up.out,
        *down,
        tiles.pairs,
        tiles.tiles,
        tiles.finished,
        tiles.queue,
        WIDTH=wide.shape[-1],
        HIDDEN=narrow.shape[-1],
        NUM_ACTIVE=tiles.num_active,
        TALL=tiles.rows_per_tile <= TALL_ROWS,
        num_warps=4,
        **dependent_launch(out.device),
    )


@gluon.jit
def _experts_many_kernel(
    x: gl.tensor,  # the operands of gate_up, or all None
    x_scale: gl.tensor,
    gate_up: gl.tensor,
    gate_up_scale: gl.tensor,
    hidden: gl.tensor,
    hidden_rows: gl.tensor,  # those of down, or all None
    few_hidden_rows: gl.tensor,
    more_hidden_rows: gl.tensor,
    hidden_scale: gl.tensor,
    down: gl.tensor,
    down_scale: gl.tensor,
    weights: gl.tensor,
    out: gl.tensor,
    pairs: gl.tensor,
    tiles: gl.tensor,
    finished: gl.tensor,
    queue: gl.tensor,
    WIDTH: gl.constexpr,
    HIDDEN: gl.constexpr,
    NUM_ACTIVE: gl.constexpr,
    TALL: gl.constexpr,
    DEPENDENT: gl.constexpr,
) -> None:
    HAS_UP: gl.constexpr = gate_up is not None
    HAS_DOWN: gl.constexpr = down is not None
    UP_UNITS: gl.constexpr = HIDDEN // (_UNIT // 2)
    DOWN_UNITS: gl.constexpr = WIDTH // _UNIT
    UP_BLOCKS: gl.constexpr = (UP_UNITS + 1) // 2 if TALL else UP_UNITS
    DOWN_BLOCKS: gl.constexpr = (DOWN_UNITS + 1) // 2 if TALL else DOWN_UNITS
    UP: gl.constexpr = _ProductSizes(True, WIDTH, HIDDEN, NUM_ACTIVE, TALL, UP_UNITS, UP_BLOCKS, 0, HAS_DOWN)
    HALVES_BEFORE: gl.constexpr = 2 * UP_BLOCKS if HAS_UP else 0
    DOWN: gl.constexpr = _ProductSizes(
        False, HIDDEN, WIDTH, NUM_ACTIVE, TALL, DOWN_UNITS, DOWN_BLOCKS, HALVES_BEFORE, False
    )
    of_up = _Operands(x, None, None, x_scale, gate_up, gate_up_scale, None, hidden)
    of_down = _Operands(hidden_rows, few_hidden_rows, more_hidden_rows, hidden_scale, down, down_scale, weights, out)
    dtype: gl.constexpr = gate_up.dtype if HAS_UP else down.dtype
    out_type: gl.constexpr = hidden.dtype.element_ty if HAS_UP else out.dtype.element_ty
    BITS: gl.constexpr = gate_up.layout.element_bitwidth if HAS_UP else down.layout.element_bitwidth
    DEPTH: gl.constexpr = 8 * LINE // BITS
    LINES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=LINE, element_bitwidth=BITS, rank=2)
    SLOTS: gl.constexpr = _STAGES * (2 if TALL else 1)  # of weights
    FACTORS: gl.constexpr = 512 if HAS_DOWN or x_scale is not None else 16
    WHOLE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    stored = gl.allocate_shared_memory(out_type, [2, 32, 64], WHOLE)
    ring = _Ring(
        gl.allocate_shared_memory(dtype, [SLOTS, _UNIT, DEPTH], LINES),
        gl.allocate_shared_memory(dtype, [_STAGES, _FEW if TALL else _ALL, DEPTH], LINES),
        gl.allocate_shared_memory(dtype, [_STAGES, _MORE, DEPTH], LINES),
        make_barriers(_STAGES, 129 if HAS_UP else 1),  # in gate_up, 128 threads copy the rows
        make_barriers(_STAGES, 2),
    )
    handover = _Handover(
        gl.allocate_shared_memory(gl.int32, [2 * _FIELDS, 1], _PLAIN),
        gl.allocate_shared_memory(gl.int32, [2, 512 if HAS_DOWN else 16], _PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, FACTORS], _PLAIN),
        make_barriers(2, 1),
        make_barriers(2, 2),
    )
    fence_async_shared()
    if DEPENDENT:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)
    tables = _Tables(pairs, tiles, gl.load(queue + 1), finished, queue)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_copy, (of_up, of_down, ring, handover, tables, HAS_UP, HAS_DOWN, UP, DOWN)),
            (_multiply, (of_up, of_down, ring, stored, handover, tables, FIRST, HAS_UP, HAS_DOWN, UP, DOWN)),
            (_multiply, (of_up, of_down, ring, stored, handover, tables, SECOND, HAS_UP, HAS_DOWN, UP, DOWN)),
        ],
        [4, 4],
        [208, 208],  # registers per thread, which leaves 88 for the copying warps
    )


@gluon.jit
def _find(tables: _Tables, number: gl.tensor, num_before: gl.tensor, SIZE: gl.constexpr) -> _Item:
    """Return item `number`. The items of this product start at number `num_before`. Neighbours share a tile."""
    tile = gl.minimum((number - num_before) // SIZE.BLOCKS, tables.num_tiles - 1)
    at = tables.tiles + tile * 3
    return _Item(number, tile, gl.load(at), gl.load(at + 1), gl.load(at + 2), (number - num_before) % SIZE.BLOCKS)


@gluon.jit
def _num_finished(tables: _Tables, item: _Item, SIZE: gl.constexpr) -> gl.tensor:
    """Return the number of finished half items of this tile in the previous product."""
    if SIZE.HALVES_BEFORE > 0:
        return gl.load(tables.finished + item.tile, volatile=True)
    else:  # noqa: RET505 (without `else`, Triton also compiles the code after the return)
        return item.number * 0


@gluon.jit
def _publish(
    operands: _Operands, handover: _Handover, tables: _Tables, item: _Item, turn: gl.tensor, SIZE: gl.constexpr
) -> None:
    """Hand an item to both warpgroups."""
    at = turn % 2
    lane = gl.arange(0, 512, _NUMBERS)
    inside = lane < item.num_rows
    if not SIZE.GATED or operands.row_scale is not None:
        pair = gl.load(tables.pairs + item.first + lane, mask=inside, other=0)
        if SIZE.GATED:
            factor = gl.load(operands.row_scale + pair // SIZE.NUM_ACTIVE, mask=inside, other=0.0)
        else:
            factor = gl.load(operands.weights + pair, mask=inside, other=0.0)
            if operands.row_scale is not None:
                factor *= gl.load(operands.row_scale + item.first + lane, mask=inside, other=0.0)
    mbarrier.wait(handover.free.index(at), (turn // 2 & 1) ^ 1)
    for i in gl.static_range(_FIELDS):
        handover.fields.index(at * _FIELDS + i).store(gl.zeros([1], gl.int32, _NUMBERS) + item[i])
    if not SIZE.GATED:
        handover.targets.index(at).store(pair)
    if not SIZE.GATED or operands.row_scale is not None:
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
    tables: _Tables,
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
    pair = gl.load(tables.pairs + item.first + lane, mask=inside, other=0)
    return gl.where(inside, pair // SIZE.NUM_ACTIVE, -1)


@gluon.jit
def _source(tables: _Tables, item: _Item, LAYOUT: gl.constexpr, SIZE: gl.constexpr) -> gl.tuple:
    """Return the tokens of both blocks of a tile. In down, rows are in the order of the tiles."""
    if SIZE.GATED:
        ROWS: gl.constexpr = _FEW if SIZE.TALL else _ALL
        start = gl.where(item.num_rows > _FEW + _MORE, ROWS, _FEW)
        rows = _tokens(tables, item, 0, start, ROWS, LAYOUT, SIZE)
        more = _tokens(tables, item, start, start + _MORE, _MORE, LAYOUT, SIZE)
        return rows, more
    else:  # noqa: RET505
        return ()


@gluon.jit
def _copy(
    of_up: _Operands,
    of_down: _Operands,
    ring: _Ring,
    handover: _Handover,
    tables: _Tables,
    HAS_UP: gl.constexpr,
    HAS_DOWN: gl.constexpr,
    UP: gl.constexpr,
    DOWN: gl.constexpr,
) -> None:
    """Start all copies, in the order of their use."""
    zero = tables.num_tiles * 0
    place = _Place(zero, zero + 1, zero)
    num_up = tables.num_tiles * (UP.BLOCKS if HAS_UP else 0)
    total = num_up + tables.num_tiles * (DOWN.BLOCKS if HAS_DOWN else 0)
    if HAS_UP and HAS_DOWN:  # items wait for others, so only a running program may take one
        num_given = zero
        number = gl.atomic_add(tables.queue, 1, sem="relaxed")
        _end_queue(tables, number, total, num_given)
    else:
        num_given = gl.num_programs(0)
        number = gl.program_id(0)
    if HAS_UP:
        number, place = _copy_items(of_up, ring, handover, tables, number, place, zero, total, num_given, UP)
    if HAS_DOWN:
        _copy_items(of_down, ring, handover, tables, number, place, num_up, total, num_given, DOWN)


@gluon.jit
def _end_queue(tables: _Tables, taken: gl.tensor, total: gl.tensor, num_given: gl.tensor) -> None:
    """Set the queue to zero for the next launch if `taken` is the last number that this launch takes.

    A program takes one number per item, and one more at its start if `num_given` is 0.
    """
    end = total + gl.num_programs(0) - num_given
    if taken == end - 1:
        gl.atomic_add(tables.queue, -end, sem="relaxed")


@gluon.jit
def _copy_items(
    operands: _Operands,
    ring: _Ring,
    handover: _Handover,
    tables: _Tables,
    number: gl.tensor,
    place: _Place,
    num_before: gl.tensor,
    total: gl.tensor,
    num_given: gl.tensor,
    SIZE: gl.constexpr,
) -> gl.tuple:
    """Copy item `number` and further items from the queue, until this product has none left.

    The launch has `total` items. Those of this product start at number `num_before`. Items from number `num_given` on
    are in the queue. If `num_given` is not 0, program i begins with item i. Returns the number of the next item and its
    place.
    """
    DEPTH: gl.constexpr = ring.rows.shape[2]
    LAYOUT: gl.constexpr = _ROWS16 if DEPTH == 64 else _ROWS8
    STEPS: gl.constexpr = (SIZE.WIDTH + DEPTH - 1) // DEPTH
    # Between copies, the next item is prepared in three parts. Each waits only for loads that were started in the
    # part before, so no copy is late.
    ONE: gl.constexpr = 2 if STEPS > 2 else STEPS
    TWO: gl.constexpr = 4 if STEPS > 4 else STEPS
    THREE: gl.constexpr = 6 if STEPS > 6 else STEPS
    end = num_before + tables.num_tiles * SIZE.BLOCKS
    slot, phase, turn = place.slot, place.phase, place.turn
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
            slot, phase = _copy_step(operands, ring, source, item, step, slot, phase, SIZE)
        taken = gl.atomic_add(tables.queue, 1, sem="relaxed")
        for step in range(ONE, TWO):
            slot, phase = _copy_step(operands, ring, source, item, step, slot, phase, SIZE)
        _end_queue(tables, taken, total, num_given)
        after = _find(tables, taken + num_given, num_before, SIZE)
        for step in range(TWO, THREE):
            slot, phase = _copy_step(operands, ring, source, item, step, slot, phase, SIZE)
        later = _source(tables, after, LAYOUT, SIZE)
        num_finished = _num_finished(tables, after, SIZE)
        if not SIZE.COUNTED or after.number < end:  # else the next product publishes its first item
            _publish(operands, handover, tables, after, turn, SIZE)
        for step in range(THREE, STEPS):
            slot, phase = _copy_step(operands, ring, source, item, step, slot, phase, SIZE)
        item = after
        source = later
    return item.number, _Place(slot, phase, turn)


@gluon.jit
def _copy_step(
    operands: _Operands,
    ring: _Ring,
    source: gl.tuple,
    item: _Item,
    step: gl.tensor,
    slot: gl.tensor,
    phase: gl.tensor,
    SIZE: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Start the copies of 128 bytes of each row."""
    block, num_rows = item.block, item.num_rows
    DEPTH: gl.constexpr = ring.rows.shape[2]
    UNIT_BYTES: gl.constexpr = _UNIT * LINE
    start = step * DEPTH
    mbarrier.wait(ring.free.index(slot), phase)
    bar = ring.full.index(slot)
    target = ring.rows.index(slot)
    more = ring.more_rows.index(slot)
    is_few = num_rows <= _FEW + _MORE  # the first block has 128 rows
    has_more = num_rows > gl.where(is_few, _FEW, _ALL)
    if SIZE.GATED:
        LAYOUT: gl.constexpr = _ROWS16 if DEPTH == 64 else _ROWS8
        if SIZE.TALL:
            if block * 2 + 1 < SIZE.UNITS:
                mbarrier.expect(bar, 2 * UNIT_BYTES)
                _load_unit(operands, item, block * 2 + 1, start, bar, ring.weights.index(slot * 2 + 1), SIZE)
            else:
                mbarrier.expect(bar, UNIT_BYTES)
            _load_unit(operands, item, block * 2, start, bar, ring.weights.index(slot * 2), SIZE)
        else:
            mbarrier.expect(bar, UNIT_BYTES)
            _load_unit(operands, item, block, start, bar, ring.weights.index(slot), SIZE)
        column = start + gl.expand_dims(gl.arange(0, DEPTH, gl.SliceLayout(0, LAYOUT)), 0)
        token = gl.expand_dims(source[0], 1)
        copy_by_threads(target, operands.rows + (token * SIZE.WIDTH + column), mask=token >= 0)
        if has_more:
            more_token = gl.expand_dims(source[1], 1)
            copy_by_threads(more, operands.rows + (more_token * SIZE.WIDTH + column), mask=more_token >= 0)
        async_copy.mbarrier_arrive(bar, increment_count=False)
    else:
        UNITS: gl.constexpr = 2 if SIZE.TALL else 1
        if SIZE.HALVES_BEFORE > 0:
            fence_async_shared()  # in gate_up, threads wrote to this slot
            mbarrier.arrive(bar, count=128)
        if is_few:
            if has_more:
                mbarrier.expect(bar, UNITS * UNIT_BYTES + (_FEW + _MORE) * LINE)
                async_load(operands.more_rows, [item.first + _FEW, start], bar, more)
            else:
                mbarrier.expect(bar, UNITS * UNIT_BYTES + _FEW * LINE)
            async_load(operands.few_rows, [item.first, start], bar, target.slice(0, _FEW))
        elif not SIZE.TALL:
            if has_more:
                mbarrier.expect(bar, UNITS * UNIT_BYTES + (_ALL + _MORE) * LINE)
                async_load(operands.more_rows, [item.first + _ALL, start], bar, more)
            else:
                mbarrier.expect(bar, UNITS * UNIT_BYTES + _ALL * LINE)
            async_load(operands.rows, [item.first, start], bar, target)
        for i in gl.static_range(UNITS):
            _load_unit(operands, item, block * UNITS + i, start, bar, ring.weights.index(slot * UNITS + i), SIZE)
    return next_slot(slot, phase, _STAGES)


@gluon.jit
def _load_unit(
    operands: _Operands,
    item: _Item,
    unit: gl.tensor,
    start: gl.tensor,
    bar: gl.tensor,
    target: gl.tensor,
    SIZE: gl.constexpr,
) -> None:
    if SIZE.GATED:
        proj = operands.proj
        eights = target._reinterpret(target.dtype, [_UNIT // 16, 2, 8, target.shape[1]], proj.layout)
        async_load(proj, [unit * (_UNIT // 16), item.expert * 2, 0, start], bar, eights)
    else:
        async_load(operands.proj, [item.expert * SIZE.OUT + unit * _UNIT, start], bar, target)


@gluon.jit
def _multiply(
    of_up: _Operands,
    of_down: _Operands,
    ring: _Ring,
    stored: gl.tensor,
    handover: _Handover,
    tables: _Tables,
    WG: gl.constexpr,
    HAS_UP: gl.constexpr,
    HAS_DOWN: gl.constexpr,
    UP: gl.constexpr,
    DOWN: gl.constexpr,
) -> None:
    """Compute half of the columns of every item, as one of two warpgroups."""
    zero = tables.num_tiles * 0
    place = _Place(zero, zero, zero)
    num_up = tables.num_tiles * (UP.BLOCKS if HAS_UP else 0)
    if HAS_UP:
        place = _multiply_items(of_up, ring, stored, handover, tables, place, num_up, WG, UP)
    if HAS_DOWN:
        end = num_up + tables.num_tiles * DOWN.BLOCKS
        _multiply_items(of_down, ring, stored, handover, tables, place, end, WG, DOWN)


@gluon.jit
def _multiply_items(
    operands: _Operands,
    ring: _Ring,
    stored: gl.tensor,
    handover: _Handover,
    tables: _Tables,
    place: _Place,
    end: gl.tensor,
    WG: gl.constexpr,
    SIZE: gl.constexpr,
) -> _Place:
    """Multiply all items before number `end` of the queue, and return the place of the item after them."""
    slot, phase, turn = place.slot, place.phase, place.turn
    buffer = stored.index(WG)
    if SIZE.GATED:
        HALF: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
        buffer = buffer._reinterpret(buffer.dtype, [64, 32], HALF)
    item = _receive(handover, turn)
    while item.number < end:
        buffers = _Buffers(buffer, handover.targets.index(turn % 2), handover.factors.index(turn % 2))
        num_rows = item.num_rows
        if SIZE.TALL:
            # With an odd number of units, the last item has one unit, and each warpgroup has a part of it.
            if SIZE.UNITS % 2 > 0 and item.block == SIZE.BLOCKS - 1:
                if num_rows > _FEW:
                    slot, phase = _multiply_item(operands, ring, buffers, item, slot, phase, _FEW, _MORE, 1, WG, SIZE)
                else:
                    slot, phase = _multiply_item(operands, ring, buffers, item, slot, phase, _FEW, 0, 1, WG, SIZE)
            elif num_rows > _FEW:
                slot, phase = _multiply_item(operands, ring, buffers, item, slot, phase, _FEW, _MORE, 2, WG, SIZE)
            else:
                slot, phase = _multiply_item(operands, ring, buffers, item, slot, phase, _FEW, 0, 2, WG, SIZE)
        elif num_rows > _ALL:
            slot, phase = _multiply_item(operands, ring, buffers, item, slot, phase, _ALL, _MORE, 1, WG, SIZE)
        elif num_rows > _FEW + _MORE:
            slot, phase = _multiply_item(operands, ring, buffers, item, slot, phase, _ALL, 0, 1, WG, SIZE)
        elif num_rows > _FEW:
            slot, phase = _multiply_item(operands, ring, buffers, item, slot, phase, _FEW, _MORE, 1, WG, SIZE)
        else:
            slot, phase = _multiply_item(operands, ring, buffers, item, slot, phase, _FEW, 0, 1, WG, SIZE)
        if SIZE.COUNTED:
            gl.inline_asm_elementwise("fence.proxy.async.global; // $0", "=r", [], gl.int32, False, 1)
            thread_barrier()  # all threads store before one thread counts this half of the item
            gl.atomic_add(tables.finished + item.tile, 1, sem="release")
        mbarrier.arrive(handover.free.index(turn % 2))
        turn += 1
        item = _receive(handover, turn)
    return _Place(slot, phase, turn)


@gluon.jit
def _multiply_item(
    operands: _Operands,
    ring: _Ring,
    buffers: _Buffers,
    item: _Item,
    slot: gl.tensor,
    phase: gl.tensor,
    NUM: gl.constexpr,
    MORE: gl.constexpr,
    PARTS: gl.constexpr,
    WG: gl.constexpr,
    SIZE: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Multiply NUM + MORE rows of tokens by both parts of a unit (PARTS = 2) or by one part, and store the result."""
    DEPTH: gl.constexpr = ring.rows.shape[2]
    STEPS: gl.constexpr = (SIZE.WIDTH + DEPTH - 1) // DEPTH
    K: gl.constexpr = DEPTH // 4
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NUM, K])
    MORE_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _MORE, K])
    PART: gl.constexpr = 0 if PARTS == 2 else WG
    RUNNING: gl.constexpr = PARTS * (2 if MORE > 0 else 1)  # products of a step
    low = gl.zeros((64, NUM), gl.float32, SUMS)
    high = gl.zeros((64, NUM), gl.float32, SUMS)
    more_low = gl.zeros((64, _MORE), gl.float32, MORE_SUMS)
    more_high = gl.zeros((64, _MORE), gl.float32, MORE_SUMS)
    for step in range(STEPS):
        mbarrier.wait(ring.full.index(slot), phase)
        if SIZE.GATED:
            fence_async_shared()  # the rows were written by threads, and the products read them by another path
        weights = ring.weights.index(slot * 2 + (WG if PARTS == 2 else 0)) if SIZE.TALL else ring.weights.index(slot)
        rows = ring.rows.index(slot).slice(0, NUM).permute((1, 0))
        w_low = weights.slice(64 * PART, 64)
        w_high = weights.slice(64, 64)
        low = warpgroup_mma(w_low, rows, low, use_acc=step > 0, is_async=True)
        if PARTS == 2:
            high = warpgroup_mma(w_high, rows, high, use_acc=step > 0, is_async=True)
        if MORE > 0:
            more = ring.more_rows.index(slot).permute((1, 0))
            more_low = warpgroup_mma(w_low, more, more_low, use_acc=step > 0, is_async=True)
            if PARTS == 2:
                more_high = warpgroup_mma(w_high, more, more_high, use_acc=step > 0, is_async=True)
        low, high, more_low, more_high = wait_for_products((low, high, more_low, more_high), RUNNING, MORE, PARTS)
        if step > 0:
            mbarrier.arrive(ring.free.index(slot_before(slot, _STAGES)))
        slot, phase = next_slot(slot, phase, _STAGES)
    low, high, more_low, more_high = wait_for_products((low, high, more_low, more_high), 0, MORE, PARTS)
    mbarrier.arrive(ring.free.index(slot_before(slot, _STAGES)))
    unit = item.block * (2 if SIZE.TALL else 1) + (WG if PARTS == 2 else 0)
    part = unit * 2 + PART
    if MORE > 0:  # first, because it frees registers
        _store(operands, buffers, item, more_low, part, NUM, SIZE)
        if PARTS == 2:
            _store(operands, buffers, item, more_high, part + 1, NUM, SIZE)
    _store(operands, buffers, item, low, part, 0, SIZE)
    if PARTS == 2:
        _store(operands, buffers, item, high, part + 1, 0, SIZE)
    return slot, phase


@gluon.jit
def _store(
    operands: _Operands,
    buffers: _Buffers,
    item: _Item,
    sums: gl.tensor,
    part: gl.tensor,
    FIRST: gl.constexpr,
    SIZE: gl.constexpr,
) -> None:
    """Store the products of 64 rows of weights with the tile's rows from FIRST on. In gate_up, apply GeGLU first."""
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
        _store_rows(operands.out, buffers, item, hidden.reshape((32, NUM)), part, FIRST, SIZE)
    else:
        if operands.row_scale is not None:
            scale = gl.load(operands.proj_scale + item.expert * SIZE.OUT + part * 64 + line)
            sums = sums * gl.expand_dims(scale, 1)
        _store_rows(operands.out, buffers, item, sums.to(dtype), part, FIRST, SIZE)


@gluon.jit
def _store_rows(
    out: gl.tensor,
    buffers: _Buffers,
    item: _Item,
    values: gl.tensor,
    part: gl.tensor,
    FIRST: gl.constexpr,
    SIZE: gl.constexpr,
) -> None:
    """Store columns of values as rows, as many at a time as fit the shared buffer; in down, times routing weights."""
    COLS: gl.constexpr = values.shape[0]
    NUM: gl.constexpr = values.shape[1]
    if buffers.buffer.shape[0] < NUM:
        halves = values.reshape((COLS, 2, NUM // 2)).permute((0, 2, 1)).split()
        _store_rows(out, buffers, item, halves[0], part, FIRST, SIZE)
        _store_rows(out, buffers, item, halves[1], part, FIRST + NUM // 2, SIZE)
    else:
        LAYOUT: gl.constexpr = _HALF16 if SIZE.GATED else _ROWS16
        ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
        lane = FIRST + gl.arange(0, NUM, ROW)
        inside = gl.expand_dims(lane < item.num_rows, 1)
        each = part * COLS + gl.expand_dims(gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT)), 0)
        space = buffers.buffer.slice(0, NUM)
        space.store(values.permute((1, 0)))
        rows = space.load(LAYOUT)
        if SIZE.GATED:
            target = (item.first + lane) * SIZE.OUT
        else:
            target = buffers.targets.slice(FIRST, NUM).load(ROW) * SIZE.OUT
            weight = gl.expand_dims(buffers.factors.slice(FIRST, NUM).load(ROW), 1)
            rows = (rows.to(gl.float32) * weight).to(out.dtype.element_ty)
        gl.store(out + (gl.expand_dims(target, 1) + each), rows, mask=inside)
