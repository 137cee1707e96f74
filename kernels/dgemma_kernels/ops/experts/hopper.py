"""Both products of int4 experts in one launch on Hopper, in Gluon, with float8 inputs in gate_up.

A tile has tokens that chose the same expert. A block multiplies a tile by 128 rows of the expert's weights. Four
programs per multiprocessor take blocks from a queue, first all blocks of gate_up, then those of down.

A program copies planes of weights (128 rows by 64 columns) into ring buffers in shared memory. With each plane, it
copies the 64 columns of its tokens that multiply the plane. While it multiplies the last planes of a block, it already
copies the first ones of its next block. A block of down waits for the hidden values of its tile. Blocks are taken in
order, and only by running programs. So the blocks that a block of down waits for are complete or being computed. A tile
with few rows has smaller products, which take less time and energy.

A byte with a code of four bits, read as float8, is code * 2**-9. So the codes themselves are the left operand of
gate_up. The scale of a group multiplies its sums. Codes have an offset of 8. To remove it, one more product follows
every 16 groups. For each group, it adds -8 times the group's scale times the sum of the token's values in this group.
down decodes to bfloat16, as `kernel` does.
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

# Layouts in which the threads of a warpgroup hold a plane as the left operand: as words (64, 16) and as bytes (64, 64).
_LANES = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
_WARPS = [[16, 0], [32, 0]]
_WORDS = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], _LANES, _WARPS, [], [64, 16]))
_BYTES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        _WARPS,
        [],
        [64, 64],
    )
)
# Layouts of copies: rows of tokens, 16 bytes per thread; scales and sums of 16 groups; scales of four planes of down.
_ROWS8 = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))
_ROWS16 = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_SCALES = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
_SUMS = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))
_FOUR = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
_PLAIN1 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_PLAIN2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))

_NIBBLES = gl.constexpr("""{
    .reg .b32 t;
    and.b32 $0, $2, 0x0f0f0f0f;
    shr.u32 t, $2, 4;
    and.b32 $1, t, 0x0f0f0f0f;
    }""")
_FLOAT8 = gl.constexpr((gl.float8e4nv, gl.float8e4nv))


def _decode_ptx(scales: str, eight: str, codes: str) -> gl.constexpr:
    """Return PTX for the four weights of a word that are in one row, as in `formats.fourbit`."""
    return gl.constexpr(f"""{{
    .reg .b32 t, scale, add, w0, w1;
    prmt.b32 scale, $5, $5, {scales};
    mov.b32 t, {eight};
    mov.b32 add, 0x80008000;
    fma.rn.bf16x2 add, scale, t, add;
    shr.u32 t, $4, 8;
    and.b32 w0, $4, {codes};
    and.b32 w1, t, {codes};
    fma.rn.bf16x2 w0, w0, scale, add;
    fma.rn.bf16x2 w1, w1, scale, add;
    mov.b32 {{$0, $1}}, w0;
    mov.b32 {{$2, $3}}, w1;
    }}""")


_LOW = _decode_ptx("0x1010", "0x80088008", "0x000f000f")  # row r
_HIGH = _decode_ptx("0x3232", "0x80808080", "0x00f000f0")  # row r + 64
_BFLOAT16 = gl.constexpr((gl.bfloat16,) * 4)


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
    (M, A, D). No earlier launch may have used the tiles.

    Example: `rows = multiply_experts(expert_in, experts.gate_up_proj, experts.down_proj, weights, tiles)`.
    """
    num_tokens, width = x.shape
    hidden_width, num_pairs, device = down_proj.shape[2], tiles.pairs.numel(), x.values.device
    hidden = torch.empty(num_pairs, hidden_width, dtype=x.dtype, device=device)
    out = torch.empty(num_tokens, tiles.num_active, width, dtype=x.dtype, device=device)
    _experts_hopper_kernel[(_PROGRAMS * num_multiprocessors(device),)](
        x.values,
        x.scale,
        x.sums,
        gate_up_proj.codes.view(torch.uint8),
        gate_up_proj.scale,
        hidden,
        down_proj.codes,
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
    UP_BLOCKS: gl.constexpr = HIDDEN // 64
    UP: gl.constexpr = _Product(True, WIDTH, HIDDEN, UP_BLOCKS, UP_BLOCKS, ROWS, NUM_ACTIVE, "")
    DOWN: gl.constexpr = _Product(False, HIDDEN, WIDTH, WIDTH // 128, UP_BLOCKS, ROWS, NUM_ACTIVE, KEEP)
    block = gl.atomic_add(queue, 1, sem="relaxed")
    block = _multiply_blocks((x, up_codes, up_scale), (x_scale, x_sums), hidden, tables, block, num_tiles, UP)
    _multiply_blocks((hidden, down_codes, down_scale), (weights,), out, tables, block, num_tiles, DOWN)


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
    """Compute `block` and further blocks from the queue, until this product has none left.

    Blocks are numbered from 0 within a product. Returns the next block, numbered within the next product.
    """
    BLOCKS: gl.constexpr = SIZE.BLOCKS
    ROWS: gl.constexpr = SIZE.ROWS
    UP: gl.constexpr = SIZE.UP
    PLANES: gl.constexpr = SIZE.WIDTH // 64
    LAST: gl.constexpr = (PLANES - 1) // 16  # index of the last part; a part has 16 groups
    memory = _allocate(proj[0], PLANES, ROWS)
    total = num_tiles * BLOCKS
    before = 0 if UP else num_tiles * SIZE.UP_BLOCKS  # blocks of the other product in the queue
    if block < total:
        tile = _load_tile(tables, block, BLOCKS)
        pair = _load_pairs(tables, tile, ROWS, UP)
        if not UP:
            while gl.atomic_add(tables[2] + block // BLOCKS, 0, sem="acquire") < SIZE.UP_BLOCKS:
                pass
        source = _source(tile, pair, block, block < total, SIZE)
        half = block * 0  # of the memory for the scales of down
        if UP:
            _copy_groups(proj, scales, memory[2], source, pair, 0, LAST + 1, SIZE)
        else:
            _copy_scales(proj, memory[2][0], half, source, SIZE)
        for i in gl.static_range(2 * _SLOTS - 1):
            _copy_plane(proj, memory[i % 2], block * 0 + i // 2, source, block * 0 + i)
        slot = block * 0
        while block < total:
            after = gl.atomic_add(tables[3], 1, sem="relaxed") - before
            at = (block, after, total)
            next_tile, next_pair = tile, pair  # defined before the branches, as Triton requires
            if tile[2] > SIZE.ROWS // 2:
                next_tile, next_pair, source, slot = _multiply_block(
                    proj, scales, out, tables, memory, half, at, tile, pair, source, slot, SIZE, 1
                )
            elif tile[2] > SIZE.ROWS // 4:
                next_tile, next_pair, source, slot = _multiply_block(
                    proj, scales, out, tables, memory, half, at, tile, pair, source, slot, SIZE, 2
                )
            else:
                next_tile, next_pair, source, slot = _multiply_block(
                    proj, scales, out, tables, memory, half, at, tile, pair, source, slot, SIZE, 4
                )
            block, tile, pair, half = after, next_tile, next_pair, 1 - half
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
    half: gl.tensor,
    at: gl.tuple,
    tile: gl.tuple,
    pair: gl.tensor,
    source: gl.tuple,
    slot: gl.tensor,
    SIZE: gl.constexpr,
    DIVISOR: gl.constexpr,
) -> gl.tuple:
    """Compute a block and start the copies of the next one.

    Returns the tile of the next block, the tile's (token, k) pairs, what to copy (`_source`), and the first slot.

    A product has 1 / DIVISOR of the rows of a full tile. Planes with even and odd numbers are in two rings. So Triton
    knows that a step reads and writes different memory, and inserts no barrier between the two. Loads for the next
    block depend on each other. They are spread over the steps, so each has arrived before the next needs it.
    """
    BLOCKS: gl.constexpr = SIZE.BLOCKS
    ROWS: gl.constexpr = SIZE.ROWS
    FEW: gl.constexpr = ROWS // DIVISOR
    UP: gl.constexpr = SIZE.UP
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FEW, 32 if UP else 16])
    PLANES: gl.constexpr = SIZE.WIDTH // 64
    ODD: gl.constexpr = PLANES % 2 == 1
    PAIRS: gl.constexpr = (PLANES + 1) // 2 - _SLOTS  # of steps, before the first copy for the next block
    FIRST: gl.constexpr = PAIRS // 3 if UP else PAIRS * 2 // 3
    SECOND: gl.constexpr = PAIRS * 2 // 3 if UP else PAIRS
    LAST: gl.constexpr = (PLANES - 1) // 16  # index of the last part; a part has 16 groups
    block, after, total = at
    memory = (memory[0], memory[1], memory[2], half * (4 * triton.cdiv(PLANES, 4)))
    source = (source[0], source[1], source[2], True)  # a constant, so that copies need no test
    if FEW == ROWS:
        few = pair
    else:
        few = _load_pairs(tables, tile, FEW, UP)
    plane = block * 0 + (2 * _SLOTS - 1)  # the next one to copy
    low = gl.zeros((64, FEW), gl.float32, MMA)
    high = gl.zeros((64, FEW), gl.float32, MMA)
    low, high, slot, plane = _steps(proj, memory, low, high, slot, source, plane, 0, FIRST, UP)
    copying = after < total
    following = gl.where(copying, after, block)
    next_tile = _load_tile(tables, following, BLOCKS)
    if not UP:
        ready = gl.atomic_add(tables[2] + following // BLOCKS, 0, sem="relaxed")
        weight = gl.load(scales[0] + few, mask=_inside(tile, FEW, UP), other=0.0)
    low, high, slot, plane = _steps(proj, memory, low, high, slot, source, plane, FIRST, SECOND, UP)
    next_pair = _load_pairs(tables, next_tile, ROWS, UP)
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
        _copy_groups(proj, scales, memory[2], source, next_pair, 0, LAST, SIZE)
    else:
        _copy_scales(proj, memory[2][0], 1 - half, source, SIZE)
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
    if UP:
        low, high = _add_offsets(memory[2], low, high, LAST)
        _store_hidden(out, tables, low, high, block, tile, weight, SIZE, FEW)
        _copy_groups(proj, scales, memory[2], source, next_pair, LAST, LAST + 1, SIZE)
    else:
        _store_out(out, low, high, block, tile, few, weight, SIZE, FEW)
    return next_tile, next_pair, source, slot


@gluon.jit
def _allocate(x: gl.tensor, PLANES: gl.constexpr, ROWS: gl.constexpr) -> gl.tuple:
    """Return shared memory: two rings of planes, and a part for scales. A plane has codes and rows of tokens.

    For gate_up, the part for scales has the scales of all groups, the sums of the rows in each group, and the rounding
    errors of these sums. All three are in parts of 16 groups. For down, it has the scales of this block and of the next
    one, in parts of four planes. For both products, a second view of the scales is indexed by groups.
    """
    PARTS: gl.constexpr = triton.cdiv(PLANES, 16)
    if x.dtype.element_ty == gl.float8e4nv:
        scale = gl.allocate_shared_memory(gl.int32, [PARTS, 16, 64], _PLAIN2)
        sums = gl.allocate_shared_memory(gl.bfloat16, [2 * PARTS, ROWS, 16], gl.NVMMASharedLayout(32, 16))
        groups = (scale, scale._reinterpret(gl.int32, [16 * PARTS, 64], _PLAIN1), sums)
        return _ring(x, ROWS), _ring(x, ROWS), groups
    else:  # noqa: RET505 (without `else`, Triton also compiles the code after the return)
        FOURS: gl.constexpr = triton.cdiv(PLANES, 4)
        scale = gl.allocate_shared_memory(gl.int32, [2 * FOURS, 4, 64], _PLAIN2)
        return _ring(x, ROWS), _ring(x, ROWS), (scale, scale._reinterpret(gl.int32, [8 * FOURS, 64], _PLAIN1))


@gluon.jit
def _ring(x: gl.tensor, ROWS: gl.constexpr) -> gl.tuple:
    if x.dtype.element_ty == gl.float8e4nv:
        codes = gl.allocate_shared_memory(gl.uint8, [_SLOTS, 64, 64], _PLAIN2)
        rows = gl.allocate_shared_memory(gl.float8e4nv, [_SLOTS, ROWS, 64], gl.NVMMASharedLayout(64, 8))
        return codes, rows
    else:  # noqa: RET505
        codes = gl.allocate_shared_memory(gl.int32, [_SLOTS, 64, 16], _PLAIN2)
        rows = gl.allocate_shared_memory(gl.bfloat16, [_SLOTS, ROWS, 64], gl.NVMMASharedLayout(128, 16))
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
def _inside(tile: gl.tuple, ROWS: gl.constexpr, UP: gl.constexpr) -> gl.tensor:
    LAYOUT: gl.constexpr = _ROWS8 if UP else _ROWS16
    return gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) < tile[2]


@gluon.jit
def _load_pairs(tables: gl.tuple, tile: gl.tuple, ROWS: gl.constexpr, UP: gl.constexpr) -> gl.tensor:
    """Return the pair token * A + k of each row of a tile, and 0 beyond its last row."""
    LAYOUT: gl.constexpr = _ROWS8 if UP else _ROWS16
    row = tile[1] + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return gl.load(tables[0] + row, mask=_inside(tile, ROWS, UP), other=0)


@gluon.jit
def _source(tile: gl.tuple, pair: gl.tensor, block: gl.tensor, copying: gl.tensor, SIZE: gl.constexpr) -> gl.tuple:
    """Return what the copies of a block read: its first plane, offsets of its rows and their mask, and whether there is
    anything to copy."""
    if SIZE.UP:
        row = pair // SIZE.NUM_ACTIVE
    else:
        row = tile[1] + gl.arange(0, SIZE.ROWS, gl.SliceLayout(1, _ROWS16))
    plane = (tile[0] * SIZE.BLOCKS + block % SIZE.BLOCKS) * (SIZE.WIDTH // 64)
    return plane, row * SIZE.WIDTH, _inside(tile, SIZE.ROWS, SIZE.UP), copying


@gluon.jit
def _copy_plane(proj: gl.tuple, ring: gl.tuple, slot: gl.tensor, source: gl.tuple, plane: gl.tensor) -> None:
    """Start a group of copies: a plane of weights, and the rows that multiply it."""
    if source[3]:
        at = (source[0] + plane).to(gl.int64)
        UP: gl.constexpr = proj[0].dtype.element_ty == gl.float8e4nv
        CODES: gl.constexpr = _BYTES if UP else _WORDS
        PER_ROW: gl.constexpr = 64 if UP else 16
        code = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, CODES)), 1) * PER_ROW
        code += gl.expand_dims(gl.arange(0, PER_ROW, gl.SliceLayout(0, CODES)), 0)
        copy_by_threads(ring[0].index(slot), proj[1] + at * (64 * PER_ROW) + code)
        LAYOUT: gl.constexpr = source[1].type.layout.parent
        columns = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, LAYOUT)), 0) + plane * 64
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
    """Multiply planes 2 * BEGIN to 2 * END - 1 of a block, and copy as many planes from number `plane` on.

    For gate_up, add the offsets of the codes after every 16 planes of the block.
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
                low, high = _add_offsets(memory[2], low, high, part)
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
    """Multiply a block's plane `number`, in `slot` of a ring. If COPY, copy `plane` to the last slot read.

    The rings alternate, by PARITY of the number.
    """
    if PARITY == 0:
        # Products read shared memory through the async proxy, but threads wrote the rows through the generic proxy. So
        # a fence is needed. It is slow, so one wait and one fence serve two planes.
        gl.inline_asm_elementwise(
            "cp.async.wait_group 3; fence.proxy.async.shared::cta; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1
        )
    thread_barrier()
    MMA: gl.constexpr = low.type.layout
    ring = memory[PARITY]
    rows = _first_rows(ring[1].index(slot), low.shape[1]).permute((1, 0))
    if UP:
        none = gl.zeros(low.shape, gl.float32, MMA)
        low_codes, high_codes = _split(ring[0], slot, MMA)
        low_run = warpgroup_mma(low_codes, rows, none, use_acc=False, is_async=True)
        high_run = warpgroup_mma(high_codes, rows, none, use_acc=False, is_async=True)
        scale = memory[2][1].index(number).load(gl.SliceLayout(1, MMA))
        low_scale = gl.expand_dims((scale << 16).to(gl.float32, bitcast=True) * 2.0**-117, 1)
        high_scale = gl.expand_dims((scale & -65536).to(gl.float32, bitcast=True) * 2.0**-113, 1)
    else:
        scale = memory[2][1].index(memory[3] + number)
        low_codes = _decode(ring[0], scale, slot, MMA, _LOW)
        low_run = warpgroup_mma(low_codes, rows, low, is_async=True)
        high_codes = _decode(ring[0], scale, slot, MMA, _HIGH)
        high_run = warpgroup_mma(high_codes, rows, high, is_async=True)
    if COPY:
        free = slot
        if PARITY == 0:
            free = gl.where(slot == 0, _SLOTS - 1, slot - 1)
        _copy_plane(proj, memory[1 - PARITY], free, source, plane)
    else:
        async_copy.commit_group()
    if UP:
        low_dot = warpgroup_mma_wait(1, deps=(low_run,))
        low += low_dot * low_scale
        high_dot = warpgroup_mma_wait(0, deps=(high_run,))
        high += high_dot * high_scale
    else:
        low, high, low_codes, high_codes = warpgroup_mma_wait(0, deps=(low_run, high_run, low_codes, high_codes))
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
def _decode(codes: gl.tensor, scale: gl.tensor, slot: gl.tensor, MMA: gl.constexpr, PTX: gl.constexpr) -> gl.tensor:
    """Return rows r or rows r + 64 of a plane as a left operand: (64, 64) bfloat16."""
    words = codes.index(slot).load(_WORDS)
    each, words = gl.broadcast(gl.expand_dims(scale.load(gl.SliceLayout(1, _WORDS)), 1), words)
    a, b, c, d = gl.inline_asm_elementwise(PTX, "=h,=h,=h,=h,r,r", [words, each], _BFLOAT16, True, 1)
    wide = gl.join(gl.join(a, c), gl.join(b, d)).reshape(64, 4, 4, 2, 2).permute(0, 2, 3, 1, 4).reshape(64, 64)
    return gl.convert_layout(wide, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _copy_groups(
    proj: gl.tuple,
    of_tokens: gl.tuple,
    groups: gl.tuple,
    source: gl.tuple,
    pair: gl.tensor,
    BEGIN: gl.constexpr,
    END: gl.constexpr,
    SIZE: gl.constexpr,
) -> None:
    """Start to copy parts BEGIN to END of the weights' scales and the tokens' sums, together with the next plane."""
    if source[3]:
        PLANES: gl.constexpr = SIZE.WIDTH // 64
        token = pair // SIZE.NUM_ACTIVE
        group = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, _SCALES)), 1)
        line = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, _SCALES)), 0)
        row = gl.expand_dims(gl.convert_layout(token, gl.SliceLayout(1, _SUMS)) * 128, 1)
        inside = gl.expand_dims(gl.convert_layout(source[2], gl.SliceLayout(1, _SUMS)), 1)
        col = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, _SUMS)), 0)
        for part in gl.static_range(BEGIN, END):
            scale = proj[2] + (source[0] + 16 * part).to(gl.int64) * 64 + (group * 64 + line)
            copy_by_threads(groups[0].index(part), scale, mask=group < PLANES - 16 * part)
            for i in gl.static_range(2):
                sums = of_tokens[1] + (row + (col + (64 * i + 16 * part)))
                copy_by_threads(groups[2].index(2 * part + i), sums, mask=inside & (col < PLANES - 16 * part))


@gluon.jit
def _copy_scales(proj: gl.tuple, scales: gl.tensor, half: gl.tensor, source: gl.tuple, SIZE: gl.constexpr) -> None:
    """Start to copy the scales for a block of down into half of their memory.

    The next wait for the copy of a plane also waits for this copy.
    """
    if source[3]:
        PLANES: gl.constexpr = SIZE.WIDTH // 64
        FOURS: gl.constexpr = triton.cdiv(PLANES, 4)
        plane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, _FOUR)), 1)
        line = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, _FOUR)), 0)
        for part in gl.static_range(FOURS):
            at = proj[2] + (source[0] + 4 * part).to(gl.int64) * 64 + (plane * 64 + line)
            copy_by_threads(scales.index(half * FOURS + part), at, mask=plane < PLANES - 4 * part)


@gluon.jit
def _add_offsets(groups: gl.tuple, gate: gl.tensor, up: gl.tensor, PART: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    """Add the offsets of the codes of 16 groups: -8 times the sums of the tokens, times the scales."""
    MMA: gl.constexpr = gate.type.layout
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MMA.instr_shape[1], 16])
    none = gl.zeros(gate.shape, gl.float32, WIDE)
    scale = groups[0].index(PART).permute((1, 0)).load(gl.DotOperandLayout(0, WIDE, 2))
    gate_scale = scale.to(gl.int16).to(gl.bfloat16, bitcast=True)
    up_scale = (scale >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    sums = _first_rows(groups[2].index(2 * PART), gate.shape[1]).permute((1, 0))
    rest = _first_rows(groups[2].index(2 * PART + 1), gate.shape[1]).permute((1, 0))
    gate_run = warpgroup_mma(gate_scale, sums, none, use_acc=False, is_async=True)
    gate_run = warpgroup_mma(gate_scale, rest, gate_run, is_async=True)
    up_run = warpgroup_mma(up_scale, sums, none, use_acc=False, is_async=True)
    up_run = warpgroup_mma(up_scale, rest, up_run, is_async=True)
    gate_more, up_more, gate_scale, up_scale = warpgroup_mma_wait(0, deps=(gate_run, up_run, gate_scale, up_scale))
    gate += gl.convert_layout(gate_more, MMA, assert_trivial=True) * 2.0**-77
    up += gl.convert_layout(up_more, MMA, assert_trivial=True) * 2.0**-73
    return gate, up


@gluon.jit
def _store_hidden(
    out: gl.tensor,
    tables: gl.tuple,
    gate: gl.tensor,
    up: gl.tensor,
    block: gl.tensor,
    tile: gl.tuple,
    row_scale: gl.tensor,
    SIZE: gl.constexpr,
    ROWS: gl.constexpr,
) -> None:
    """Multiply by the tokens' scales, and store GeGLU of a block."""
    MMA: gl.constexpr = gate.type.layout
    row_scale = gl.expand_dims(gl.convert_layout(row_scale, gl.SliceLayout(0, MMA)) * 512.0, 0)
    dtype: gl.constexpr = out.dtype.element_ty
    gate = (gate * row_scale).to(dtype).to(gl.float32)
    gate *= 1.0 / (1.0 + gl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    hidden = (gate.to(dtype).to(gl.float32) * (up * row_scale).to(dtype).to(gl.float32)).to(dtype)
    row = gl.expand_dims((tile[1] + gl.arange(0, ROWS, gl.SliceLayout(1, _ROWS16))) * SIZE.OUT, 1)
    each = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, _ROWS16)), 0)
    inside = gl.expand_dims(_inside(tile, ROWS, False), 1)
    at = out + (row + (block % SIZE.BLOCKS * 64 + each))
    gl.store(at, gl.convert_layout(hidden.permute((1, 0)), _ROWS16), mask=inside)
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
    each = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, _ROWS16)), 0)
    inside = gl.expand_dims(_inside(tile, ROWS, False), 1)
    weight = gl.expand_dims(weight, 1)
    at = out + (gl.expand_dims(pair * SIZE.OUT, 1) + (block % SIZE.BLOCKS * 128 + each))
    low_out = gl.convert_layout((low * 65536.0).to(dtype).permute((1, 0)), _ROWS16).to(gl.float32) * weight
    gl.store(at, low_out.to(dtype), mask=inside, eviction_policy=SIZE.KEEP)
    high_out = gl.convert_layout((high * 65536.0).to(dtype).permute((1, 0)), _ROWS16).to(gl.float32) * weight
    gl.store(at + 64, high_out.to(dtype), mask=inside, eviction_policy=SIZE.KEEP)
