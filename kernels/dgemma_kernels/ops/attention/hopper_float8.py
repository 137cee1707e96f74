"""Causal attention on Hopper for heads of 512, with both products in float8 (e4m3).

A program computes 64 packed query rows with two warpgroups. Each warpgroup computes the scores of every second tile of
128 keys. Both warpgroups multiply all attention weights, each by its own half of the value columns. Values are stored
transposed, because the tensor cores read both operands of a float8 product along the dimension that they sum over.

In float8 products, tensor cores add in about 14 bits, so no sum there spans more than one tile. The weights of a tile
are relative to the maximum of that tile, so that a large weight elsewhere does not round them to zero. The sums over
tiles are in float32, relative to the maximum of the newest tile. `_SPAN` limits how far this maximum may lie below the
largest so far.

Barriers: a part of a tile is `full` when its copy is complete, and `free` when its last reader is done. The weights of
a tile are `ready` when both warpgroups may read them, and `read` when the warpgroup that did not compute them is done
with them.
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

from dgemma_kernels.ops.attention.hopper_common import CHUNK, ROWS, describe_blocks
from dgemma_kernels.ops.hopper import async_load, async_store, make_barriers

KEYS = gl.constexpr(128)

_BYTES = gl.constexpr(128 * 128)  # per copy of keys or values
_K_BUFFERS = gl.constexpr(4)
_V_BUFFERS = gl.constexpr(3)  # per warpgroup
_GAIN = gl.constexpr(8.0)  # in bits: weights are at most 2**8, and those below 2**-10 are zero
# The sums are relative to the maximum of the newest tile. It may be at most this many bits below the largest maximum so
# far, because sums could overflow otherwise. A tile with a lower maximum is added as if its maximum were at this limit.
# So its weights are too large, but even 2**18 such weights change the result by only 2**-22.
_SPAN = gl.constexpr(40.0)


def attend(
    queries: Tensor, query_scale: Tensor, keys: Tensor, values: Tensor, length: Tensor, out: Tensor, unit: float
) -> None:
    """Write causal attention to `out` (B, T, N, 512).

    queries: (B, T, N, 512) in float8, with one scale per token and head, query_scale (B, T, N).
    keys: (B, K, capacity, 512), and values: (B, K, capacity / 128, 512, 128), both in units of `unit` and contiguous.
    The capacity is a multiple of 256. Slots from length + T to the next multiple of 256 must be finite.
    A float8 `out` is also in units of `unit`.

    Example: `attend(queries, scale, keys, values, length, out, 1 / 16)`.
    """
    batch, num_tokens, num_heads, head_dim = queries.shape
    kv_heads, group = keys.shape[1], num_heads // keys.shape[1]
    _attention_hopper_float8_kernel[(triton.cdiv(num_tokens * group, ROWS.value), batch * kv_heads)](
        describe_blocks(queries.flatten(0, 1), ROWS.value // group, group),
        describe_blocks(keys.view(-1, head_dim), KEYS.value),
        describe_blocks(values.view(-1, KEYS.value), CHUNK.value),
        describe_blocks(out, 1, ROWS.value // group, group, columns=128 // out.element_size()),
        length,
        query_scale,
        num_tokens,
        keys.shape[2],
        KV_HEADS=kv_heads,
        GROUP=group,
        UNIT=unit,
        num_warps=4,
    )


@gluon.jit(do_not_specialize=["num_tokens", "num_slots"])
def _attention_hopper_float8_kernel(
    query_desc: gl.tensor,  # (B·T, N, H)
    key_desc: gl.tensor,  # (slots, H)
    value_desc: gl.tensor,  # (slots / 128 · H, 128)
    out_desc: gl.tensor,  # (B, T, N, H)
    length_ptr: gl.tensor,
    query_scale_ptr: gl.tensor,  # (B, T, N) float32
    num_tokens: gl.tensor,
    num_slots: gl.tensor,  # per batch row and key head
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    UNIT: gl.constexpr,
) -> None:
    dtype: gl.constexpr = query_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [4, ROWS // GROUP, GROUP, CHUNK], query_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [_K_BUFFERS, KEYS, CHUNK], key_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2 * _V_BUFFERS, CHUNK, KEYS], value_desc.layout)
    p_smem = gl.allocate_shared_memory(dtype, [2, ROWS, KEYS], key_desc.layout)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    peak_smem = gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT)
    mass_smem = gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT)
    q_full = make_barriers(1, 1)
    k_full = make_barriers(2 * _K_BUFFERS, 1)  # each warpgroup waits for its own, because it sees every second tile
    k_free = make_barriers(_K_BUFFERS, 1)
    v_full = make_barriers(2 * _V_BUFFERS, 1)
    v_free = make_barriers(2 * _V_BUFFERS, 1)
    ready = make_barriers(2, 1)
    read = make_barriers(2, 1)
    fence_async_shared()

    row_tile, batch, _ = _place(KV_HEADS)
    prefix_len = gl.load(length_ptr + batch).to(gl.int32)
    last_token = gl.minimum((row_tile * ROWS + ROWS - 1) // GROUP, num_tokens - 1)
    # Tiles come in pairs. The second tile of the last pair may be beyond the last visible key; then it is masked.
    num_pairs = gl.cdiv(prefix_len + last_token + 1, 2 * KEYS)

    descs = (query_desc, key_desc, value_desc)
    smem = (q_smem, k_smem, v_smem, p_smem, peak_smem, mass_smem)
    barriers = (q_full, k_full, k_free, v_full, v_free, ready, read)
    span = (prefix_len, num_tokens, num_slots, num_pairs)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_copy, (descs, smem, barriers, span, KV_HEADS)),
            (_attend, (out_desc, query_scale_ptr, smem, barriers, span, FIRST, KV_HEADS, UNIT)),
            (_attend, (out_desc, query_scale_ptr, smem, barriers, span, SECOND, KV_HEADS, UNIT)),
        ],
        [4, 4],
        [232, 232],  # registers per thread, which leaves 40 for the copying warps; 224 and 240 spill more often
    )


@gluon.jit
def _place(KV_HEADS: gl.constexpr) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Return this program's tile of rows, batch row and key head. Tiles with the most keys come first."""
    row_tile = gl.num_programs(0) - 1 - gl.program_id(0)
    return row_tile, gl.program_id(1) // KV_HEADS, gl.program_id(1) % KV_HEADS


@gluon.jit
def _copy(descs: gl.tuple, smem: gl.tuple, barriers: gl.tuple, span: gl.tuple, KV_HEADS: gl.constexpr) -> None:
    """Start all copies, in the order in which shared memory becomes free."""
    query_desc = descs[0]
    q_smem, q_full = smem[0], barriers[0]
    _, num_tokens, num_slots, num_pairs = span
    TOKENS: gl.constexpr = q_smem.shape[1]
    GROUP: gl.constexpr = q_smem.shape[2]
    row_tile, batch, head = _place(KV_HEADS)
    mbarrier.expect(q_full.index(0), 2 * _BYTES)
    for c in gl.static_range(4):
        at_query = [batch * num_tokens + row_tile * TOKENS, head * GROUP, c * CHUNK]
        async_load(query_desc, at_query, q_full.index(0), q_smem.index(c))
    slot = (batch * KV_HEADS + head) * num_slots
    zero = num_pairs * 0
    _copy_keys(descs, smem, barriers, slot, 0)
    _copy_values(descs, smem, barriers, slot, zero, 0, 0)
    for i in range(num_pairs):
        _copy_keys(descs, smem, barriers, slot + (2 * i + 1) * KEYS, 1)
        _copy_values(descs, smem, barriers, slot, 4 * i + 1, 1, 0)  # after the keys: this copy waits for a product
        for n in gl.static_range(3):
            _copy_values(descs, smem, barriers, slot, 4 * i + n, n % 2, 1)
        if i + 1 < num_pairs:
            _copy_keys(descs, smem, barriers, slot + (2 * i + 2) * KEYS, 0)
        _copy_values(descs, smem, barriers, slot, 4 * i + 3, 1, 1)
        for n in gl.static_range(2, 5):
            if 4 * i + n < 4 * num_pairs:
                _copy_values(descs, smem, barriers, slot, 4 * i + n, n % 2, 0)


@gluon.jit
def _copy_keys(descs: gl.tuple, smem: gl.tuple, barriers: gl.tuple, slot: gl.tensor, WG: gl.constexpr) -> None:
    """Start the copies of a tile of keys for one warpgroup."""
    key_desc, k_smem, k_full, k_free = descs[1], smem[1], barriers[1], barriers[2]
    for c in gl.static_range(4):
        full = k_full.index(WG * _K_BUFFERS + c)
        mbarrier.wait(k_free.index(c), WG ^ 1)
        mbarrier.expect(full, _BYTES)
        async_load(key_desc, [slot, c * CHUNK], full, k_smem.index(c))


@gluon.jit
def _copy_values(
    descs: gl.tuple,
    smem: gl.tuple,
    barriers: gl.tuple,
    slot: gl.tensor,
    n: gl.tensor,
    PART: gl.constexpr,
    WG: gl.constexpr,
) -> None:
    """Start the copy of block n of a warpgroup's values.

    It belongs to tile n // 2, and has half of the warpgroup's columns: the first if PART is 0, the second if it is 1.
    """
    value_desc, v_smem, v_full, v_free = descs[2], smem[2], barriers[3], barriers[4]
    row = (slot // KEYS + n // 2) * (4 * CHUNK) + (2 * WG + PART) * CHUNK
    at = WG * _V_BUFFERS + n % _V_BUFFERS
    mbarrier.wait(v_free.index(at), (n // _V_BUFFERS & 1) ^ 1)
    mbarrier.expect(v_full.index(at), _BYTES)
    async_load(value_desc, [row, 0], v_full.index(at), v_smem.index(at))


@gluon.jit
def _attend(
    out_desc: gl.tensor,
    query_scale_ptr: gl.tensor,
    smem: gl.tuple,
    barriers: gl.tuple,
    span: gl.tuple,
    WG: gl.constexpr,
    KV_HEADS: gl.constexpr,
    UNIT: gl.constexpr,
) -> None:
    """Compute 64 rows by 256 value columns, and the scores of every second tile, as one of the two consumers."""
    q_smem, k_smem, _, _, _, _ = smem
    q_full = barriers[0]
    prefix_len, num_tokens, _, num_pairs = span
    GROUP: gl.constexpr = q_smem.shape[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 32])
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)

    row_tile, batch, head = _place(KV_HEADS)
    row = row_tile * ROWS + gl.arange(0, ROWS, SUM_ROW)
    token = row // GROUP  # packed: token-major, then the GROUP heads that share this key head
    query_head = (batch * num_tokens + token) * (KV_HEADS * GROUP) + head * GROUP + row % GROUP  # into (B, T, N)
    scale = gl.load(query_scale_ptr + query_head, mask=token < num_tokens, other=1.0)
    factor = scale * (UNIT * 1.4426950408889634)
    clear_end = prefix_len + row_tile * ROWS // GROUP + 1  # all rows see the slots before it
    rows = (factor, prefix_len + token, clear_end)
    top = gl.full((ROWS,), -1e30, gl.float32, SUM_ROW)  # base 2, as all scores below
    unit = gl.full((ROWS,), -1e30, gl.float32, SUM_ROW)  # the sums are relative to it
    total = gl.zeros((ROWS,), gl.float32, SUM_ROW)
    acc0 = gl.zeros((ROWS, CHUNK), gl.float32, SUMS)
    acc1 = gl.zeros((ROWS, CHUNK), gl.float32, SUMS)

    mbarrier.wait(q_full.index(0), 0)
    if WG == 0:
        _weigh(rows, smem, barriers, num_pairs * 0, WG)
        for i in range(num_pairs):
            acc0, acc1, top, unit, total = _add(acc0, acc1, top, unit, total, smem, barriers, i, 0, WG)
            if i + 1 < num_pairs:
                _weigh(rows, smem, barriers, i + 1, WG)
            acc0, acc1, top, unit, total = _add(acc0, acc1, top, unit, total, smem, barriers, i, 1, WG)
    else:
        for i in range(num_pairs):
            _weigh(rows, smem, barriers, i, WG)
            acc0, acc1, top, unit, total = _add(acc0, acc1, top, unit, total, smem, barriers, i, 0, WG)
            acc0, acc1, top, unit, total = _add(acc0, acc1, top, unit, total, smem, barriers, i, 1, WG)

    inverse = gl.expand_dims(UNIT / total, 1)
    # The output goes through the shared memory of the queries, which both warpgroups have read. The copy engine skips
    # rows beyond the last token.
    _store(out_desc, acc0 * inverse, q_smem, k_smem, 0, WG, KV_HEADS, UNIT)
    _store(out_desc, acc1 * inverse, q_smem, k_smem, 1, WG, KV_HEADS, UNIT)


@gluon.jit
def _store(
    out_desc: gl.tensor,
    out: gl.tensor,
    q_smem: gl.tensor,
    k_smem: gl.tensor,
    PART: gl.constexpr,
    WG: gl.constexpr,
    KV_HEADS: gl.constexpr,
    UNIT: gl.constexpr,
) -> None:
    """Store 128 columns of the output through the queries' shared memory.

    A quarter of this memory holds 128 bytes of each row.
    """
    row_tile, batch, head = _place(KV_HEADS)
    GROUP: gl.constexpr = q_smem.shape[2]
    dtype: gl.constexpr = out_desc.dtype
    WIDTH: gl.constexpr = out_desc.block_shape[3]
    SHAPE: gl.constexpr = (1, ROWS // GROUP, GROUP, WIDTH)
    column = (2 * WG + PART) * CHUNK
    at_token = row_tile * (ROWS // GROUP)
    if WIDTH == CHUNK:
        flat = q_smem._reinterpret(dtype, [4, ROWS, CHUNK], k_smem.layout)
        flat.index(2 * WG + PART).store((out * (1.0 / UNIT)).to(dtype))
        fence_async_shared()
        async_store(out_desc, [batch, at_token, head * GROUP, column], flat.index(2 * WG + PART).reshape(SHAPE))
    else:
        WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        flat = q_smem._reinterpret(dtype, [2, ROWS, CHUNK], WIDE)
        parts = q_smem._reinterpret(dtype, [4, ROWS, WIDTH], WIDE)
        flat.index(WG).store(out.to(dtype))
        fence_async_shared()
        for half in gl.static_range(2):
            at = [batch, at_token, head * GROUP, column + half * WIDTH]
            async_store(out_desc, at, parts.index(2 * WG + half).reshape(SHAPE))
    tma.store_wait(0)


@gluon.jit
def _weigh(rows: gl.tuple, smem: gl.tuple, barriers: gl.tuple, i: gl.tensor, WG: gl.constexpr) -> None:
    """Store the weights of the warpgroup's tile of pair i, and per row their maximum and sum."""
    q_smem, k_smem, _, p_smem, peak_smem, mass_smem = smem
    _, k_full, k_free, _, _, ready, read = barriers
    factor, last_seen, clear_end = rows
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    queries = q_smem._reinterpret(q_smem.dtype, [4, ROWS, CHUNK], k_smem.layout)
    j = 2 * i + WG
    s = gl.zeros((ROWS, KEYS), gl.float32, SCORES)
    zero = i >> 28  # 0; a compiler that knows this keeps every matrix descriptor on the stack
    for c in gl.static_range(4):
        mbarrier.wait(k_full.index(WG * _K_BUFFERS + c), i & 1)
        key = k_smem.index(c + zero).permute((1, 0))
        s = warpgroup_mma(queries.index(c + zero), key, s, use_acc=c > 0, is_async=True)
        if c > 0:
            s = warpgroup_mma_wait(1, deps=(s,))
            mbarrier.arrive(k_free.index(c - 1))
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_free.index(3))

    if (j + 1) * KEYS > clear_end:  # true for few tiles
        slot = j * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
        s = gl.where(gl.expand_dims(slot, 0) <= gl.expand_dims(last_seen, 1), s, float("-inf"))
    peak = gl.max(s, 1) * factor
    shift = gl.where(peak == float("-inf"), 0.0, peak) - _GAIN  # a row may see no key of this tile
    weight = gl.exp2(s * gl.expand_dims(factor, 1) - gl.expand_dims(shift, 1))
    mbarrier.wait(read.index(WG), (i & 1) ^ 1)
    p_smem.index(WG).store(weight.to(p_smem.dtype))
    peak_smem.index(WG).store(peak)
    mass_smem.index(WG).store(gl.sum(weight, 1))
    fence_async_shared()
    mbarrier.arrive(ready.index(WG))


@gluon.jit
def _add(
    acc0: gl.tensor,
    acc1: gl.tensor,
    top: gl.tensor,
    unit: gl.tensor,
    total: gl.tensor,
    smem: gl.tuple,
    barriers: gl.tuple,
    i: gl.tensor,
    OWNER: gl.constexpr,
    WG: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Add the products of the weights that warpgroup OWNER computed for pair i.

    Returns the two halves of the sums, the largest maximum, the maximum that the sums are relative to, and the sum of
    weights.
    """
    _, _, v_smem, p_smem, peak_smem, mass_smem = smem
    _, _, _, v_full, v_free, ready, read = barriers
    ROW: gl.constexpr = top.type.layout
    j = 2 * i + OWNER
    mbarrier.wait(ready.index(OWNER), i & 1)
    peak = peak_smem.index(OWNER).load(ROW)
    mass = mass_smem.index(OWNER).load(ROW)
    top = gl.maximum(top, peak)
    new_unit = gl.maximum(peak, top - _SPAN)
    decay = gl.exp2(unit - new_unit)
    total = total * decay + mass
    decay = gl.expand_dims(decay, 1)
    first = WG * _V_BUFFERS + 2 * j % _V_BUFFERS
    second = WG * _V_BUFFERS + (2 * j + 1) % _V_BUFFERS
    mbarrier.wait(v_full.index(first), 2 * j // _V_BUFFERS & 1)
    acc0 = _add_product(acc0, decay, p_smem.index(OWNER), v_smem.index(first), v_free.index(first))
    mbarrier.wait(v_full.index(second), (2 * j + 1) // _V_BUFFERS & 1)
    acc1 = _add_product(acc1, decay, p_smem.index(OWNER), v_smem.index(second), v_free.index(second))
    if OWNER != WG:
        mbarrier.arrive(read.index(OWNER))
    return acc0, acc1, top, new_unit, total


@gluon.jit
def _add_product(acc: gl.tensor, decay: gl.tensor, weights: gl.tensor, values: gl.tensor, free: gl.tensor) -> gl.tensor:
    """Return acc · decay + weights · values, and mark the values as free."""
    SUMS: gl.constexpr = acc.type.layout
    zeros = gl.zeros((ROWS, CHUNK), gl.float32, SUMS)
    product = warpgroup_mma(weights, values.permute((1, 0)), zeros, use_acc=False, is_async=True)
    product = warpgroup_mma_wait(0, deps=(product,))
    mbarrier.arrive(free)
    # No product runs here. Without this wait, the compiler computes the sum later, after the next product, and spills.
    return warpgroup_mma_wait(0, deps=(acc * decay + product,))
