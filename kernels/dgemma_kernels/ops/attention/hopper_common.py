"""Gluon code that the Hopper kernels of attention use: descriptors, copies, masks, softmax, and scales."""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dgemma_kernels.ops.attention.parts import Inputs, KeyMask, Parts, float8_unit, seen_slots
from dgemma_kernels.ops.configs import dependent_launch
from dgemma_kernels.ops.hopper import async_load

ROWS = gl.constexpr(64)  # per warpgroup
KEYS = gl.constexpr(64)
CHUNK = gl.constexpr(128)  # columns per copy
BYTES = gl.constexpr(2 * 64 * 128)  # per copy of queries, keys or values

# Not specialised: Triton would compile another variant for multiples of 16, which takes seconds.
NUMBERS = [
    "num_tokens", "num_query_heads", "key_batch_slots", "key_head_slots", "value_batch_slots", "value_head_slots"
]  # fmt: skip


def launch_arguments(inputs: Inputs, parts: Parts, mask: KeyMask, key_columns: int = CHUNK.value) -> dict[str, Any]:
    """Return the arguments that `hopper` and `hopper_shared` have in common.

    Tensor descriptors contain the tensors' addresses and are passed by value. So a captured graph is valid only while
    the tensors stay in place.
    """
    queries, keys, values, length, _, spans = inputs
    batch, num_tokens, num_heads, head_dim = queries.shape
    kv_heads, group = keys.shape[1], num_heads // keys.shape[1]
    strides = [stride // head_dim for cache in (keys, values) for stride in cache.stride()[:2]]
    return {
        "query_desc": describe_blocks(queries.flatten(0, 1), ROWS.value // group, group),
        "key_desc": describe_slots(keys, key_columns),
        "value_desc": describe_slots(values),
        "out_desc": describe_blocks(parts.partial, 1, 1, ROWS.value // group, group),
        "length_ptr": length,
        "span_ptr": length if spans is None else spans,
        "log_weight_ptr": parts.log_weight,
        "scale_ptr": parts.log_weight if parts.scale is None else parts.scale,
        **dict(zip(NUMBERS, (num_tokens, batch * num_tokens * num_heads, *strides), strict=True)),
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "CAUSAL": mask.causal,
        "CANVAS": mask.canvas_len,
        "SPANS": mask.has_spans,
        "SPLIT": parts.partial.shape[0] > 1,
        "UNIT": 0.0 if parts.scale is None else float8_unit(head_dim),
        "num_warps": 4,
        **dependent_launch(queries.device),
    }


def describe_slots(cache: Tensor, columns: int = CHUNK.value) -> TensorDescriptor:
    """Describe keys or values (B, K, capacity, H) as slots of H: one index selects batch row, head and slot."""
    batch, heads, capacity, head_dim = cache.shape
    num_slots = ((batch - 1) * cache.stride(0) + (heads - 1) * cache.stride(1)) // head_dim + capacity
    return describe_blocks(cache.as_strided((num_slots, head_dim), (head_dim, 1)), KEYS.value, columns=columns)


def describe_blocks(tensor: Tensor, *block: int, columns: int = CHUNK.value) -> TensorDescriptor:
    """Describe blocks of these sizes along each dimension but the last, where a block has `columns`."""
    bits = 8 * tensor.element_size()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=tensor.dim())
    return TensorDescriptor.from_tensor(tensor, [*block, columns], layout)


@gluon.jit
def copy_chunk(
    desc: gl.tensor, slot: gl.tensor, column: gl.tensor, full: gl.tensor, smem: gl.tensor, at: gl.tensor
) -> None:
    mbarrier.expect(full.index(at), BYTES)
    async_load(desc, [slot, column], full.index(at), smem.index(at))


@gluon.jit
def clear_slots(
    row_tile: gl.tensor,
    prefix_len: gl.tensor,
    num_tokens: gl.tensor,
    spans: gl.tensor,
    end: gl.tensor,
    ROWS: gl.constexpr,
    GROUP: gl.constexpr,
    MASK: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Return bounds of the slots before `end` that all rows of a tile see."""
    clear_begin = end * 0 - 1073741824  # without a window, no slot is too early
    clear_end = end
    if MASK.causal:
        last_token = gl.minimum((row_tile * ROWS + ROWS - 1) // GROUP, num_tokens - 1)
        first_seen, _ = seen_slots(last_token, num_tokens, spans, MASK)
        _, last_seen = seen_slots(row_tile * ROWS // GROUP, num_tokens, spans, MASK)
        clear_end = gl.minimum(end, prefix_len + last_seen + 1)
        if MASK.window > 0:
            clear_begin = prefix_len + first_seen
            if MASK.canvas_len > 0:  # the last token before the canvas may see less than the canvas does
                before = gl.minimum(last_token, num_tokens - MASK.canvas_len - 1)
                clear_begin = gl.maximum(clear_begin, prefix_len + before - MASK.window + 1)
    return clear_begin, clear_end


@gluon.jit
def mask_scores(s: gl.tensor, j: gl.tensor, token: gl.tensor, span: gl.tuple, MASK: gl.constexpr) -> gl.tensor:
    """Return the scores of tile j, -inf where a row does not see the key."""
    prefix_len, num_tokens, begin, end, _, clear_begin, clear_end, spans = span
    at = begin + j * KEYS
    if at < clear_begin or at + KEYS > clear_end:  # true for few tiles; a mask costs a third of a softmax
        slot = at + gl.arange(0, KEYS, gl.SliceLayout(0, s.type.layout))
        slot = gl.expand_dims(slot, 0)
        seen = slot < end
        if MASK.causal:
            first_seen, last_seen = seen_slots(token, num_tokens, spans, MASK)
            seen = seen & (slot <= prefix_len + gl.expand_dims(last_seen, 1))
            if MASK.window > 0:
                seen = seen & (slot >= prefix_len + gl.expand_dims(first_seen, 1))
        s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def add_softmax(s: gl.tensor, top: gl.tensor, total: gl.tensor) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Return the weights of a tile's keys, the decay of earlier sums, the new maximum (base 2) and sum of weights."""
    new_top = gl.maximum(top, gl.max(s, 1) * 1.4426950408889634)
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)  # a row without a visible key so far
    weight = gl.exp2(s * 1.4426950408889634 - gl.expand_dims(shift, 1))
    decay = gl.exp2(top - shift)
    total = total * decay + gl.sum(weight, 1)
    return weight, decay, new_top, total


@gluon.jit
def store_log_weight(
    outs: gl.tuple,
    rows: gl.tuple,
    top: gl.tensor,
    total: gl.tensor,
    seen_any: gl.tensor,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
) -> None:
    """Store the log-weight of each row in this part of the keys, for adding the parts."""
    _, log_weight_ptr, _, num_query_heads = outs
    row, token, num_tokens, split, batch, head = rows
    query_head = (batch * num_tokens + token) * (KV_HEADS * GROUP) + head * GROUP + row % GROUP  # into (B, T, N)
    log_weight = gl.where(seen_any, top + gl.log2(total), float("-inf"))
    target = log_weight_ptr + split.to(gl.int64) * num_query_heads + query_head
    gl.store(target, log_weight, mask=token < num_tokens)


@gluon.jit
def store_unit(outs: gl.tuple, rows: gl.tuple, GROUP: gl.constexpr, UNIT: gl.constexpr) -> None:
    """Store the scale of each token's float8 output."""
    _, _, scale_ptr, _ = outs
    row, token, num_tokens, _, batch, _ = rows
    unit = gl.full((ROWS,), UNIT, gl.float32, row.type.layout)
    own = (row % GROUP == 0) & (token < num_tokens)
    gl.store(scale_ptr + batch * num_tokens + token, unit, mask=own)
