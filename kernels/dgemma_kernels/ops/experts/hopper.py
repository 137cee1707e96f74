"""Both products of int4 experts in one launch on Hopper, in Gluon, with float8 rows.

Four programs per multiprocessor take blocks of columns from a queue, first all blocks of gate_up, then those of down.
A program copies planes of weights, and the 64 columns of its rows that multiply each plane, into ring buffers in shared
memory. While it multiplies the last planes of a block, it already copies the first ones of its next block. A block of
down waits for the hidden values of its tile. Blocks are taken in order, and only by running programs. So the blocks
that a block of down waits for are complete or being computed. A tile with few rows has smaller products, which take
less time and energy.

A byte with a code of four bits, read as float8, is code * 2**-9. So the codes themselves are the left operand. The
scale of a group multiplies its sums. Codes have an offset of 8. To remove it, a product after every 16 groups adds, for
each group, -8 times its scale times the sum of the row in this group. A block of gate_up has the 64 hidden values of a
group. It rounds them to float8, with a power of two per row as their scale, which multiplies the sums too.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from dgemma_kernels.formats.fourbit import FourBit, OrderedRows
from dgemma_kernels.ops.configs import KEPT_OUTPUT, dependent_launch, num_multiprocessors
from dgemma_kernels.ops.hopper import copy_by_threads, thread_barrier
from dgemma_kernels.ops.router.kernel import ExpertTiles

_PROGRAMS = 4  # per multiprocessor; each may have 128 registers per thread and 56 KiB of shared memory
_SLOTS = gl.constexpr(3)  # planes per ring

# The layout in which the threads of a warpgroup hold a plane as the left operand.
_BYTES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
# Layouts of copies: rows, 16 bytes per thread; rows that are stored; scales of hidden values, weights and sums of 16
# groups.
_ROWS = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))
_STORED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_HIDDEN = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
_SCALES = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
_SUMS = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))
_PLAIN1 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_PLAIN2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_TURNED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))

_NIBBLES = gl.constexpr("""{
    .reg .b32 t;
    and.b32 $0, $2, 0x0f0f0f0f;
    shr.u32 t, $2, 4;
    and.b32 $1, t, 0x0f0f0f0f;
    }""")
_FLOAT8 = gl.constexpr((gl.float8e4nv, gl.float8e4nv))


class _Product(NamedTuple):
    """One of the two products, and its sizes."""

    UP: bool
    WIDTH: int  # of the rows that it multiplies
    OUT: int
    BLOCKS: int  # per tile
    UP_BLOCKS: int  # those of gate_up
    ROWS: int  # per tile
    NUM_ACTIVE: int
    KEEP: str  # eviction policy of the output


def multiply_experts(
    x: OrderedRows, gate_up_proj: FourBit, down_proj: FourBit, weights: Tensor, tiles: ExpertTiles
) -> Tensor:
    """Return weights[token, k] * (geglu(x[token] @ gate_up_proj[expert].T) @ down_proj[expert].T) at [token, k].

    x: (M, D) in float8, gate_up_proj: (E, 2F, D), gate rows first, down_proj: (E, D, F), weights: (M, A) float32 →
    (M, A, D). Hidden values round to float8 too. No earlier launch may have used the tiles.

    Example: `rows = multiply_experts(expert_in, experts.gate_up_proj, experts.down_proj, weights, tiles)`.
    """
    num_tokens, width = x.shape
    hidden_width, num_pairs, device = down_proj.shape[2], tiles.pairs.numel(), x.values.device
    hidden = torch.empty(num_pairs, hidden_width, dtype=torch.float8_e4m3fn, device=device)
    scale_shape = (tiles.tiles.shape[0], hidden_width // 64, tiles.rows_per_tile)
    hidden_scale = torch.empty(scale_shape, dtype=torch.float32, device=device)
    hidden_sums = torch.empty(num_pairs, 2, 64, dtype=torch.bfloat16, device=device)  # as in `OrderedRows`
    out = torch.empty(num_tokens, tiles.num_active, width, dtype=x.dtype, device=device)
    _experts_hopper_kernel[(_PROGRAMS * num_multiprocessors(device),)](
        x.values,
        x.scale,
        x.sums,
        gate_up_proj.codes.view(torch.uint8),
        gate_up_proj.scale,
        hidden,
        hidden_scale,
        hidden_sums,
        down_proj.codes.view(torch.uint8),
        down_proj.scale,
        out,
        weights,
        tiles.pairs,
        tiles.tiles,
        tiles.finished,
        tiles.queue,
        WIDTH=width,
        HIDDEN=hidden_width,
        NUM_ACTIVE=tiles.num_active,
        ROWS=tiles.rows_per_tile,
        KEEP="evict_last" if out.nbytes <= KEPT_OUTPUT else "",
        num_warps=4,
        maxnreg=128,
        **dependent_launch(device),
    )
    return out


@gluon.jit
def _experts_hopper_kernel(
    x: gl.tensor,
    x_scale: gl.tensor,
    x_sums: gl.tensor,
    up_codes: gl.tensor,
    up_scale: gl.tensor,
    hidden: gl.tensor,
    hidden_scale: gl.tensor,
    hidden_sums: gl.tensor,
    down_codes: gl.tensor,
    down_scale: gl.tensor,
    out: gl.tensor,
    weights: gl.tensor,
    pairs: gl.tensor,
    tiles: gl.tensor,
    finished: gl.tensor,
    queue: gl.tensor,
    WIDTH: gl.constexpr,
    HIDDEN: gl.constexpr,
    NUM_ACTIVE: gl.constexpr,
    ROWS: gl.constexpr,
    KEEP: gl.constexpr,
    DEPENDENT: gl.constexpr,
) -> None:
    if DEPENDENT:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)
    num_tiles = gl.load(queue + 1)
    tables = (pairs, tiles, finished, queue)
    hidden_rows = (hidden, hidden_scale, hidden_sums)
    UP_BLOCKS: gl.constexpr = HIDDEN // 64
    UP: gl.constexpr = _Product(True, WIDTH, HIDDEN, UP_BLOCKS, UP_BLOCKS, ROWS, NUM_ACTIVE, "")
    DOWN: gl.constexpr = _Product(False, HIDDEN, WIDTH, WIDTH // 128, UP_BLOCKS, ROWS, NUM_ACTIVE, KEEP)
    block = gl.atomic_add(queue, 1, sem="relaxed")
    block = _multiply_blocks((x, up_codes, up_scale), (x_scale, x_sums), hidden_rows, tables, block, num_tiles, UP)
    of_rows = (weights, hidden_sums, hidden_scale)
    _multiply_blocks((hidden, down_codes, down_scale), of_rows, out, tables, block, num_tiles, DOWN)


@gluon.jit
def _multiply_blocks(
    proj: gl.tuple,
    scales: gl.tuple,
    out: gl.tensor,
    tables: gl.tuple,
    block: gl.tensor,
    num_tiles: gl.tensor,
    SIZE: gl.constexpr,
) -> gl.tensor:
    """Compute `block` and further blocks from the queue, until this product has none left. Return the next block, which
    is of the other product.

    Blocks are numbered from 0 within a product. A block of down has at most 16 groups. Their scales and sums are in one
    half of a buffer, and those of the next block in the other half.
    """
    BLOCKS: gl.constexpr = SIZE.BLOCKS
    ROWS: gl.constexpr = SIZE.ROWS
    UP: gl.constexpr = SIZE.UP
    PLANES: gl.constexpr = SIZE.WIDTH // 64
    LAST: gl.constexpr = (PLANES - 1) // 16  # part of 16 groups
    memory = _allocate(PLANES, ROWS, UP)
    total = num_tiles * BLOCKS
    before = 0 if UP else num_tiles * SIZE.UP_BLOCKS  # blocks of the other product in the queue
    if block < total:
        tile = _load_tile(tables, block, BLOCKS)
        pair = _load_rows(tables, tile, ROWS, UP)
        if not UP:
            while gl.atomic_add(tables[2] + block // BLOCKS, 0, sem="acquire") < SIZE.UP_BLOCKS:
                pass
        source = _source(tile, pair, block, block < total, SIZE)
        half = block * 0
        _copy_groups(proj, scales, memory[2], source, pair, block, half, 0, LAST + 1, SIZE)
        for i in gl.static_range(2 * _SLOTS - 1):
            _copy_plane(proj, memory[i % 2], block * 0 + i // 2, source, block * 0 + i)
        slot = block * 0
        while block < total:
            after = gl.atomic_add(tables[3], 1, sem="relaxed") - before
            at = (block, after, total, half)
            next_tile, next_pair = tile, pair  # defined before the branches, as Triton requires
            if tile[2] > SIZE.ROWS // 2:
                next_tile, next_pair, source, slot = _multiply_block(
                    proj, scales, out, tables, memory, at, tile, pair, source, slot, SIZE, 1
                )
            elif tile[2] > SIZE.ROWS // 4:
                next_tile, next_pair, source, slot = _multiply_block(
                    proj, scales, out, tables, memory, at, tile, pair, source, slot, SIZE, 2
                )
            else:
                next_tile, next_pair, source, slot = _multiply_block(
                    proj, scales, out, tables, memory, at, tile, pair, source, slot, SIZE, 4
                )
            block, tile, pair = after, next_tile, next_pair
            if not UP:
                half = 1 - half
        async_copy.wait_group(0)
        thread_barrier()
    return block - total


@gluon.jit
def _multiply_block(
    proj: gl.tuple,
    scales: gl.tuple,
    out: gl.tensor,
    tables: gl.tuple,
    memory: gl.tuple,
    at: gl.tuple,
    tile: gl.tuple,
    pair: gl.tensor,
    source: gl.tuple,
    slot: gl.tensor,
    SIZE: gl.constexpr,
    DIVISOR: gl.constexpr,
) -> gl.tuple:
    """Compute a block and start the copies of the next one. Return the next tile, its pairs, its source and its slot.

    Products have the rows of a tile, divided by DIVISOR. Planes with even and odd numbers are in two rings. So Triton
    knows that a step reads and writes different memory, and inserts no barrier between the two. Loads for the next
    block depend on each other. They are spread over the steps, so each has arrived before the next needs it.
    """
    BLOCKS: gl.constexpr = SIZE.BLOCKS
    ROWS: gl.constexpr = SIZE.ROWS
    FEW: gl.constexpr = ROWS // DIVISOR
    UP: gl.constexpr = SIZE.UP
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FEW, 32])
    PLANES: gl.constexpr = SIZE.WIDTH // 64
    ODD: gl.constexpr = PLANES % 2 == 1
    PAIRS: gl.constexpr = (PLANES + 1) // 2 - _SLOTS  # of steps, before the first copy for the next block
    FIRST: gl.constexpr = PAIRS // 3 if UP else PAIRS * 2 // 3
    SECOND: gl.constexpr = PAIRS * 2 // 3 if UP else PAIRS
    LAST: gl.constexpr = (PLANES - 1) // 16  # part of 16 groups
    block, after, total, half = at
    memory = (memory[0], memory[1], memory[2], half)
    source = (source[0], source[1], source[2], True)  # a constant, so that copies need no test
    few = _load_pairs(tables, tile, FEW, _ROWS if UP else _STORED)
    plane = block * 0 + (2 * _SLOTS - 1)  # the next one to copy
    low = gl.zeros((64, FEW), gl.float32, MMA)
    high = gl.zeros((64, FEW), gl.float32, MMA)
    low, high, slot, plane = _steps(proj, memory, low, high, slot, source, plane, 0, FIRST, UP)
    copying = after < total
    following = gl.where(copying, after, block)
    next_tile = _load_tile(tables, following, BLOCKS)
    if not UP:
        ready = gl.atomic_add(tables[2] + following // BLOCKS, 0, sem="relaxed")
        weight = gl.load(scales[0] + few, mask=_inside(tile, FEW, _STORED), other=0.0)
    low, high, slot, plane = _steps(proj, memory, low, high, slot, source, plane, FIRST, SECOND, UP)
    next_pair = _load_rows(tables, next_tile, ROWS, UP)
    if UP:
        weight = gl.load(scales[0] + few // SIZE.NUM_ACTIVE)
    low, high, slot, plane = _steps(proj, memory, low, high, slot, source, plane, SECOND, PAIRS, UP)

    low, high = _step(proj, memory, low, high, slot, source, plane, 2 * PAIRS, 0, not ODD, UP)
    if not UP:
        while ready < SIZE.UP_BLOCKS:
            ready = gl.atomic_add(tables[2] + following // BLOCKS, 0, sem="relaxed")
        gl.inline_asm_elementwise("fence.acq_rel.gpu; // $0", "=r", [], gl.int32, False, 1)
    source = _source(next_tile, next_pair, following, copying, SIZE)
    if UP:
        _copy_groups(proj, scales, memory[2], source, next_pair, following, half, 0, LAST, SIZE)
    else:
        _copy_groups(proj, scales, memory[2], source, next_pair, following, 1 - half, 0, 1, SIZE)
    plane = block * 0
    low, high = _step(proj, memory, low, high, slot, source, plane, 2 * PAIRS + 1, 1, True, UP)
    slot = gl.where(slot == _SLOTS - 1, 0, slot + 1)
    low, high, slot, plane = _pairs(proj, memory, low, high, slot, source, plane + 1, PAIRS + 1, PLANES // 2, UP)
    if ODD:
        low, high = _step(proj, memory, low, high, slot, source, plane, PLANES - 1, 0, True, UP)
        thread_barrier()
        _copy_plane(proj, memory[0], slot, source, plane + 1)
        plane += 2
        slot = gl.where(slot == _SLOTS - 1, 0, slot + 1)
    low, high = _add_offsets(memory[2], low, high, LAST + half, UP)
    if UP:
        _store_hidden(out, tables, memory[2][0].index(LAST), low, high, block, tile, weight, SIZE, FEW)
        _copy_groups(proj, scales, memory[2], source, next_pair, following, half, LAST, LAST + 1, SIZE)
    else:
        _store_out(out, low, high, block, tile, few, weight, SIZE, FEW)
    return next_tile, next_pair, source, slot


@gluon.jit
def _allocate(PLANES: gl.constexpr, ROWS: gl.constexpr, UP: gl.constexpr) -> gl.tuple:
    """Return shared memory: two rings, whose planes have codes and rows, and the groups of a block.

    The groups have scales of weights in two views, by 16 groups and by one, and the rows' sums with their rounding
    errors, by 16 groups. For down, they have room for two blocks, and also the scales of hidden values in two views.
    """
    PARTS: gl.constexpr = triton.cdiv(PLANES, 16) if UP else 2
    scale = gl.allocate_shared_memory(gl.int32, [PARTS, 16, 64], _PLAIN2)
    each = scale._reinterpret(gl.int32, [16 * PARTS, 64], _PLAIN1)
    sums = gl.allocate_shared_memory(gl.bfloat16, [2 * PARTS, ROWS, 16], gl.NVMMASharedLayout(32, 16))
    if UP:
        return _ring(ROWS), _ring(ROWS), (scale, each, sums)
    else:  # noqa: RET505 (without `else`, Triton also compiles the code after the return)
        of_rows = gl.allocate_shared_memory(gl.float32, [PARTS, 16, ROWS], _PLAIN2)
        each_of_rows = of_rows._reinterpret(gl.float32, [16 * PARTS, ROWS], _PLAIN1)
        return _ring(ROWS), _ring(ROWS), (scale, each, sums, of_rows, each_of_rows)


@gluon.jit
def _ring(ROWS: gl.constexpr) -> gl.tuple:
    codes = gl.allocate_shared_memory(gl.uint8, [_SLOTS, 64, 64], _PLAIN2)
    rows = gl.allocate_shared_memory(gl.float8e4nv, [_SLOTS, ROWS, 64], gl.NVMMASharedLayout(64, 8))
    return codes, rows


@gluon.jit
def _first_rows(rows: gl.tensor, ROWS: gl.constexpr) -> gl.tensor:
    """Return the first ROWS rows of a matrix in shared memory."""
    if rows.shape[0] == ROWS:
        return rows
    else:  # noqa: RET505
        return rows.slice(0, ROWS)


@gluon.jit
def _load_tile(tables: gl.tuple, block: gl.tensor, BLOCKS: gl.constexpr) -> gl.tuple:
    """Return expert, first row and number of rows of a block's tile."""
    at = tables[1] + block // BLOCKS * 3
    return gl.load(at), gl.load(at + 1), gl.load(at + 2)


@gluon.jit
def _inside(tile: gl.tuple, ROWS: gl.constexpr, LAYOUT: gl.constexpr) -> gl.tensor:
    return gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) < tile[2]


@gluon.jit
def _load_pairs(tables: gl.tuple, tile: gl.tuple, ROWS: gl.constexpr, LAYOUT: gl.constexpr) -> gl.tensor:
    """Return the pairs of a tile's rows, and 0 beyond its last row."""
    row = tile[1] + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return gl.load(tables[0] + row, mask=_inside(tile, ROWS, LAYOUT), other=0)


@gluon.jit
def _load_rows(tables: gl.tuple, tile: gl.tuple, ROWS: gl.constexpr, UP: gl.constexpr) -> gl.tensor:
    """Return the pairs of a tile's rows for gate_up, and the rows of its hidden values for down."""
    if UP:
        return _load_pairs(tables, tile, ROWS, _ROWS)
    else:  # noqa: RET505
        return tile[1] + gl.arange(0, ROWS, gl.SliceLayout(1, _ROWS))


@gluon.jit
def _source(tile: gl.tuple, pair: gl.tensor, block: gl.tensor, copying: gl.tensor, SIZE: gl.constexpr) -> gl.tuple:
    """Return what the copies of a block read: its first plane, offsets of its rows and their mask, and whether there is
    anything to copy."""
    row = pair
    if SIZE.UP:
        row = pair // SIZE.NUM_ACTIVE
    plane = (tile[0] * SIZE.BLOCKS + block % SIZE.BLOCKS) * (SIZE.WIDTH // 64)
    return plane, row * SIZE.WIDTH, _inside(tile, SIZE.ROWS, _ROWS), copying


@gluon.jit
def _copy_plane(proj: gl.tuple, ring: gl.tuple, slot: gl.tensor, source: gl.tuple, plane: gl.tensor) -> None:
    """Start a group of copies: a plane of weights, and the rows that multiply it."""
    if source[3]:
        at = (source[0] + plane).to(gl.int64)
        code = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, _BYTES)), 1) * 64
        code += gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, _BYTES)), 0)
        copy_by_threads(ring[0].index(slot), proj[1] + at * 4096 + code)
        columns = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, _ROWS)), 0) + plane * 64
        rows = proj[0] + (gl.expand_dims(source[1], 1) + columns)
        copy_by_threads(ring[1].index(slot), rows, mask=gl.expand_dims(source[2], 1))
    async_copy.commit_group()


@gluon.jit
def _steps(
    proj: gl.tuple,
    memory: gl.tuple,
    low: gl.tensor,
    high: gl.tensor,
    slot: gl.tensor,
    source: gl.tuple,
    plane: gl.tensor,
    BEGIN: gl.constexpr,
    END: gl.constexpr,
    UP: gl.constexpr,
) -> gl.tuple:
    """Multiply pairs of planes, from number BEGIN to END, and copy as many from `plane` on.

    For gate_up, add the offsets of the codes after every 8 pairs of the block.
    """
    if UP:
        for part in gl.static_range(BEGIN // 8, (END + 7) // 8):
            low, high, slot, plane = _pairs(
                proj,
                memory,
                low,
                high,
                slot,
                source,
                plane,
                BEGIN if part == BEGIN // 8 else 8 * part,
                END if 8 * part + 8 > END else 8 * part + 8,
                UP,
            )
            if 8 * part + 8 <= END:
                low, high = _add_offsets(memory[2], low, high, part, UP)
    else:
        low, high, slot, plane = _pairs(proj, memory, low, high, slot, source, plane, BEGIN, END, UP)
    return low, high, slot, plane


@gluon.jit
def _pairs(
    proj: gl.tuple,
    memory: gl.tuple,
    low: gl.tensor,
    high: gl.tensor,
    slot: gl.tensor,
    source: gl.tuple,
    plane: gl.tensor,
    BEGIN: gl.constexpr,
    END: gl.constexpr,
    UP: gl.constexpr,
) -> gl.tuple:
    for pair in range(BEGIN, END):
        low, high = _step(proj, memory, low, high, slot, source, plane, 2 * pair, 0, True, UP)
        low, high = _step(proj, memory, low, high, slot, source, plane + 1, 2 * pair + 1, 1, True, UP)
        plane += 2
        slot = gl.where(slot == _SLOTS - 1, 0, slot + 1)
    return low, high, slot, plane


@gluon.jit
def _step(
    proj: gl.tuple,
    memory: gl.tuple,
    low: gl.tensor,
    high: gl.tensor,
    slot: gl.tensor,
    source: gl.tuple,
    plane: gl.tensor,
    number: gl.tensor,
    PARITY: gl.constexpr,
    COPY: gl.constexpr,
    UP: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Multiply a block's plane `number`, in `slot` of a ring. If COPY, copy `plane` to where the step before has read.

    The rings alternate, by PARITY of the number.
    """
    # Products read shared memory through the async proxy, but threads wrote the rows through the generic proxy. So a
    # fence is needed.
    gl.inline_asm_elementwise(
        "cp.async.wait_group 4; fence.proxy.async.shared::cta; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1
    )
    thread_barrier()
    MMA: gl.constexpr = low.type.layout
    ring = memory[PARITY]
    rows = _first_rows(ring[1].index(slot), low.shape[1]).permute((1, 0))
    none = gl.zeros(low.shape, gl.float32, MMA)
    low_codes, high_codes = _split(ring[0], slot, MMA)
    low_run = warpgroup_mma(low_codes, rows, none, use_acc=False, is_async=True)
    high_run = warpgroup_mma(high_codes, rows, none, use_acc=False, is_async=True)
    at = number if UP else 16 * memory[3] + number
    scale = memory[2][1].index(at).load(gl.SliceLayout(1, MMA))
    low_scale = gl.expand_dims((scale << 16).to(gl.float32, bitcast=True), 1)
    high_scale = gl.expand_dims((scale & -65536).to(gl.float32, bitcast=True), 1)
    if UP:
        low_scale *= 2.0**-117
        high_scale *= 2.0**-113
    else:  # the scales of hidden values have a factor of 2**-97, so the sums have 2**20 and 2**16
        of_rows = _first_rows(memory[2][4].index(at), low.shape[1]).load(gl.SliceLayout(0, MMA))
        of_rows = gl.expand_dims(of_rows, 0)
    if COPY:
        free = slot
        if PARITY == 0:
            free = gl.where(slot == 0, _SLOTS - 1, slot - 1)
        _copy_plane(proj, memory[1 - PARITY], free, source, plane)
    else:
        async_copy.commit_group()
    low_dot = warpgroup_mma_wait(1, deps=(low_run,))
    if not UP:
        low_dot *= of_rows
    low += low_dot * low_scale
    high_dot = warpgroup_mma_wait(0, deps=(high_run,))
    if not UP:
        high_dot *= of_rows
    high += high_dot * high_scale
    return low, high


@gluon.jit
def _split(codes: gl.tensor, slot: gl.tensor, MMA: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    """Return the codes of rows r and rows r + 64 of a plane as left operands: (64, 64) float8."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    both = codes.index(slot).load(_BYTES)
    low, high = gl.inline_asm_elementwise(_NIBBLES, "=r,=r,r", [both], _FLOAT8, True, 4)
    low = low.reshape(64, 4, 4, 4).permute(0, 2, 1, 3).reshape(64, 64)
    high = high.reshape(64, 4, 4, 4).permute(0, 2, 1, 3).reshape(64, 64)
    return gl.convert_layout(low, LEFT, assert_trivial=True), gl.convert_layout(high, LEFT, assert_trivial=True)


@gluon.jit
def _copy_groups(
    proj: gl.tuple,
    of_rows: gl.tuple,
    groups: gl.tuple,
    source: gl.tuple,
    pair: gl.tensor,
    block: gl.tensor,
    half: gl.tensor,
    BEGIN: gl.constexpr,
    END: gl.constexpr,
    SIZE: gl.constexpr,
) -> None:
    """Start the copies of parts BEGIN to END, scales and sums of rows, in the group of the plane that is next."""
    if source[3]:
        PLANES: gl.constexpr = SIZE.WIDTH // 64
        row = pair
        if SIZE.UP:
            row = pair // SIZE.NUM_ACTIVE
        group = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, _SCALES)), 1)
        line = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, _SCALES)), 0)
        row = gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(1, _SUMS)) * 128, 1)
        inside = gl.expand_dims(gl.convert_layout(source[2], gl.SliceLayout(1, _SUMS)), 1)
        col = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, _SUMS)), 0)
        SUMS: gl.constexpr = PLANES + PLANES % 2  # of two bytes each, and a copy has at least four
        for part in gl.static_range(BEGIN, END):
            scale = proj[2] + (source[0] + 16 * part).to(gl.int64) * 64 + (group * 64 + line)
            copy_by_threads(groups[0].index(half + part), scale, mask=group < PLANES - 16 * part)
            for i in gl.static_range(2):
                sums = of_rows[1] + (row + (col + (64 * i + 16 * part)))
                copy_by_threads(groups[2].index(2 * (half + part) + i), sums, mask=inside & (col < SUMS - 16 * part))
        if not SIZE.UP:
            each = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, _HIDDEN)), 1)
            at = each * SIZE.ROWS + gl.expand_dims(gl.arange(0, SIZE.ROWS, gl.SliceLayout(0, _HIDDEN)), 0)
            at += block // SIZE.BLOCKS * (PLANES * SIZE.ROWS)
            copy_by_threads(groups[3].index(half), of_rows[2] + at, mask=each < PLANES)


@gluon.jit
def _add_offsets(
    groups: gl.tuple, low: gl.tensor, high: gl.tensor, part: gl.tensor, UP: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """Add the offsets of the codes of 16 groups: -8 times the sums of the rows, times the scales."""
    MMA: gl.constexpr = low.type.layout
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MMA.instr_shape[1], 16])
    none = gl.zeros(low.shape, gl.float32, WIDE)
    scale = groups[0].index(part).permute((1, 0)).load(gl.DotOperandLayout(0, WIDE, 2))
    low_scale = scale.to(gl.int16).to(gl.bfloat16, bitcast=True)
    high_scale = (scale >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    sums = _first_rows(groups[2].index(2 * part), low.shape[1]).permute((1, 0))
    rest = _first_rows(groups[2].index(2 * part + 1), low.shape[1]).permute((1, 0))
    low_run = warpgroup_mma(low_scale, sums, none, use_acc=False, is_async=True)
    low_run = warpgroup_mma(low_scale, rest, low_run, is_async=True)
    high_run = warpgroup_mma(high_scale, sums, none, use_acc=False, is_async=True)
    high_run = warpgroup_mma(high_scale, rest, high_run, is_async=True)
    low_more, high_more, low_scale, high_scale = warpgroup_mma_wait(0, deps=(low_run, high_run, low_scale, high_scale))
    low += gl.convert_layout(low_more, MMA, assert_trivial=True) * (2.0**-77 if UP else 2.0**-57)
    high += gl.convert_layout(high_more, MMA, assert_trivial=True) * (2.0**-73 if UP else 2.0**-57)
    return low, high


@gluon.jit
def _round_to_float8(x: gl.tensor) -> gl.tensor:
    """Return float32 values of at most 448 rounded to float8 (e4m3), in float32, as `norms.kernel` does."""
    bits = x.to(gl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(gl.float32, bitcast=True)
    denormal = (x + 1.5 * 2.0**14) - 1.5 * 2.0**14  # a multiple of 2**-9
    return gl.where(gl.maximum(x, -x) < 2.0**-6, denormal, normal)


@gluon.jit
def _store_hidden(
    out: gl.tuple,
    tables: gl.tuple,
    scratch: gl.tensor,
    gate: gl.tensor,
    up: gl.tensor,
    block: gl.tensor,
    tile: gl.tuple,
    row_scale: gl.tensor,
    SIZE: gl.constexpr,
    ROWS: gl.constexpr,
) -> None:
    """Multiply by the tokens' scales, and store GeGLU of a block in float8. `scratch` is shared memory."""
    MMA: gl.constexpr = gate.type.layout
    row_scale = gl.expand_dims(gl.convert_layout(row_scale, gl.SliceLayout(0, MMA)) * 512.0, 0)
    dtype: gl.constexpr = gl.bfloat16
    gate = (gate * row_scale).to(dtype).to(gl.float32)
    gate *= 1.0 / (1.0 + gl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    hidden = (gate.to(dtype).to(gl.float32) * (up * row_scale).to(dtype).to(gl.float32)).to(dtype)
    ordered = hidden.reshape(4, 2, 8, ROWS).permute((0, 2, 1, 3)).reshape(64, ROWS).permute((1, 0))  # as `OrderedRows`
    place = scratch._reinterpret(gl.bfloat16, [ROWS, 64], _TURNED)
    thread_barrier()  # all threads have read the scales in this place
    place.store(ordered)
    thread_barrier()
    wide = place.load(_STORED).to(gl.float32)
    # A power of two, divided by which the largest value is from 128 to 256.
    exponent = gl.maximum(gl.max(gl.maximum(wide, -wide), axis=1).to(gl.int32, bitcast=True) >> 23, 8) - 7
    scale = (exponent << 23).to(gl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    wide = _round_to_float8(wide * gl.expand_dims(inverse, 1))
    exact = gl.sum(wide, axis=1) * scale * (-8 * 2.0**-49)
    sums = exact.to(gl.bfloat16)
    rest = (exact - sums.to(gl.float32)).to(gl.bfloat16)
    each = gl.arange(0, ROWS, gl.SliceLayout(1, _STORED))
    row, inside, group = tile[1] + each, _inside(tile, ROWS, _STORED), block % SIZE.BLOCKS
    column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, _STORED)), 0) + group * 64
    gl.store(
        out[0] + (gl.expand_dims(row * SIZE.OUT, 1) + column), wide.to(gl.float8e4nv), mask=gl.expand_dims(inside, 1)
    )
    gl.store(out[1] + (block * SIZE.ROWS + each), scale * 2.0**-97, mask=inside)
    gl.store(out[2] + (row * 128 + group), sums, mask=inside)
    gl.store(out[2] + (row * 128 + group + 64), rest, mask=inside)
    if SIZE.BLOCKS % 2 == 1:  # zeros after the last group, because two sums are copied together
        last = inside & (group == SIZE.BLOCKS - 1)
        gl.store(out[2] + (row * 128 + SIZE.BLOCKS), gl.zeros_like(sums), mask=last)
        gl.store(out[2] + (row * 128 + SIZE.BLOCKS + 64), gl.zeros_like(sums), mask=last)
    thread_barrier()  # all threads store before one thread counts the block
    gl.atomic_add(tables[2] + block // SIZE.BLOCKS, 1, sem="release")


@gluon.jit
def _store_out(
    out: gl.tensor,
    low: gl.tensor,
    high: gl.tensor,
    block: gl.tensor,
    tile: gl.tuple,
    pair: gl.tensor,
    weight: gl.tensor,
    SIZE: gl.constexpr,
    ROWS: gl.constexpr,
) -> None:
    """Store both halves of a block's columns, times the routing weights."""
    dtype: gl.constexpr = out.dtype.element_ty
    each = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, _STORED)), 0)
    inside = gl.expand_dims(_inside(tile, ROWS, _STORED), 1)
    weight = gl.expand_dims(weight, 1)
    at = out + (gl.expand_dims(pair * SIZE.OUT, 1) + (block % SIZE.BLOCKS * 128 + each))
    low_out = gl.convert_layout((low * 2.0**-11).to(dtype).permute((1, 0)), _STORED).to(gl.float32) * weight
    gl.store(at, low_out.to(dtype), mask=inside, eviction_policy=SIZE.KEEP)
    high_out = gl.convert_layout((high * 2.0**-7).to(dtype).permute((1, 0)), _STORED).to(gl.float32) * weight
    gl.store(at + 64, high_out.to(dtype), mask=inside, eviction_policy=SIZE.KEEP)
