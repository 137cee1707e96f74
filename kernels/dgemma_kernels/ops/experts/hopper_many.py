"""The experts' two products for many tokens on Hopper, in Gluon: copies and products run at the same time.

One program per multiprocessor takes items from a queue. An item is a tile of rows times a block of weights. Four warps
copy both into a ring in shared memory, the next item's while this one is stored. Two warpgroups multiply. The weights
are the left operand, so rows need not be rounded up to 64.

The limits are the bandwidths of L2 and of shared memory. So an item is as large as the registers for its sums allow:
either 128 rows of weights by up to 288 rows of tokens ("wide"), or 256 by up to 160 ("tall", for experts with fewer
tokens). In wide items, one instruction multiplies 256 rows of tokens. So each weight is read once from shared memory;
two instructions of 128 would read it twice. A unit is 128 rows of weights, one copy. A part is half a unit. In gate_up,
8 rows of gate alternate with the same 8 of up, so that a thread has both values for GeGLU.

`kernel.expert_gate_up` and `kernel.expert_down` select it. `kernel` has the same products in Triton.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dgemma_kernels.formats import Quantized
from dgemma_kernels.formats.float8 import values_and_scale
from dgemma_kernels.ops.configs import dependent_launch, num_multiprocessors
from dgemma_kernels.ops.router.kernel import ExpertTiles

TALL_ROWS, WIDE_ROWS = 160, 288  # of a tile
# Rows of tokens in a tile's first block: 128 in tall tiles, 128 or 256 in wide ones.
_FEW, _ALL = gl.constexpr(128), gl.constexpr(256)
_MORE = gl.constexpr(32)  # rows of the second block
_STAGES = gl.constexpr(4)  # slots of the ring; with 3, a program waits for memory
_UNIT = gl.constexpr(128)  # rows of weights of one copy
_FIELDS = gl.constexpr(5)  # of an item: its number, expert, first row, number of rows, block of columns
_LINE = gl.constexpr(128)  # bytes of a row in a slot

# Rows of 128 bytes, of 2-byte and of 1-byte values, and rows of 64 bytes of 2-byte values. A thread has 16 bytes.
_ROWS16 = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_ROWS8 = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
_HALF16 = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
_NUMBERS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Triton 3.9 renamed these.
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_load_by_threads = (
    async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
)


class _ProductSizes(NamedTuple):
    """One of the two products, and its sizes."""

    GATED: bool
    WIDTH: int  # of the rows that it multiplies
    OUT: int  # columns of the result
    NUM_ACTIVE: int
    TALL: bool
    UNITS: int  # of a weight matrix
    BLOCKS: int  # items per tile


def expert_gate_up(x: Tensor | Quantized, gate_up_proj: Tensor | Quantized, tiles: ExpertTiles) -> Tensor:
    """Return geglu(x[token] @ gate_up_proj[expert].T) as `kernel.expert_gate_up` does. Inputs may be float8; the result
    never is.

    The tiles have at most TALL_ROWS or WIDE_ROWS rows.

    Example: `hidden = expert_gate_up(expert_in, experts.gate_up_proj, tiles)`.
    """
    rows, row_scale = values_and_scale(x)
    values, scale = values_and_scale(gate_up_proj)
    num_experts, double, width = values.shape
    out = torch.empty(tiles.pairs.numel(), double // 2, dtype=x.dtype, device=rows.device)
    # Copies have 8 rows of gate, the same 8 of up, the next 8 of gate, and so on.
    eights = values.view(2 * num_experts, double // 16, 8, width).transpose(0, 1)
    proj = _descriptor(eights, [_UNIT.value // 16, 2, 8])
    _launch([rows] * 3, row_scale, proj, scale, None, tiles, out, gated=True, width=width)
    return out


def expert_down(
    hidden: Tensor | Quantized, down_proj: Tensor | Quantized, weights: Tensor, tiles: ExpertTiles
) -> Tensor:
    """Return weights[token, k] * (hidden[pair] @ down_proj[expert].T) at [token, k], as `kernel.expert_down` does.

    Float8 hidden values have one scale per row.

    Example: `rows = expert_down(hidden, experts.down_proj, weights, tiles)`.
    """
    rows, row_scale = values_and_scale(hidden)
    values, scale = values_and_scale(down_proj)
    num_tokens, width = tiles.pairs.numel() // tiles.num_active, rows.shape[1]
    out = torch.empty(num_tokens, tiles.num_active, values.shape[1], dtype=hidden.dtype, device=rows.device)
    blocks = [_descriptor(rows, [size.value]) for size in (_ALL, _FEW, _MORE)]
    proj = _descriptor(values.view(-1, width), [_UNIT.value])
    _launch(blocks, row_scale, proj, scale, weights, tiles, out, gated=False, width=width)
    return out


def _launch(
    rows: list[Tensor] | list[TensorDescriptor],
    row_scale: Tensor | None,
    proj: TensorDescriptor,
    scale: Tensor | None,
    weights: Tensor | None,
    tiles: ExpertTiles,
    out: Tensor,
    *,
    gated: bool,
    width: int,
) -> None:
    _experts_many_kernel[(num_multiprocessors(out.device),)](
        *rows,
        row_scale,
        proj,
        scale,
        weights,
        out,
        tiles.pairs,
        tiles.tiles,
        tiles.queue,
        GATED=gated,
        WIDTH=width,
        OUT=out.shape[-1],
        NUM_ACTIVE=tiles.num_active,
        TALL=tiles.rows_per_tile <= TALL_ROWS,
        num_warps=4,
        **dependent_launch(out.device),
    )


def _descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Describe blocks of this size and 128 bytes of the last dimension."""
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=_LINE.value, element_bitwidth=8 * tensor.element_size(), rank=tensor.ndim
    )
    return TensorDescriptor.from_tensor(tensor, [*block, _LINE.value // tensor.element_size()], layout)


@gluon.jit
def _experts_many_kernel(
    rows: gl.tensor,  # in down, descriptors of blocks of 256, 128 and 32
    few_rows: gl.tensor,
    more_rows: gl.tensor,
    row_scale: gl.tensor,  # None if the rows are not float8
    proj: gl.tensor,  # descriptor of (F / 8, 2E, 8, D) or (E * D, F)
    proj_scale: gl.tensor,
    weights: gl.tensor,  # None in gate_up
    out: gl.tensor,
    pairs: gl.tensor,
    tiles: gl.tensor,
    queue: gl.tensor,
    GATED: gl.constexpr,
    WIDTH: gl.constexpr,
    OUT: gl.constexpr,
    NUM_ACTIVE: gl.constexpr,
    TALL: gl.constexpr,
    DEPENDENT: gl.constexpr,
) -> None:
    ALL_UNITS: gl.constexpr = OUT // (_UNIT // 2 if GATED else _UNIT)
    BLOCKS: gl.constexpr = (ALL_UNITS + 1) // 2 if TALL else ALL_UNITS
    SIZE: gl.constexpr = _ProductSizes(GATED, WIDTH, OUT, NUM_ACTIVE, TALL, ALL_UNITS, BLOCKS)
    dtype: gl.constexpr = proj.dtype
    out_type: gl.constexpr = out.dtype.element_ty
    BITS: gl.constexpr = proj.layout.element_bitwidth
    DEPTH: gl.constexpr = 8 * _LINE // BITS
    LINES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=_LINE, element_bitwidth=BITS, rank=2)
    SLOTS: gl.constexpr = _STAGES * (2 if TALL else 1)  # of weights
    if GATED:
        w_smem = gl.allocate_shared_memory(dtype, [SLOTS, _UNIT // 16, 2, 8, DEPTH], proj.layout)
        HALVES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
        o_smem = gl.allocate_shared_memory(out_type, [2, 64, 32], HALVES)
    else:
        w_smem = gl.allocate_shared_memory(dtype, [SLOTS, _UNIT, DEPTH], proj.layout)
        WHOLE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        o_smem = gl.allocate_shared_memory(out_type, [2, 32, 64], WHOLE)
    r_smem = gl.allocate_shared_memory(dtype, [_STAGES, _FEW if TALL else _ALL, DEPTH], LINES)
    m_smem = gl.allocate_shared_memory(dtype, [_STAGES, _MORE, DEPTH], LINES)
    full = _barriers(_STAGES, 129 if GATED else 1)  # in gate_up, 128 threads copy the rows
    free = _barriers(_STAGES, 2)
    numbers = gl.allocate_shared_memory(gl.int32, [2 * _FIELDS, 1], _PLAIN)
    targets = gl.allocate_shared_memory(gl.int32, [2, 16 if GATED else 512], _PLAIN)
    factors = gl.allocate_shared_memory(gl.float32, [2, 16 if GATED and row_scale is None else 512], _PLAIN)
    queued = (numbers, targets, factors, _barriers(2, 1), _barriers(2, 2))
    fence_async_shared()
    if DEPENDENT:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)
    smem = (w_smem, r_smem, m_smem, o_smem)
    tables = (pairs, tiles, gl.load(queue + 1), queue)
    inputs = (rows, few_rows, more_rows, proj, row_scale, weights)
    outs = (out, row_scale, proj_scale)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_copy, (inputs, smem, full, free, queued, tables, SIZE)),
            (_multiply, (outs, smem, full, free, queued, tables[2], FIRST, SIZE)),
            (_multiply, (outs, smem, full, free, queued, tables[2], SECOND, SIZE)),
        ],
        [4, 4],
        [208, 208],  # registers per thread, which leaves 88 for the copying warps
    )


@gluon.jit
def _barriers(NUM: gl.constexpr, ARRIVALS: gl.constexpr) -> gl.tensor:
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def _find(tables: gl.tuple, item: gl.tensor, SIZE: gl.constexpr) -> gl.tuple:
    """Return the fields of an item. Neighbours in the queue share a tile."""
    number = gl.minimum(item // SIZE.BLOCKS, tables[2] - 1)
    at = tables[1] + number * 3
    return item, gl.load(at), gl.load(at + 1), gl.load(at + 2), item % SIZE.BLOCKS


@gluon.jit
def _publish(
    inputs: gl.tuple, queued: gl.tuple, tables: gl.tuple, tile: gl.tuple, turn: gl.tensor, SIZE: gl.constexpr
) -> None:
    """Hand an item to both warpgroups: its fields, the rows of its results, and what multiplies them."""
    row_scale, weights = inputs[4], inputs[5]
    numbers, targets, factors, full, free = queued
    at = turn % 2
    lane = gl.arange(0, 512, _NUMBERS)
    inside = lane < tile[3]
    if not SIZE.GATED or row_scale is not None:
        pair = gl.load(tables[0] + tile[2] + lane, mask=inside, other=0)
        if SIZE.GATED:
            factor = gl.load(row_scale + pair // SIZE.NUM_ACTIVE, mask=inside, other=0.0)
        else:
            factor = gl.load(weights + pair, mask=inside, other=0.0)
            if row_scale is not None:
                factor *= gl.load(row_scale + tile[2] + lane, mask=inside, other=0.0)
    mbarrier.wait(free.index(at), (turn // 2 & 1) ^ 1)
    for i in gl.static_range(_FIELDS):
        numbers.index(at * _FIELDS + i).store(gl.zeros([1], gl.int32, _NUMBERS) + tile[i])
    if not SIZE.GATED:
        targets.index(at).store(pair)
    if not SIZE.GATED or row_scale is not None:
        factors.index(at).store(factor)
    mbarrier.arrive(full.index(at))


@gluon.jit
def _receive(queued: gl.tuple, turn: gl.tensor) -> gl.tuple:
    """Wait for the next item and return its fields."""
    numbers, _, _, full, _ = queued
    at = turn % 2
    mbarrier.wait(full.index(at), turn // 2 & 1)
    item = gl.max(numbers.index(at * _FIELDS).load(_NUMBERS), 0)
    expert = gl.max(numbers.index(at * _FIELDS + 1).load(_NUMBERS), 0)
    first = gl.max(numbers.index(at * _FIELDS + 2).load(_NUMBERS), 0)
    num_rows = gl.max(numbers.index(at * _FIELDS + 3).load(_NUMBERS), 0)
    block = gl.max(numbers.index(at * _FIELDS + 4).load(_NUMBERS), 0)
    return item, expert, first, num_rows, block


@gluon.jit
def _tokens(
    tables: gl.tuple,
    tile: gl.tuple,
    start: gl.tensor,
    limit: gl.tensor,
    NUM: gl.constexpr,
    LAYOUT: gl.constexpr,
    SIZE: gl.constexpr,
) -> gl.tensor:
    """Return the tokens of NUM rows, and -1 for rows from `limit` or the end of the tile on."""
    lane = start + gl.arange(0, NUM, gl.SliceLayout(1, LAYOUT))
    inside = lane < gl.minimum(tile[3], limit)
    pair = gl.load(tables[0] + tile[2] + lane, mask=inside, other=0)
    return gl.where(inside, pair // SIZE.NUM_ACTIVE, -1)


@gluon.jit
def _source(tables: gl.tuple, tile: gl.tuple, LAYOUT: gl.constexpr, SIZE: gl.constexpr) -> gl.tuple:
    """Return the tokens of both blocks of a tile. In down, rows are in the order of the tiles."""
    if SIZE.GATED:
        ROWS: gl.constexpr = _FEW if SIZE.TALL else _ALL
        start = gl.where(tile[3] > _FEW + _MORE, ROWS, _FEW)
        rows = _tokens(tables, tile, 0, start, ROWS, LAYOUT, SIZE)
        more = _tokens(tables, tile, start, start + _MORE, _MORE, LAYOUT, SIZE)
        return rows, more
    else:  # noqa: RET505 (Triton compiles both returns of a branch without else)
        return ()


@gluon.jit
def _copy(
    inputs: gl.tuple,
    smem: gl.tuple,
    full: gl.tensor,
    free: gl.tensor,
    queued: gl.tuple,
    tables: gl.tuple,
    SIZE: gl.constexpr,
) -> None:
    """Start all copies, in the order of their use."""
    DEPTH: gl.constexpr = smem[1].shape[2]
    LAYOUT: gl.constexpr = _ROWS16 if DEPTH == 64 else _ROWS8
    STEPS: gl.constexpr = (SIZE.WIDTH + DEPTH - 1) // DEPTH
    # Between copies, the next item is prepared in three parts. Each waits only for loads that were started in the
    # part before, so no copy is late.
    ONE: gl.constexpr = 2 if STEPS > 2 else STEPS
    TWO: gl.constexpr = 4 if STEPS > 4 else STEPS
    THREE: gl.constexpr = 6 if STEPS > 6 else STEPS
    num_items = tables[2] * SIZE.BLOCKS
    slot = num_items * 0
    phase = num_items * 0 + 1
    turn = num_items * 0
    tile = _find(tables, gl.program_id(0), SIZE)
    source = _source(tables, tile, LAYOUT, SIZE)
    _publish(inputs, queued, tables, tile, turn, SIZE)
    while tile[0] < num_items:
        turn += 1
        for step in range(ONE):
            slot, phase = _copy_step(inputs, smem, full, free, source, tile, step, slot, phase, SIZE)
        taken = gl.atomic_add(tables[3], 1, sem="relaxed")
        for step in range(ONE, TWO):
            slot, phase = _copy_step(inputs, smem, full, free, source, tile, step, slot, phase, SIZE)
        if taken == num_items - 1:  # every item draws one number, and this was the last: zero for the next launch
            gl.atomic_add(tables[3], -num_items, sem="relaxed")
        after = _find(tables, taken + gl.num_programs(0), SIZE)
        for step in range(TWO, THREE):
            slot, phase = _copy_step(inputs, smem, full, free, source, tile, step, slot, phase, SIZE)
        later = _source(tables, after, LAYOUT, SIZE)
        _publish(inputs, queued, tables, after, turn, SIZE)
        for step in range(THREE, STEPS):
            slot, phase = _copy_step(inputs, smem, full, free, source, tile, step, slot, phase, SIZE)
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
    step: gl.tensor,
    slot: gl.tensor,
    phase: gl.tensor,
    SIZE: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Start the copies of 128 bytes of each row."""
    rows, few_rows, more_rows, proj, _, _ = inputs
    w_smem, r_smem, m_smem, _ = smem
    _, expert, first, num_rows, block = tile
    DEPTH: gl.constexpr = r_smem.shape[2]
    UNIT_BYTES: gl.constexpr = _UNIT * _LINE
    start = step * DEPTH
    mbarrier.wait(free.index(slot), phase)
    bar = full.index(slot)
    target = r_smem.index(slot)
    more = m_smem.index(slot)
    is_few = num_rows <= _FEW + _MORE  # the first block has 128 rows
    has_more = num_rows > gl.where(is_few, _FEW, _ALL)
    if SIZE.GATED:
        LAYOUT: gl.constexpr = _ROWS16 if DEPTH == 64 else _ROWS8
        if SIZE.TALL:
            if block * 2 + 1 < SIZE.UNITS:
                mbarrier.expect(bar, 2 * UNIT_BYTES)
                _load_unit(proj, expert, block * 2 + 1, start, bar, w_smem.index(slot * 2 + 1), SIZE)
            else:
                mbarrier.expect(bar, UNIT_BYTES)
            _load_unit(proj, expert, block * 2, start, bar, w_smem.index(slot * 2), SIZE)
        else:
            mbarrier.expect(bar, UNIT_BYTES)
            _load_unit(proj, expert, block, start, bar, w_smem.index(slot), SIZE)
        column = start + gl.expand_dims(gl.arange(0, DEPTH, gl.SliceLayout(0, LAYOUT)), 0)
        token = gl.expand_dims(source[0], 1)
        _load_by_threads(target, rows + (token * SIZE.WIDTH + column), mask=token >= 0)
        if has_more:
            more_token = gl.expand_dims(source[1], 1)
            _load_by_threads(more, rows + (more_token * SIZE.WIDTH + column), mask=more_token >= 0)
        async_copy.mbarrier_arrive(bar, increment_count=False)
    else:
        UNITS: gl.constexpr = 2 if SIZE.TALL else 1
        if is_few:
            if has_more:
                mbarrier.expect(bar, UNITS * UNIT_BYTES + (_FEW + _MORE) * _LINE)
                _load(more_rows, [first + _FEW, start], bar, more)
            else:
                mbarrier.expect(bar, UNITS * UNIT_BYTES + _FEW * _LINE)
            _load(few_rows, [first, start], bar, target.slice(0, _FEW))
        elif not SIZE.TALL:
            if has_more:
                mbarrier.expect(bar, UNITS * UNIT_BYTES + (_ALL + _MORE) * _LINE)
                _load(more_rows, [first + _ALL, start], bar, more)
            else:
                mbarrier.expect(bar, UNITS * UNIT_BYTES + _ALL * _LINE)
            _load(rows, [first, start], bar, target)
        for i in gl.static_range(UNITS):
            _load_unit(proj, expert, block * UNITS + i, start, bar, w_smem.index(slot * UNITS + i), SIZE)
    return _next(slot, phase)


@gluon.jit
def _load_unit(
    proj: gl.tensor,
    expert: gl.tensor,
    unit: gl.tensor,
    start: gl.tensor,
    bar: gl.tensor,
    target: gl.tensor,
    SIZE: gl.constexpr,
) -> None:
    if SIZE.GATED:
        _load(proj, [unit * (_UNIT // 16), expert * 2, 0, start], bar, target)
    else:
        _load(proj, [expert * SIZE.OUT + unit * _UNIT, start], bar, target)


@gluon.jit
def _next(slot: gl.tensor, phase: gl.tensor) -> tuple[gl.tensor, gl.tensor]:
    last = slot == _STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _before(slot: gl.tensor) -> gl.tensor:
    # Not carried through the loop: Triton 3.6 loses a variable that equals another one before the loop.
    return gl.where(slot == 0, _STAGES - 1, slot - 1)


@gluon.jit
def _multiply(
    outs: gl.tuple,
    smem: gl.tuple,
    full: gl.tensor,
    free: gl.tensor,
    queued: gl.tuple,
    num_tiles: gl.tensor,
    WG: gl.constexpr,
    SIZE: gl.constexpr,
) -> None:
    """Compute half of the columns of every item, as one of two warpgroups."""
    num_items = num_tiles * SIZE.BLOCKS
    turn = num_items * 0
    slot = num_items * 0
    phase = num_items * 0
    tile = _receive(queued, turn)
    while tile[0] < num_items:
        num_rows, block = tile[3], tile[4]
        rings = (smem, full, free, queued[1].index(turn % 2), queued[2].index(turn % 2))
        if SIZE.TALL:
            # With an odd number of units, the last item has one unit, and each warpgroup has a part of it.
            if SIZE.UNITS % 2 > 0 and block == SIZE.BLOCKS - 1:
                if num_rows > _FEW:
                    slot, phase = _multiply_item(outs, rings, tile, slot, phase, block * 2, _FEW, _MORE, 1, WG, SIZE)
                else:
                    slot, phase = _multiply_item(outs, rings, tile, slot, phase, block * 2, _FEW, 0, 1, WG, SIZE)
            elif num_rows > _FEW:
                slot, phase = _multiply_item(outs, rings, tile, slot, phase, block * 2 + WG, _FEW, _MORE, 2, WG, SIZE)
            else:
                slot, phase = _multiply_item(outs, rings, tile, slot, phase, block * 2 + WG, _FEW, 0, 2, WG, SIZE)
        elif num_rows > _ALL:
            slot, phase = _multiply_item(outs, rings, tile, slot, phase, block, _ALL, _MORE, 1, WG, SIZE)
        elif num_rows > _FEW + _MORE:
            slot, phase = _multiply_item(outs, rings, tile, slot, phase, block, _ALL, 0, 1, WG, SIZE)
        elif num_rows > _FEW:
            slot, phase = _multiply_item(outs, rings, tile, slot, phase, block, _FEW, _MORE, 1, WG, SIZE)
        else:
            slot, phase = _multiply_item(outs, rings, tile, slot, phase, block, _FEW, 0, 1, WG, SIZE)
        mbarrier.arrive(queued[4].index(turn % 2))
        turn += 1
        tile = _receive(queued, turn)


@gluon.jit
def _multiply_item(
    outs: gl.tuple,
    rings: gl.tuple,
    tile: gl.tuple,
    slot: gl.tensor,
    phase: gl.tensor,
    unit: gl.tensor,
    NUM: gl.constexpr,
    MORE: gl.constexpr,
    PARTS: gl.constexpr,
    WG: gl.constexpr,
    SIZE: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Multiply NUM + MORE rows of tokens by both parts of a unit (PARTS = 2) or by one part, and store the result."""
    smem, full, free, targets, factors = rings
    w_smem, r_smem, m_smem, o_smem = smem
    DEPTH: gl.constexpr = r_smem.shape[2]
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
        mbarrier.wait(full.index(slot), phase)
        if SIZE.GATED:
            fence_async_shared()  # the rows were written by threads, and the products read them by another path
        weights = w_smem.index(slot * 2 + (WG if PARTS == 2 else 0)) if SIZE.TALL else w_smem.index(slot)
        if SIZE.GATED:
            weights = weights.reshape((_UNIT, DEPTH))
        rows = r_smem.index(slot).slice(0, NUM).permute((1, 0))
        w_low = weights.slice(64 * PART, 64)
        w_high = weights.slice(64, 64)
        low = warpgroup_mma(w_low, rows, low, use_acc=step > 0, is_async=True)
        if PARTS == 2:
            high = warpgroup_mma(w_high, rows, high, use_acc=step > 0, is_async=True)
        if MORE > 0:
            more = m_smem.index(slot).permute((1, 0))
            more_low = warpgroup_mma(w_low, more, more_low, use_acc=step > 0, is_async=True)
            if PARTS == 2:
                more_high = warpgroup_mma(w_high, more, more_high, use_acc=step > 0, is_async=True)
        low, high, more_low, more_high = _wait(low, high, more_low, more_high, RUNNING, MORE, PARTS)
        if step > 0:
            mbarrier.arrive(free.index(_before(slot)))
        slot, phase = _next(slot, phase)
    low, high, more_low, more_high = _wait(low, high, more_low, more_high, 0, MORE, PARTS)
    mbarrier.arrive(free.index(_before(slot)))
    buffers = (o_smem.index(WG), targets, factors)
    part = unit * 2 + PART
    if MORE > 0:  # first, because it frees registers
        _store(outs, buffers, tile, more_low, part, NUM, SIZE)
        if PARTS == 2:
            _store(outs, buffers, tile, more_high, part + 1, NUM, SIZE)
    _store(outs, buffers, tile, low, part, 0, SIZE)
    if PARTS == 2:
        _store(outs, buffers, tile, high, part + 1, 0, SIZE)
    return slot, phase


@gluon.jit
def _wait(
    low: gl.tensor,
    high: gl.tensor,
    more_low: gl.tensor,
    more_high: gl.tensor,
    RUNNING: gl.constexpr,
    MORE: gl.constexpr,
    PARTS: gl.constexpr,
) -> gl.tuple:
    """Wait until at most RUNNING products run, and return all sums."""
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
    outs: gl.tuple,
    buffers: gl.tuple,
    tile: gl.tuple,
    sums: gl.tensor,
    part: gl.tensor,
    FIRST: gl.constexpr,
    SIZE: gl.constexpr,
) -> None:
    """Store the sums of 64 rows of weights and of rows of the tile from FIRST on, in gate_up after GeGLU."""
    out, row_scale, proj_scale = outs
    dtype: gl.constexpr = out.dtype.element_ty
    NUM: gl.constexpr = sums.shape[1]
    MMA: gl.constexpr = sums.type.layout
    line = gl.arange(0, 64, gl.SliceLayout(1, MMA))
    if SIZE.GATED:
        if row_scale is not None:
            # Line 16 b + 8 u + i is row 8 b + i of gate (u = 0) or of up (u = 1).
            row = part * 32 + line // 16 * 8 + line % 8 + line // 8 % 2 * SIZE.OUT
            scale = gl.load(proj_scale + tile[1] * (2 * SIZE.OUT) + row)
            by_row = buffers[2].slice(FIRST, NUM).load(gl.SliceLayout(0, MMA))
            sums = sums * (gl.expand_dims(scale, 1) * gl.expand_dims(by_row, 0))
        gate, up = sums.reshape((4, 2, 8, NUM)).permute((0, 2, 3, 1)).split()
        # As in `blocks.gelu_tanh_times`, which Triton 3.6 cannot call from here.
        gate = gate.to(dtype).to(gl.float32)
        root = gl.rsqrt(1.0 + gl.exp2(gate * (-2.302208198 - 0.1029432397 * gate * gate)))
        gate *= root * root
        hidden = (gate.to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)).to(dtype)
        _store_rows(out, buffers, tile, hidden.reshape((32, NUM)), part, FIRST, SIZE)
    else:
        if row_scale is not None:
            sums = sums * gl.expand_dims(gl.load(proj_scale + tile[1] * SIZE.OUT + part * 64 + line), 1)
        _store_rows(out, buffers, tile, sums.to(dtype), part, FIRST, SIZE)


@gluon.jit
def _store_rows(
    out: gl.tensor,
    buffers: gl.tuple,
    tile: gl.tuple,
    values: gl.tensor,
    part: gl.tensor,
    FIRST: gl.constexpr,
    SIZE: gl.constexpr,
) -> None:
    """Store columns of values as rows, as many at a time as the buffer in shared memory has; in down, weighted."""
    buffer, targets, factors = buffers
    _, _, first, num_rows, _ = tile
    COLS: gl.constexpr = values.shape[0]
    NUM: gl.constexpr = values.shape[1]
    if buffer.shape[0] < NUM:
        halves = values.reshape((COLS, 2, NUM // 2)).permute((0, 2, 1)).split()
        _store_rows(out, buffers, tile, halves[0], part, FIRST, SIZE)
        _store_rows(out, buffers, tile, halves[1], part, FIRST + NUM // 2, SIZE)
    else:
        LAYOUT: gl.constexpr = _HALF16 if SIZE.GATED else _ROWS16
        ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
        lane = FIRST + gl.arange(0, NUM, ROW)
        inside = gl.expand_dims(lane < num_rows, 1)
        each = part * COLS + gl.expand_dims(gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT)), 0)
        space = buffer.slice(0, NUM)
        space.store(values.permute((1, 0)))
        result = space.load(LAYOUT)
        if SIZE.GATED:
            target = (first + lane) * SIZE.OUT
        else:
            target = targets.slice(FIRST, NUM).load(ROW) * SIZE.OUT
            weight = gl.expand_dims(factors.slice(FIRST, NUM).load(ROW), 1)
            result = (result.to(gl.float32) * weight).to(out.dtype.element_ty)
        gl.store(out + (gl.expand_dims(target, 1) + each), result, mask=inside)
