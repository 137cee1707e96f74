"""Attention on Hopper for heads of 512 whose keys equal their values, except in the columns that are rotated.

A program computes 64 packed query rows with two warpgroups. (`hopper` computes 128 rows by half of the value columns,
so it computes every score twice.) Each warpgroup computes the scores of every second tile of keys. Both multiply all
weights, each by its own half of the value columns. While one warpgroup computes a softmax, products of the other run,
as in FlashMLA. The maximum of a row passes from tile to tile, and so from one warpgroup to the other.

A tile of keys is 64 slots: 512 columns of values and the 128 rotated columns of keys. Shared memory fits two tiles, one
per warpgroup. When the scores of a tile are computed, its weights overwrite its rotated columns. Barriers: a part of a
tile is `full` when its copy is complete, and `free` when its last reader is done. The weights of a tile are `ready`
when the other warpgroup may read them.
"""

import triton
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
    NUMBERS,
    ROWS,
    add_softmax,
    clear_slots,
    copy_chunk,
    launch_arguments,
    mask_scores,
    store_log_weight,
    store_unit,
)
from dgemma_kernels.ops.attention.parts import Inputs, KeyMask, Parts, part_of_keys
from dgemma_kernels.ops.hopper import async_load, async_store, make_barriers

TILE = (64, 64, 512)  # of a program: query rows, slots per iteration, value columns
ROTARY_PAIRS = 64  # at most: columns [0, 64) and [256, 320) come from the keys

_HALF = gl.constexpr(256)  # columns
_PAIRS = gl.constexpr(64)


def attend(inputs: Inputs, parts: Parts, mask: KeyMask) -> None:
    """Write attention over each part of the keys, as `hopper.attend` does without a window and without fixed parts.

    Keys must equal values in columns [64, 256) and [320, 512).

    Example: `attend(Inputs(queries, keys, values, length, length), Parts(out[None], out), KeyMask(causal=True))`.
    """
    batch, num_tokens, num_heads, _ = inputs.queries.shape
    kv_heads = inputs.keys.shape[1]
    row_tiles = triton.cdiv(num_tokens * num_heads // kv_heads, TILE[0])
    _attention_hopper_shared_kernel[(row_tiles, parts.partial.shape[0], batch * kv_heads)](
        **launch_arguments(inputs, parts, mask, _PAIRS.value)
    )


@gluon.jit(do_not_specialize=NUMBERS)
def _attention_hopper_shared_kernel(
    query_desc: gl.tensor,  # (B·T, N, H)
    key_desc: gl.tensor,  # (slots, H), in blocks of 64 columns
    value_desc: gl.tensor,  # (slots, H)
    out_desc: gl.tensor,  # (splits, B, T, N, H)
    length_ptr: gl.tensor,
    span_ptr: gl.tensor,  # (B, T, 2) int32 if SPANS
    log_weight_ptr: gl.tensor,  # (splits, B, T, N) float32, base 2, if SPLIT
    scale_ptr: gl.tensor,  # (B·T,) float32 if UNIT > 0: the output is then float8
    num_tokens: gl.tensor,
    num_query_heads: gl.tensor,  # B·T·N
    key_batch_slots: gl.tensor,
    key_head_slots: gl.tensor,
    value_batch_slots: gl.tensor,
    value_head_slots: gl.tensor,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    CANVAS: gl.constexpr,
    SPANS: gl.constexpr,
    SPLIT: gl.constexpr,
    UNIT: gl.constexpr,
    DEPENDENT: gl.constexpr,
) -> None:
    dtype: gl.constexpr = value_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [4, ROWS // GROUP, GROUP, CHUNK], query_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [4, KEYS, _PAIRS], key_desc.layout)  # per tile: two blocks
    v_smem = gl.allocate_shared_memory(dtype, [8, KEYS, CHUNK], value_desc.layout)  # per tile: four chunks
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    top_smem = gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT)
    total_smem = gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT)
    q_full = make_barriers(1, 1)
    k_full = make_barriers(2, 1)
    v_full = make_barriers(8, 1)
    free = make_barriers(4, 1)  # per tile: of the first and the second half of the columns
    ready = make_barriers(2, 1)
    joined = make_barriers(1, 2)
    fence_async_shared()
    wait_for_launches_before(DEPENDENT)

    row_tile, batch, _ = _place(KV_HEADS)
    prefix_len = gl.load(length_ptr + batch).to(gl.int32)
    MASK: gl.constexpr = KeyMask(CAUSAL, 0, CANVAS, 0, SPANS)
    spans = span_ptr + 2 * batch * num_tokens
    begin, end = part_of_keys(
        row_tile, prefix_len, prefix_len * 0, num_tokens, spans, ROWS, GROUP, KEYS, MASK, SPLIT, 0
    )
    # Tiles come in pairs. The second tile of the last pair may be empty; then it is masked.
    num_pairs = gl.maximum(gl.cdiv(end - begin, 2 * KEYS), 1)

    descs = (query_desc, key_desc, value_desc)
    strides = (key_batch_slots, key_head_slots, value_batch_slots, value_head_slots)
    outs = (out_desc, log_weight_ptr, scale_ptr, num_query_heads)
    smem = (q_smem, k_smem, v_smem, top_smem, total_smem)
    barriers = (q_full, k_full, v_full, free, ready, joined)
    clear_begin, clear_end = clear_slots(row_tile, prefix_len, num_tokens, spans, end, ROWS, GROUP, MASK)
    span = (prefix_len, num_tokens, begin, end, num_pairs, clear_begin, clear_end, spans)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_copy, (descs, strides, smem, barriers, span, KV_HEADS)),
            (_attend, (outs, smem, barriers, span, FIRST, KV_HEADS, SPLIT, UNIT, MASK)),
            (_attend, (outs, smem, barriers, span, SECOND, KV_HEADS, SPLIT, UNIT, MASK)),
        ],
        [4, 4],
        [240, 240],  # registers per thread, which leaves 24 for the copying warps
    )


@gluon.jit
def _place(KV_HEADS: gl.constexpr) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Return this program's tile of rows, batch row and key head. Causal tiles with the most keys come first."""
    row_tile = gl.num_programs(0) - 1 - gl.program_id(0)
    return row_tile, gl.program_id(2) // KV_HEADS, gl.program_id(2) % KV_HEADS


@gluon.jit
def _copy(
    descs: gl.tuple, strides: gl.tuple, smem: gl.tuple, barriers: gl.tuple, span: gl.tuple, KV_HEADS: gl.constexpr
) -> None:
    """Start all copies, in the order in which shared memory becomes free."""
    query_desc, key_desc, value_desc = descs
    key_batch_slots, key_head_slots, value_batch_slots, value_head_slots = strides
    q_smem, k_smem, v_smem, _, _ = smem
    q_full, k_full, v_full, free, _, _ = barriers
    _, num_tokens, begin, _, num_pairs, _, _, _ = span
    TOKENS: gl.constexpr = q_smem.shape[1]
    GROUP: gl.constexpr = q_smem.shape[2]
    row_tile, batch, head = _place(KV_HEADS)
    key_slot = batch * key_batch_slots + head * key_head_slots + begin
    value_slot = batch * value_batch_slots + head * value_head_slots + begin
    mbarrier.expect(q_full.index(0), 4 * BYTES)
    for c in gl.static_range(4):
        at_query = [batch * num_tokens + row_tile * TOKENS, head * GROUP, c * CHUNK]
        async_load(query_desc, at_query, q_full.index(0), q_smem.index(c))
    for i in range(num_pairs):
        for w in gl.static_range(2):
            for other in gl.static_range(2):
                half = w ^ other
                mbarrier.wait(free.index(2 * w + half), (i & 1) ^ 1)
                for c in gl.static_range(2):
                    at = 4 * w + 2 * half + c
                    slot = value_slot + (2 * i + w) * KEYS
                    copy_chunk(value_desc, slot, half * _HALF + c * CHUNK, v_full, v_smem, at)
            mbarrier.expect(k_full.index(w), BYTES)
            for half in gl.static_range(2):
                at_key = [key_slot + (2 * i + w) * KEYS, half * _HALF]
                async_load(key_desc, at_key, k_full.index(w), k_smem.index(2 * w + half))


@gluon.jit
def _attend(
    outs: gl.tuple,
    smem: gl.tuple,
    barriers: gl.tuple,
    span: gl.tuple,
    WG: gl.constexpr,
    KV_HEADS: gl.constexpr,
    SPLIT: gl.constexpr,
    UNIT: gl.constexpr,
    MASK: gl.constexpr,
) -> None:
    """Compute 64 rows by 256 value columns, and the scores of every second tile, as one of the two consumers."""
    out_desc = outs[0]
    q_smem, _, v_smem, _, _ = smem
    q_full, _, _, free, _, _ = barriers
    _, num_tokens, _, _, num_pairs, _, _, _ = span
    GROUP: gl.constexpr = q_smem.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    SCORE_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    dtype: gl.constexpr = q_smem.dtype

    row_tile, batch, head = _place(KV_HEADS)
    row = row_tile * ROWS + gl.arange(0, ROWS, SCORE_ROW)
    token = row // GROUP  # packed: token-major, then the GROUP heads that share this key head
    top = gl.full((ROWS,), float("-inf"), gl.float32, SCORE_ROW)
    total = gl.zeros((ROWS,), gl.float32, SCORE_ROW)
    acc = gl.zeros((ROWS, _HALF), gl.float32, SUMS)

    mbarrier.wait(q_full.index(0), 0)
    first = num_pairs * 0
    if WG == 0:  # the first tile has no predecessor
        s = _first_scores(smem, barriers, first, WG)
        s = _last_scores(s, smem, barriers, first, WG)
        s = warpgroup_mma_wait(0, deps=(s,))
        p, decay, top, total = _weights(s, top, total, token, smem, barriers, span, first, WG, MASK)
        acc = _add_own(acc, p, decay, smem, barriers, WG)
        first += 1
    for i in range(first, num_pairs):
        s = _first_scores(smem, barriers, i, WG)
        # Products with the other warpgroup's weights come before the last scores. Copies wait for these products, and
        # the last scores may wait for copies.
        acc, top, total = _add_other(acc, top, total, smem, barriers, i - 1 + WG, WG)
        s = _last_scores(s, smem, barriers, i, WG)
        acc = warpgroup_mma_wait(4, deps=(acc,))
        mbarrier.arrive(free.index(2 - WG))
        s = warpgroup_mma_wait(0, deps=(s,))
        p, decay, top, total = _weights(s, top, total, token, smem, barriers, span, i, WG, MASK)
        acc = _add_own(acc, p, decay, smem, barriers, WG)
    if WG == 0:  # the last tile has no successor
        acc, top, total = _add_other(acc, top, total, smem, barriers, num_pairs - 1, WG)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    total = _join_totals(total, smem, barriers, WG)

    # A part without a visible key has weight zero.
    seen_any = total > 0.0
    total = gl.where(seen_any, total, 1.0)
    split = gl.program_id(1)
    rows = (row, token, num_tokens, split, batch, head)
    if SPLIT and WG == 0:
        store_log_weight(outs, rows, top, total, seen_any, KV_HEADS, GROUP)
    acc = (acc * gl.expand_dims(gl.convert_layout(1.0 / total, SUM_ROW), 1)).to(dtype)
    # The output goes through the shared memory of the queries, which both warpgroups have read. The copy engine skips
    # rows beyond the last token.
    SHAPE: gl.constexpr = (1, 1, ROWS // GROUP, GROUP, CHUNK)
    at_token = row_tile * (ROWS // GROUP)
    if UNIT > 0.0:
        NARROW: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
        out_smem = q_smem._reinterpret(out_desc.dtype, [4, ROWS, _HALF], NARROW)
        chunks = q_smem._reinterpret(out_desc.dtype, [8, ROWS, CHUNK], NARROW)
        out_smem.index(2 * WG).store((acc.to(gl.float32) * (1.0 / UNIT)).to(out_desc.dtype))
        if head == 0 and WG == 0:
            store_unit(outs, rows, GROUP, UNIT)
    else:
        out_smem = q_smem._reinterpret(dtype, [2, ROWS, _HALF], v_smem.layout)
        chunks = q_smem._reinterpret(dtype, [4, ROWS, CHUNK], v_smem.layout)
        out_smem.index(WG).store(acc)
    fence_async_shared()
    STEP: gl.constexpr = 4 if UNIT > 0.0 else 2
    for c in gl.static_range(2):
        at = [split, batch, at_token, head * GROUP, WG * _HALF + c * CHUNK]
        async_store(out_desc, at, chunks.index(STEP * WG + c).reshape(SHAPE))
    tma.store_wait(0)


@gluon.jit
def _first_scores(smem: gl.tuple, barriers: gl.tuple, i: gl.tensor, WG: gl.constexpr) -> gl.tensor:
    """Start q kᵀ of the warpgroup's tile of pair i, with the half of the columns whose memory becomes free first."""
    s = gl.zeros((ROWS, KEYS), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
    return _add_half(s, smem, barriers, i, WG, WG, False)


@gluon.jit
def _last_scores(s: gl.tensor, smem: gl.tuple, barriers: gl.tuple, i: gl.tensor, WG: gl.constexpr) -> gl.tensor:
    """Start the rest of q kᵀ: the other half of the columns, and those that rotate."""
    q_smem, k_smem, v_smem, _, _ = smem
    k_full = barriers[1]
    s = _add_half(s, smem, barriers, i, WG, 1 - WG, True)
    query_pairs = q_smem._reinterpret(q_smem.dtype, [8, ROWS, _PAIRS], v_smem.layout)
    zero = i >> 28
    mbarrier.wait(k_full.index(WG), i & 1)
    for half in gl.static_range(2):
        key = k_smem.index(2 * WG + half + zero).permute((1, 0))
        s = warpgroup_mma(query_pairs.index(4 * half + zero), key, s, is_async=True)
    return s


@gluon.jit
def _add_half(
    s: gl.tensor,
    smem: gl.tuple,
    barriers: gl.tuple,
    i: gl.tensor,
    WG: gl.constexpr,
    HALF: gl.constexpr,
    USE_ACC: gl.constexpr,
) -> gl.tensor:
    """Start q kᵀ of the 192 columns of one half that do not rotate, in products of 64 and 128 columns."""
    q_smem, _, v_smem, _, _ = smem
    v_full = barriers[2]
    dtype: gl.constexpr = q_smem.dtype
    queries = q_smem._reinterpret(dtype, [4, ROWS, CHUNK], v_smem.layout)
    query_pairs = q_smem._reinterpret(dtype, [8, ROWS, _PAIRS], v_smem.layout)
    value_pairs = v_smem._reinterpret(dtype, [16, KEYS, _PAIRS], v_smem.layout)
    zero = i >> 28  # unknown to the compiler, which otherwise keeps every matrix descriptor on the stack
    mbarrier.wait(v_full.index(4 * WG + 2 * HALF), i & 1)
    value = value_pairs.index(8 * WG + 4 * HALF + 1 + zero).permute((1, 0))
    s = warpgroup_mma(query_pairs.index(4 * HALF + 1 + zero), value, s, use_acc=USE_ACC, is_async=True)
    mbarrier.wait(v_full.index(4 * WG + 2 * HALF + 1), i & 1)
    value = v_smem.index(4 * WG + 2 * HALF + 1 + zero).permute((1, 0))
    return warpgroup_mma(queries.index(2 * HALF + 1 + zero), value, s, is_async=True)


@gluon.jit
def _weights(
    s: gl.tensor,
    top: gl.tensor,
    total: gl.tensor,
    token: gl.tensor,
    smem: gl.tuple,
    barriers: gl.tuple,
    span: gl.tuple,
    i: gl.tensor,
    WG: gl.constexpr,
    MASK: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Store the weights and the maximum of pair i for the other warpgroup.

    Return the weights, the decay of earlier sums, the new maximum and the new sum of weights.
    """
    _, k_smem, v_smem, top_smem, _ = smem
    _, _, _, _, ready, _ = barriers
    _, _, begin, end, _, _, _, _ = span
    j = 2 * i + WG
    weight, decay, top, total = add_softmax(mask_scores(s, j, token, span, MASK), top, total)
    if begin + (j + 1) * KEYS > end:
        # Slots beyond the end may be NaN, and 0 · NaN is NaN.
        B: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        live = begin + j * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, B)) < end
        for c in gl.static_range(4):
            values = v_smem.index(4 * WG + c).load(B)
            v_smem.index(4 * WG + c).store(gl.where(gl.expand_dims(live, 1), values, gl.zeros_like(values)))
    weight = weight.to(v_smem.dtype)
    k_smem.index(2 * WG).store(weight)
    top_smem.index(WG).store(top)
    fence_async_shared()
    mbarrier.arrive(ready.index(WG))
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    return gl.convert_layout(weight, gl.DotOperandLayout(0, SUMS, 2)), decay, top, total


@gluon.jit
def _add_own(
    acc: gl.tensor, p: gl.tensor, decay: gl.tensor, smem: gl.tuple, barriers: gl.tuple, WG: gl.constexpr
) -> gl.tensor:
    """Add the products of the warpgroup's own weights, and mark its half of the values as free."""
    v_smem, free = smem[2], barriers[3]
    halves = v_smem._reinterpret(v_smem.dtype, [4, KEYS, _HALF], v_smem.layout)
    acc = acc * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout)), 1)
    acc = warpgroup_mma(p, halves.index(3 * WG), acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    mbarrier.arrive(free.index(3 * WG))
    return acc


@gluon.jit
def _add_other(
    acc: gl.tensor,
    top: gl.tensor,
    total: gl.tensor,
    smem: gl.tuple,
    barriers: gl.tuple,
    i: gl.tensor,
    WG: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Start the products of the other warpgroup's weights of pair i. Return the sums, maximum and sum of weights."""
    _, k_smem, v_smem, top_smem, _ = smem
    _, _, v_full, _, ready, _ = barriers
    OTHER: gl.constexpr = 1 - WG
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    halves = v_smem._reinterpret(v_smem.dtype, [4, KEYS, _HALF], v_smem.layout)
    mbarrier.wait(v_full.index(4 * OTHER + 2 * WG), i & 1)
    mbarrier.wait(v_full.index(4 * OTHER + 2 * WG + 1), i & 1)
    mbarrier.wait(ready.index(OTHER), i & 1)
    new_top = top_smem.index(OTHER).load(top.type.layout)
    decay = gl.exp2(top - gl.where(new_top == float("-inf"), 0.0, new_top))
    acc = acc * gl.expand_dims(gl.convert_layout(decay, SUM_ROW), 1)
    acc = warpgroup_mma(k_smem.index(2 * OTHER), halves.index(2 * OTHER + WG), acc, is_async=True)
    return acc, new_top, total * decay


@gluon.jit
def _join_totals(total: gl.tensor, smem: gl.tuple, barriers: gl.tuple, WG: gl.constexpr) -> gl.tensor:
    """Return the sum of the weights of all tiles: each warpgroup has summed its own, relative to the same maximum."""
    total_smem, joined = smem[4], barriers[5]
    total_smem.index(WG).store(total)
    mbarrier.arrive(joined.index(0))
    mbarrier.wait(joined.index(0), 0)
    return total + total_smem.index(1 - WG).load(total.type.layout)
