"""Attention of a canvas on Hopper, in Gluon: copies, products and softmax of different tiles run at the same time.

A program computes 128 packed query rows by 256 value columns with twelve warps. Four of them copy: their one active
thread starts the copies of keys and values in chunks of 64 slots × 128 columns. Each of two warpgroups has 64 rows. It
computes the softmax of a key tile while its products with the previous tile's values run (FlashAttention-3,
arXiv:2407.08608). `kernel.choose_kernel` selects it; `kernel._attention_kernel` is the same maths in Triton.

Barriers in shared memory order the warps. A chunk of keys or values is `full` when its copy is complete, and `free`
when both warpgroups have read it.
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

TILE = (128, 64, 256)  # of a program: query rows, slots per iteration, value columns


def attend(inputs: Inputs, parts: Parts, mask: KeyMask, part: int) -> None:
    """Write attention over each part of the keys to `parts`. `part` is that of `kernel.attention`, 0 for equal parts.

    `kernel.choose_kernel` must allow this kernel for these arguments.

    Example: `attend(Inputs(queries, keys, values, length, length), Parts(out.unsqueeze(0), out), KeyMask(), 0)`.
    """
    batch, num_tokens, num_heads, head_dim = inputs.queries.shape
    kv_heads = inputs.keys.shape[1]
    row_tiles = triton.cdiv(num_tokens * num_heads // kv_heads, TILE[0])
    _attention_hopper_kernel[(row_tiles * (head_dim // TILE[2]), parts.partial.shape[0], batch * kv_heads)](
        **launch_arguments(inputs, parts, mask),
        position_ptr=inputs.position,
        HEAD_DIM=head_dim,
        BUFFERS=512 // head_dim,  # tiles of keys and of values that fit shared memory
        WINDOW=mask.window,
        KEEP=mask.keep,
        PART=part,
    )


@gluon.jit(do_not_specialize=NUMBERS)
def _attention_hopper_kernel(
    query_desc: gl.tensor,  # (B·T, N, H)
    key_desc: gl.tensor,  # (slots, H)
    value_desc: gl.tensor,
    out_desc: gl.tensor,  # (splits, B, T, N, H)
    length_ptr: gl.tensor,
    span_ptr: gl.tensor,  # (B, T, 2) int32 if SPANS
    position_ptr: gl.tensor,
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
    HEAD_DIM: gl.constexpr,
    BUFFERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    CANVAS: gl.constexpr,
    SPANS: gl.constexpr,
    KEEP: gl.constexpr,
    SPLIT: gl.constexpr,
    PART: gl.constexpr,
    UNIT: gl.constexpr,
    DEPENDENT: gl.constexpr,
) -> None:
    K_CHUNKS: gl.constexpr = HEAD_DIM // CHUNK
    dtype: gl.constexpr = key_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2 * K_CHUNKS, ROWS // GROUP, GROUP, CHUNK], query_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [BUFFERS * K_CHUNKS, KEYS, CHUNK], key_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [BUFFERS * 2, KEYS, CHUNK], value_desc.layout)
    q_full = make_barriers(K_CHUNKS, 1)
    k_full = make_barriers(BUFFERS * K_CHUNKS, 1)
    k_free = make_barriers(BUFFERS * K_CHUNKS, 2)
    v_full = make_barriers(BUFFERS * 2, 1)
    v_free = make_barriers(BUFFERS * 2, 2)
    v_clean = make_barriers(1, 2)
    fence_async_shared()
    wait_for_launches_before(DEPENDENT)

    MASK: gl.constexpr = KeyMask(CAUSAL, WINDOW, CANVAS, KEEP, SPANS)
    row_tile, _, batch, _ = _place(KV_HEADS, K_CHUNKS)
    prefix_len = gl.load(length_ptr + batch).to(gl.int32)
    spans = span_ptr + 2 * batch * num_tokens
    origin = prefix_len * 0
    if PART > 0:
        origin = gl.load(position_ptr + batch).to(gl.int32) - prefix_len
    begin, end = part_of_keys(row_tile, prefix_len, origin, num_tokens, spans, 2 * ROWS, GROUP, KEYS, MASK, SPLIT, PART)
    num_tiles = gl.maximum(gl.cdiv(end - begin, KEYS), 1)  # an empty part loads one tile and masks all of it

    descs = (query_desc, key_desc, value_desc)
    strides = (key_batch_slots, key_head_slots, value_batch_slots, value_head_slots)
    outs = (out_desc, log_weight_ptr, scale_ptr, num_query_heads)
    smem = (q_smem, k_smem, v_smem)
    barriers = (q_full, k_full, k_free, v_full, v_free, v_clean)
    clear_begin, clear_end = clear_slots(row_tile, prefix_len, num_tokens, spans, end, 2 * ROWS, GROUP, MASK)
    span = (prefix_len, num_tokens, begin, end, num_tiles, clear_begin, clear_end, spans)
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
def _place(KV_HEADS: gl.constexpr, K_CHUNKS: gl.constexpr) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Return this program's tile of rows, first value column, batch row and key head."""
    VALUE_PARTS: gl.constexpr = K_CHUNKS // 2
    column = gl.program_id(0) % VALUE_PARTS * (2 * CHUNK)
    return gl.program_id(0) // VALUE_PARTS, column, gl.program_id(2) // KV_HEADS, gl.program_id(2) % KV_HEADS


@gluon.jit
def _copy(
    descs: gl.tuple, strides: gl.tuple, smem: gl.tuple, barriers: gl.tuple, span: gl.tuple, KV_HEADS: gl.constexpr
) -> None:
    """Start all copies, in the order of their use: from tile 1 on, keys come one tile earlier than values."""
    query_desc, key_desc, value_desc = descs
    key_batch_slots, key_head_slots, value_batch_slots, value_head_slots = strides
    q_smem, k_smem, v_smem = smem
    q_full, k_full, k_free, v_full, v_free, _ = barriers
    _, num_tokens, begin, _, num_tiles, _, _, _ = span
    K_CHUNKS: gl.constexpr = q_smem.shape[0] // 2
    BUFFERS: gl.constexpr = v_smem.shape[0] // 2
    TOKENS: gl.constexpr = q_smem.shape[1]
    GROUP: gl.constexpr = q_smem.shape[2]
    row_tile, column, batch, head = _place(KV_HEADS, K_CHUNKS)
    token = batch * num_tokens + row_tile * (2 * TOKENS)
    key_slot = batch * key_batch_slots + head * key_head_slots + begin
    value_slot = batch * value_batch_slots + head * value_head_slots + begin
    for c in gl.static_range(K_CHUNKS):
        mbarrier.expect(q_full.index(c), 2 * BYTES)
        for w in gl.static_range(2):
            at_query = [token + w * TOKENS, head * GROUP, c * CHUNK]
            async_load(query_desc, at_query, q_full.index(c), q_smem.index(w * K_CHUNKS + c))
        copy_chunk(key_desc, key_slot, c * CHUNK, k_full, k_smem, c)
    for c in gl.static_range(2):
        copy_chunk(value_desc, value_slot, column + c * CHUNK, v_full, v_smem, c)
    for j in range(1, num_tiles + 1):
        if j < num_tiles:
            for c in gl.static_range(K_CHUNKS):
                at = j % BUFFERS * K_CHUNKS + c
                mbarrier.wait(k_free.index(at), (j // BUFFERS & 1) ^ 1)
                copy_chunk(key_desc, key_slot + j * KEYS, c * CHUNK, k_full, k_smem, at)
        if j > 1:
            i = j - 1
            for c in gl.static_range(2):
                at = i % BUFFERS * 2 + c
                mbarrier.wait(v_free.index(at), (i // BUFFERS & 1) ^ 1)
                copy_chunk(value_desc, value_slot + i * KEYS, column + c * CHUNK, v_full, v_smem, at)


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
    """Compute 64 rows over all keys of this part, as one of the two consumers."""
    out_desc = outs[0]
    q_smem, _, v_smem = smem
    q_full, _, k_free, v_full, v_free, v_clean = barriers
    _, num_tokens, begin, end, num_tiles, _, _, _ = span
    K_CHUNKS: gl.constexpr = q_smem.shape[0] // 2
    BUFFERS: gl.constexpr = v_smem.shape[0] // 2
    GROUP: gl.constexpr = q_smem.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)  # an operand in registers
    SCORE_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    dtype: gl.constexpr = q_smem.dtype

    row_tile, column, batch, head = _place(KV_HEADS, K_CHUNKS)
    row = (row_tile * 2 + WG) * ROWS + gl.arange(0, ROWS, SCORE_ROW)
    token = row // GROUP  # packed: token-major, then the GROUP heads that share this key head
    top = gl.full((ROWS,), float("-inf"), gl.float32, SCORE_ROW)
    total = gl.zeros((ROWS,), gl.float32, SCORE_ROW)
    acc0 = gl.zeros((ROWS, CHUNK), gl.float32, SUMS)
    acc1 = gl.zeros((ROWS, CHUNK), gl.float32, SUMS)

    s = _scores(smem, barriers, 0, WG, True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_free.index(K_CHUNKS - 1))
    weight, decay, top, total = add_softmax(mask_scores(s, 0, token, span, MASK), top, total)
    p = gl.convert_layout(weight.to(dtype), WEIGHTS)
    for j in range(1, num_tiles):
        s = _scores(smem, barriers, j, WG, False)
        at = (j - 1) % BUFFERS * 2
        phase = (j - 1) // BUFFERS & 1
        mbarrier.wait(v_full.index(at), phase)
        acc0 = warpgroup_mma(p, v_smem.index(at), acc0, is_async=True)
        mbarrier.wait(v_full.index(at + 1), phase)
        acc1 = warpgroup_mma(p, v_smem.index(at + 1), acc1, is_async=True)
        s = warpgroup_mma_wait(2, deps=(s,))
        mbarrier.arrive(k_free.index(j % BUFFERS * K_CHUNKS + K_CHUNKS - 1))
        weight, decay, top, total = add_softmax(mask_scores(s, j, token, span, MASK), top, total)
        next_p = gl.convert_layout(weight.to(dtype), WEIGHTS)
        # This barrier is always complete; only its branch matters. The assembler moves the next wait to right after the
        # previous branch. Without this branch, the wait would come before the softmax.
        mbarrier.wait(q_full.index(0), 0)
        acc0, acc1, p, next_p = warpgroup_mma_wait(0, deps=(acc0, acc1, p, next_p))
        mbarrier.arrive(v_free.index(at))
        mbarrier.arrive(v_free.index(at + 1))
        factor = gl.expand_dims(gl.convert_layout(decay, SUM_ROW), 1)
        acc0 = acc0 * factor
        acc1 = acc1 * factor
        p = next_p

    last = num_tiles - 1
    at = last % BUFFERS * 2
    mbarrier.wait(v_full.index(at), last // BUFFERS & 1)
    mbarrier.wait(v_full.index(at + 1), last // BUFFERS & 1)
    if begin + num_tiles * KEYS > end:
        # Slots beyond the end may be NaN, and 0 · NaN is NaN. Each warpgroup sets one chunk to zero there and waits for
        # the other, so that neither reads a chunk during the write.
        B: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        live = begin + last * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, B)) < end
        values = v_smem.index(at + WG).load(B)
        v_smem.index(at + WG).store(gl.where(gl.expand_dims(live, 1), values, gl.zeros_like(values)))
        fence_async_shared()
        mbarrier.arrive(v_clean.index(0))
        mbarrier.wait(v_clean.index(0), 0)
    acc0 = warpgroup_mma(p, v_smem.index(at), acc0, is_async=True)
    acc1 = warpgroup_mma(p, v_smem.index(at + 1), acc1, is_async=True)
    acc0, acc1, p = warpgroup_mma_wait(0, deps=(acc0, acc1, p))

    # A part without a visible key has weight zero.
    seen_any = total > 0.0
    total = gl.where(seen_any, total, 1.0)
    split = gl.program_id(1)
    rows = (row, token, num_tokens, split, batch, head)
    if SPLIT and column == 0:
        store_log_weight(outs, rows, top, total, seen_any, KV_HEADS, GROUP)
    scale = gl.expand_dims(gl.convert_layout(1.0 / total, SUM_ROW), 1)
    acc0 = (acc0 * scale).to(dtype)
    acc1 = (acc1 * scale).to(dtype)
    # The output goes through the shared memory of this warpgroup's queries. The copy engine skips rows beyond the last
    # token.
    o0_smem = q_smem.index(WG * K_CHUNKS)
    o1_smem = q_smem.index(WG * K_CHUNKS + 1)
    if UNIT > 0.0:
        NARROW: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
        o0_smem = o0_smem._reinterpret(out_desc.dtype, (ROWS, CHUNK), NARROW)
        o1_smem = o1_smem._reinterpret(out_desc.dtype, (ROWS, CHUNK), NARROW)
        o0_smem.store((acc0.to(gl.float32) * (1.0 / UNIT)).to(out_desc.dtype))
        o1_smem.store((acc1.to(gl.float32) * (1.0 / UNIT)).to(out_desc.dtype))
        if head == 0 and column == 0:
            store_unit(outs, rows, GROUP, UNIT)
    else:
        o0_smem.reshape((ROWS, CHUNK)).store(acc0)
        o1_smem.reshape((ROWS, CHUNK)).store(acc1)
    fence_async_shared()
    SHAPE: gl.constexpr = (1, 1, ROWS // GROUP, GROUP, CHUNK)
    at_token = (row_tile * 2 + WG) * (ROWS // GROUP)
    async_store(out_desc, [split, batch, at_token, head * GROUP, column], o0_smem.reshape(SHAPE))
    async_store(out_desc, [split, batch, at_token, head * GROUP, column + CHUNK], o1_smem.reshape(SHAPE))
    tma.store_wait(0)


@gluon.jit
def _scores(smem: gl.tuple, barriers: gl.tuple, j: gl.tensor, WG: gl.constexpr, FIRST: gl.constexpr) -> gl.tensor:
    """Start q kᵀ of tile j. Every chunk of keys but the last is marked free as soon as it has been read."""
    q_smem, k_smem, v_smem = smem
    q_full, k_full, k_free, _, _, _ = barriers
    K_CHUNKS: gl.constexpr = q_smem.shape[0] // 2
    BUFFERS: gl.constexpr = v_smem.shape[0] // 2
    s = gl.zeros((ROWS, KEYS), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
    zero = j >> 28  # unknown to the compiler, which otherwise keeps every matrix descriptor on the stack
    for c in gl.static_range(K_CHUNKS):
        at = j % BUFFERS * K_CHUNKS + c
        if FIRST:
            mbarrier.wait(q_full.index(c), 0)
        mbarrier.wait(k_full.index(at), j // BUFFERS & 1)
        q = q_smem.index(WG * K_CHUNKS + c + zero).reshape((ROWS, CHUNK))
        s = warpgroup_mma(q, k_smem.index(at + zero).permute((1, 0)), s, use_acc=c > 0, is_async=True)
        if c > 0:
            s = warpgroup_mma_wait(1, deps=(s,))
            mbarrier.arrive(k_free.index(at - 1))
    return s
