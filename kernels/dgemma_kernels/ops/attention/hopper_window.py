"""Causal attention within a window on Hopper, for prompts: `hopper` with many tiles of rows per program.

In `hopper`, a program computes 128 packed query rows. With a window of 1,024 keys, the start and the end of a program
take about a sixth of its time. Here, one program per multiprocessor computes many such tiles of rows, one after the
other. While it ends one tile, it already copies queries, keys and values of the next. Results have the bits of
`hopper`.

Barriers: a chunk is `full` when its copy is complete, and `free` when both warpgroups have read it. Tiles of keys are
numbered over all tiles of rows. Their number gives their place in shared memory and the phase of their barriers.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dgemma_kernels.blocks import wait_for_launches_before
from dgemma_kernels.ops.attention.hopper_common import (
    BYTES,
    CHUNK,
    KEYS,
    ROWS,
    add_softmax,
    clear_slots,
    copy_chunk,
    describe_blocks,
    describe_slots,
    mask_scores,
    store_unit,
)
from dgemma_kernels.ops.attention.parts import float8_unit, part_of_keys
from dgemma_kernels.ops.configs import dependent_launch, num_multiprocessors
from dgemma_kernels.ops.hopper import async_load, async_store, make_barriers, thread_barrier

TILE = (128, 64, 256)  # query rows, slots per iteration, value columns
_BUFFERS = gl.constexpr(2)  # tiles of keys, and of values
_NUMBERS = [
    "num_tokens", "row_tiles", "num_units", "key_batch_slots", "key_head_slots", "value_batch_slots", "value_head_slots"
]  # fmt: skip


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, length: Tensor, out: Tensor, scale: Tensor | None, window: int
) -> None:
    """Write causal attention within `window` to `out` (B, T, N, 256). The other arguments are those of `attention`.

    With `scale` (B·T,), `out` is float8 in units of `float8_unit`, and that unit is written to `scale`.

    Example: `attend(queries, keys, values, length, out, None, 1024)`.
    """
    batch, num_tokens, num_heads, head_dim = queries.shape
    kv_heads, group = keys.shape[1], num_heads // keys.shape[1]
    row_tiles = triton.cdiv(num_tokens * group, TILE[0])
    num_units = row_tiles * batch * kv_heads
    _attention_window_kernel[(min(num_units, num_multiprocessors(queries.device)),)](
        describe_blocks(queries.flatten(0, 1), ROWS.value // group, group),
        describe_slots(keys),
        describe_slots(values),
        describe_blocks(out, 1, ROWS.value // group, group),
        length,
        scale,
        num_tokens,
        row_tiles,
        num_units,
        *(stride // head_dim for cache in (keys, values) for stride in cache.stride()[:2]),
        KV_HEADS=kv_heads,
        GROUP=group,
        WINDOW=window,
        UNIT=0.0 if scale is None else float8_unit(head_dim),
        num_warps=4,
        **dependent_launch(queries.device),
    )


@gluon.jit(do_not_specialize=_NUMBERS)
def _attention_window_kernel(
    query_desc: gl.tensor,  # (B·T, N, H)
    key_desc: gl.tensor,  # (slots, H)
    value_desc: gl.tensor,
    out_desc: gl.tensor,  # (B, T, N, H)
    length_ptr: gl.tensor,
    scale_ptr: gl.tensor,  # (B·T,) float32 if UNIT > 0: the output is then float8
    num_tokens: gl.tensor,
    row_tiles: gl.tensor,  # per batch row and key head
    num_units: gl.tensor,  # tiles of rows in all
    key_batch_slots: gl.tensor,
    key_head_slots: gl.tensor,
    value_batch_slots: gl.tensor,
    value_head_slots: gl.tensor,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    WINDOW: gl.constexpr,
    UNIT: gl.constexpr,
    DEPENDENT: gl.constexpr,
) -> None:
    dtype: gl.constexpr = key_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [4, ROWS // GROUP, GROUP, CHUNK], query_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [2 * _BUFFERS, KEYS, CHUNK], key_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2 * _BUFFERS, KEYS, CHUNK], value_desc.layout)
    o_smem = q_smem  # a result that is not float8 goes through the shared memory of the queries
    if UNIT > 0.0:
        o_smem = gl.allocate_shared_memory(out_desc.dtype, [4, 1, ROWS // GROUP, GROUP, CHUNK], out_desc.layout)
    q_full = make_barriers(2, 1)
    q_free = make_barriers(1, 2)
    k_full = make_barriers(2 * _BUFFERS, 1)
    k_free = make_barriers(2 * _BUFFERS, 2)
    v_full = make_barriers(2 * _BUFFERS, 1)
    v_free = make_barriers(2 * _BUFFERS, 2)
    v_clean = make_barriers(1, 2)
    fence_async_shared()
    wait_for_launches_before(DEPENDENT)

    descs = (query_desc, key_desc, value_desc)
    strides = (key_batch_slots, key_head_slots, value_batch_slots, value_head_slots)
    outs = (out_desc, scale_ptr, scale_ptr, num_tokens)
    smem = (q_smem, k_smem, v_smem, o_smem)
    barriers = (q_full, q_free, k_full, k_free, v_full, v_free, v_clean)
    sizes = (length_ptr, num_tokens, row_tiles, num_units)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_copy, (descs, strides, smem, barriers, sizes, KV_HEADS, WINDOW)),
            (_attend, (outs, smem, barriers, sizes, FIRST, KV_HEADS, WINDOW, UNIT)),
            (_attend, (outs, smem, barriers, sizes, SECOND, KV_HEADS, WINDOW, UNIT)),
        ],
        [4, 4],
        [240, 240],  # registers per thread, which leaves 24 for the copying warps
    )


@gluon.jit
def _find(
    unit: gl.tensor, sizes: gl.tuple, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, WINDOW: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Return a unit's tile of rows, batch row, key head, prefix, and its slots [begin, end)."""
    length_ptr, num_tokens, row_tiles, _ = sizes
    row_tile = unit % row_tiles
    batch = unit // row_tiles // KV_HEADS
    prefix_len = gl.load(length_ptr + batch).to(gl.int32)
    begin, end = part_of_keys(
        row_tile, prefix_len, prefix_len * 0, num_tokens, 2 * ROWS, GROUP, KEYS, True, WINDOW, 0, 0, False, 0
    )
    return row_tile, batch, unit // row_tiles % KV_HEADS, prefix_len, begin, end


@gluon.jit
def _copy(
    descs: gl.tuple,
    strides: gl.tuple,
    smem: gl.tuple,
    barriers: gl.tuple,
    sizes: gl.tuple,
    KV_HEADS: gl.constexpr,
    WINDOW: gl.constexpr,
) -> None:
    """Start all copies, in the order in which shared memory becomes free: keys come one tile earlier than values."""
    query_desc, key_desc, value_desc = descs
    key_batch_slots, key_head_slots, value_batch_slots, value_head_slots = strides
    q_smem, k_smem, v_smem, _ = smem
    q_full, q_free, k_full, k_free, v_full, v_free, _ = barriers
    _, num_tokens, _, num_units = sizes
    TOKENS: gl.constexpr = q_smem.shape[1]
    GROUP: gl.constexpr = q_smem.shape[2]
    started = num_tokens * 0  # tiles of keys
    last_values = started - 1  # slot of the newest tile, whose values are not yet copied
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        row_tile, batch, head, _, begin, end = _find(unit, sizes, GROUP, KV_HEADS, WINDOW)
        key_slot = batch * key_batch_slots + head * key_head_slots + begin
        value_slot = batch * value_batch_slots + head * value_head_slots + begin
        _copy_tile(key_desc, key_slot, started, k_full, k_free, k_smem)
        if last_values >= 0:
            _copy_tile(value_desc, last_values, started - 1, v_full, v_free, v_smem)
        turn = unit // gl.num_programs(0)
        mbarrier.wait(q_free.index(0), (turn & 1) ^ 1)
        token = batch * num_tokens + row_tile * (2 * TOKENS)
        for c in gl.static_range(2):
            mbarrier.expect(q_full.index(c), 2 * BYTES)
            for w in gl.static_range(2):
                at_query = [token + w * TOKENS, head * GROUP, c * CHUNK]
                async_load(query_desc, at_query, q_full.index(c), q_smem.index(w * 2 + c))
        num_tiles = gl.cdiv(end - begin, KEYS)
        for j in range(1, num_tiles):
            _copy_tile(key_desc, key_slot + j * KEYS, started + j, k_full, k_free, k_smem)
            _copy_tile(value_desc, value_slot + (j - 1) * KEYS, started + j - 1, v_full, v_free, v_smem)
        started += num_tiles
        last_values = value_slot + (num_tiles - 1) * KEYS
    _copy_tile(value_desc, last_values, started - 1, v_full, v_free, v_smem)


@gluon.jit
def _copy_tile(
    desc: gl.tensor, slot: gl.tensor, number: gl.tensor, full: gl.tensor, free: gl.tensor, smem: gl.tensor
) -> None:
    """Start the copy of a tile of keys or values, as soon as its shared memory is free."""
    for c in gl.static_range(2):
        at = number % _BUFFERS * 2 + c
        mbarrier.wait(free.index(at), (number // _BUFFERS & 1) ^ 1)
        copy_chunk(desc, slot, c * CHUNK, full, smem, at)


@gluon.jit
def _attend(
    outs: gl.tuple,
    smem: gl.tuple,
    barriers: gl.tuple,
    sizes: gl.tuple,
    WG: gl.constexpr,
    KV_HEADS: gl.constexpr,
    WINDOW: gl.constexpr,
    UNIT: gl.constexpr,
) -> None:
    """Compute 64 rows of every tile of rows, as one of the two consumers."""
    out_desc = outs[0]
    q_smem, _, v_smem, o_smem = smem
    q_full, q_free, _, k_free, v_full, v_free, v_clean = barriers
    _, num_tokens, _, num_units = sizes
    GROUP: gl.constexpr = q_smem.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)  # an operand in registers
    SCORE_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    MODE: gl.constexpr = (True, WINDOW, 0, 0)
    dtype: gl.constexpr = q_smem.dtype
    finished = num_tokens * 0  # tiles of keys
    num_cleaned = finished + 2  # not 0 at first: of two variables that are equal before a loop, Triton 3.6 loses one
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        turn = unit // gl.num_programs(0)
        row_tile, batch, head, prefix_len, begin, end = _find(unit, sizes, GROUP, KV_HEADS, WINDOW)
        num_tiles = gl.cdiv(end - begin, KEYS)
        clear_begin, clear_end = clear_slots(row_tile, prefix_len, num_tokens, end, 2 * ROWS, GROUP, True, WINDOW, 0, 0)
        span = (prefix_len, num_tokens, begin, end, num_tiles, clear_begin, clear_end)
        row = (row_tile * 2 + WG) * ROWS + gl.arange(0, ROWS, SCORE_ROW)
        token = row // GROUP  # packed: token-major, then the GROUP heads that share this key head
        top = gl.full((ROWS,), float("-inf"), gl.float32, SCORE_ROW)
        total = gl.zeros((ROWS,), gl.float32, SCORE_ROW)
        acc0 = gl.zeros((ROWS, CHUNK), gl.float32, SUMS)
        acc1 = gl.zeros((ROWS, CHUNK), gl.float32, SUMS)

        for c in gl.static_range(2):
            mbarrier.wait(q_full.index(c), turn & 1)
        s = _scores(smem, barriers, finished, WG)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_free.index(finished % _BUFFERS * 2 + 1))
        weight, decay, top, total = add_softmax(mask_scores(s, 0, token, span, MODE), top, total)
        p = gl.convert_layout(weight.to(dtype), WEIGHTS)
        for j in range(1, num_tiles):
            number = finished + j
            s = _scores(smem, barriers, number, WG)
            at = (number - 1) % _BUFFERS * 2
            phase = (number - 1) // _BUFFERS & 1
            mbarrier.wait(v_full.index(at), phase)
            acc0 = warpgroup_mma(p, v_smem.index(at), acc0, is_async=True)
            mbarrier.wait(v_full.index(at + 1), phase)
            acc1 = warpgroup_mma(p, v_smem.index(at + 1), acc1, is_async=True)
            s = warpgroup_mma_wait(2, deps=(s,))
            mbarrier.arrive(k_free.index(number % _BUFFERS * 2 + 1))
            weight, decay, top, total = add_softmax(mask_scores(s, j, token, span, MODE), top, total)
            next_p = gl.convert_layout(weight.to(dtype), WEIGHTS)
            # This barrier is always complete. The wait only adds a branch to the machine code, as in `hopper`.
            mbarrier.wait(q_full.index(0), turn & 1)
            acc0, acc1, p, next_p = warpgroup_mma_wait(0, deps=(acc0, acc1, p, next_p))
            mbarrier.arrive(v_free.index(at))
            mbarrier.arrive(v_free.index(at + 1))
            factor = gl.expand_dims(gl.convert_layout(decay, SUM_ROW), 1)
            acc0 = acc0 * factor
            acc1 = acc1 * factor
            p = next_p
        if UNIT > 0.0:
            mbarrier.arrive(q_free.index(0))

        last = finished + num_tiles - 1
        at = last % _BUFFERS * 2
        mbarrier.wait(v_full.index(at), last // _BUFFERS & 1)
        mbarrier.wait(v_full.index(at + 1), last // _BUFFERS & 1)
        if begin + num_tiles * KEYS > prefix_len + num_tokens:
            # Slots beyond the last token may be NaN, and 0 · NaN is NaN. Each warpgroup sets one chunk to zero there
            # and waits for the other, so that neither reads a chunk during the write.
            B: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
            slot = begin + (num_tiles - 1) * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, B))
            values = v_smem.index(at + WG).load(B)
            live = gl.expand_dims(slot < prefix_len + num_tokens, 1)
            v_smem.index(at + WG).store(gl.where(live, values, gl.zeros_like(values)))
            fence_async_shared()
            mbarrier.arrive(v_clean.index(0))
            mbarrier.wait(v_clean.index(0), num_cleaned & 1)
            num_cleaned += 1
        acc0 = warpgroup_mma(p, v_smem.index(at), acc0, is_async=True)
        acc1 = warpgroup_mma(p, v_smem.index(at + 1), acc1, is_async=True)
        acc0, acc1, p = warpgroup_mma_wait(0, deps=(acc0, acc1, p))
        mbarrier.arrive(v_free.index(at))
        mbarrier.arrive(v_free.index(at + 1))
        finished += num_tiles

        scale = gl.expand_dims(gl.convert_layout(1.0 / total, SUM_ROW), 1)
        acc0 = (acc0 * scale).to(dtype)
        acc1 = (acc1 * scale).to(dtype)
        o0_smem = o_smem.index(WG * 2)
        o1_smem = o_smem.index(WG * 2 + 1)
        if UNIT > 0.0:
            tma.store_wait(0)  # of the previous tile of rows
            thread_barrier()
            acc0 = (acc0.to(gl.float32) * (1.0 / UNIT)).to(out_desc.dtype)
            acc1 = (acc1.to(gl.float32) * (1.0 / UNIT)).to(out_desc.dtype)
            if head == 0:
                store_unit(outs, (row, token, num_tokens, 0, batch, head), GROUP, UNIT)
        o0_smem.reshape((ROWS, CHUNK)).store(acc0)
        o1_smem.reshape((ROWS, CHUNK)).store(acc1)
        fence_async_shared()
        SHAPE: gl.constexpr = (1, ROWS // GROUP, GROUP, CHUNK)
        at_token = (row_tile * 2 + WG) * (ROWS // GROUP)
        async_store(out_desc, [batch, at_token, head * GROUP, 0], o0_smem.reshape(SHAPE))
        async_store(out_desc, [batch, at_token, head * GROUP, CHUNK], o1_smem.reshape(SHAPE))
        if UNIT == 0.0:
            tma.store_wait(0)
            thread_barrier()
            mbarrier.arrive(q_free.index(0))
    tma.store_wait(0)


@gluon.jit
def _scores(smem: gl.tuple, barriers: gl.tuple, number: gl.tensor, WG: gl.constexpr) -> gl.tensor:
    """Start q kᵀ of a tile of keys. Its first chunk is marked free as soon as it has been read."""
    q_smem, k_smem, _, _ = smem
    _, _, k_full, k_free, _, _, _ = barriers
    s = gl.zeros((ROWS, KEYS), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
    zero = number >> 28  # unknown to the compiler, which otherwise keeps every matrix descriptor on the stack
    for c in gl.static_range(2):
        at = number % _BUFFERS * 2 + c
        mbarrier.wait(k_full.index(at), number // _BUFFERS & 1)
        q = q_smem.index(WG * 2 + c + zero).reshape((ROWS, CHUNK))
        s = warpgroup_mma(q, k_smem.index(at + zero).permute((1, 0)), s, use_acc=c > 0, is_async=True)
        if c > 0:
            s = warpgroup_mma_wait(1, deps=(s,))
            mbarrier.arrive(k_free.index(at - 1))
    return s
