"""Attention of new tokens over a cached prefix and themselves, split over keys; the twin is `reference.attention`.

Online softmax (FlashAttention, arXiv:2205.14135), the query heads that share a key head packed as rows of one tile, and
the keys cut into equal parts so that one small canvas fills the GPU (Flash-Decoding; `attention_parts`). Two kernels do
it: the Triton kernel here, everywhere, and on Hopper one that specialises its warps (`attention_hopper`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.ops.attention.parts import choose_num_splits, combine_parts, part_of_keys, seen_slots

# Gluon, in which the Hopper kernel is written, changes with every version of Triton: it is used where it has been run.
# The interpreter does not know it.
if triton.__version__.startswith("3.6.") and not triton.knobs.runtime.interpret:
    from dgemma_kernels.ops.attention import hopper as attention_hopper
else:
    attention_hopper = None  # type: ignore[assignment]


class AttentionTile(NamedTuple):
    """The shape of one program: `rows` queries by `keys` keys, `value_dim` value columns (0: all of them).

    `tma` loads keys and values through tensor descriptors, which on Hopper keeps their pointers out of the registers.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    tma: bool = False
    value_dim: int = 0


def default_tile(num_rows: int, head_dim: int, *, hopper: bool) -> AttentionTile:
    """The tile for `num_rows` packed query rows of one key head (tokens × the heads that share it).

    Example: `default_tile(512, 256, hopper=True)` is the canvas tile of a sliding layer.
    """
    if not hopper:  # fits the 99 KiB of shared memory that a block gets on consumer GPUs
        return AttentionTile(16 if num_rows <= 16 else 32, 16, 4, 2)
    if num_rows <= 16:
        return AttentionTile(16, 32, 4, 3)
    if head_dim > 256:
        return AttentionTile(128, 32, 8, 2, tma=True, value_dim=256)
    return AttentionTile(128, 64, 8, 2, tma=True)


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    canvas_len: int = 0,
    keep: int = 0,
    tile: AttentionTile | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """T query tokens a row attend to the row's prefix and to themselves, with scale 1.

    queries: (B, T, N, H) contiguous. keys, values: (B, K, capacity, H), last two dimensions contiguous; row b holds its
    prefix in slots [0, length[b]) and the T new tokens in the next T, which must fit the capacity. length: (B,)
    integers on the device. Bidirectional by default; `causal` lets query i see slots up to its own, and `window` only
    the last `window` of those. Behind causal tokens may follow a canvas: the last `canvas_len` tokens see all of
    themselves and everything in front, or in a windowed layer the last `keep` of that. Returns (B, T, N, H). `tile` and
    `num_splits` are tuning choices: they change rounding; a `tile` is one of the Triton kernel.

    Example: `attention(queries, cache.keys, cache.values, cache.length)`.
    """
    _check(queries, keys, values, length, causal, window, canvas_len, keep)
    batch, num_tokens, num_heads, head_dim = queries.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    num_rows = num_tokens * num_heads // kv_heads
    hopper = tile is None and uses_hopper_kernel(queries, keys, values)
    tile = tile or default_tile(num_rows, head_dim, hopper=_is_hopper(queries.device))
    if num_splits is None:
        rows, slots, columns = attention_hopper.TILE if hopper else (tile.rows, tile.keys, tile.value_dim or head_dim)
        programs = triton.cdiv(num_rows, rows) * (head_dim // columns) * batch * kv_heads
        num_splits = choose_num_splits(programs, _num_multiprocessors(queries.device), triton.cdiv(capacity, slots))

    out = torch.empty_like(queries)
    if num_splits == 1:
        partial, log_weight = out.unsqueeze(0), out  # the one part is the output, and its weight never written
    else:
        # In the output's own dtype: half the traffic, and each rounds once more by what the output rounds anyway.
        partial = torch.empty((num_splits, *queries.shape), dtype=queries.dtype, device=queries.device)
        log_weight = torch.empty((num_splits, *queries.shape[:3]), dtype=torch.float32, device=queries.device)
    arguments = (queries, keys, values, length, partial, log_weight, causal, window or 0, canvas_len, keep)
    if hopper:
        attention_hopper.attend(*arguments)
    else:
        _attend(*arguments, tile)
    if num_splits > 1:
        combine_parts(partial, log_weight, out)
    return out


def uses_hopper_kernel(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `attention` without a `tile` runs the Hopper kernel, for arguments that it accepts.

    Few rows, such as a single token's, are better off with the Triton kernel's small tile.

    Example: `uses_hopper_kernel(queries, cache.keys, cache.values)`.
    """
    _, num_tokens, num_heads, head_dim = queries.shape
    group = num_heads // keys.shape[1]
    return (
        attention_hopper is not None
        and _is_hopper(queries.device)
        and queries.dtype in (torch.bfloat16, torch.float16)
        and head_dim in (256, 512)
        and num_tokens * group > 16
        and 64 % group == 0
        and all(stride % head_dim == 0 for cache in (keys, values) for stride in cache.stride()[:2])
        and all(tensor.data_ptr() % 16 == 0 for tensor in (queries, keys, values))  # as descriptors ask
    )


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    partial: Tensor,
    log_weight: Tensor,
    causal: bool,
    window: int,
    canvas_len: int,
    keep: int,
    tile: AttentionTile,
) -> None:
    batch, num_tokens, num_heads, head_dim = queries.shape
    kv_heads, num_splits, value_dim = keys.shape[1], partial.shape[0], tile.value_dim or head_dim
    group = num_heads // kv_heads
    row_tiles = triton.cdiv(num_tokens * group, tile.rows)
    if tile.tma:
        triton.set_allocator(_allocate)  # where the descriptors are built
    _attention_kernel[(row_tiles * (head_dim // value_dim), num_splits, batch * kv_heads)](
        queries,
        keys,
        values,
        length,
        partial,
        log_weight,
        num_tokens,
        num_tokens * batch * num_heads,
        *keys.stride()[:2],
        *values.stride()[:2],
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        ROWS=tile.rows,
        KEYS=tile.keys,
        CAUSAL=causal,
        WINDOW=window,
        CANVAS=canvas_len,
        KEEP=keep,
        SPLIT=num_splits > 1,
        TMA=tile.tma,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit
def _attention_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    length_ptr: tl.tensor,
    partial_ptr: tl.tensor,  # (splits, B, T, N, H)
    log_weight_ptr: tl.tensor,  # (splits, B, T, N) float32, base 2, if SPLIT
    num_tokens: tl.tensor,
    num_query_heads: tl.tensor,  # B·T·N
    key_batch_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_batch_stride: tl.tensor,
    value_head_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CANVAS: tl.constexpr,
    KEEP: tl.constexpr,
    SPLIT: tl.constexpr,
    TMA: tl.constexpr,
) -> None:
    VALUE_PARTS: tl.constexpr = HEAD_DIM // VALUE_DIM
    row_tile = tl.program_id(0) // VALUE_PARTS
    value_part = tl.program_id(0) % VALUE_PARTS
    batch = (tl.program_id(2) // KV_HEADS).to(tl.int64)
    head = (tl.program_id(2) % KV_HEADS).to(tl.int64)
    prefix_len = tl.load(length_ptr + batch).to(tl.int32)

    row = row_tile * ROWS + tl.arange(0, ROWS)  # packed: token-major, then the GROUP heads that share this key head
    token = row // GROUP
    row_valid = token < num_tokens
    query_head = (batch * num_tokens + token) * (KV_HEADS * GROUP) + head * GROUP + row % GROUP  # into (B, T, N)

    begin, end = part_of_keys(row_tile, prefix_len, num_tokens, ROWS, GROUP, KEYS, CAUSAL, WINDOW, CANVAS, KEEP, SPLIT)
    column = tl.arange(0, HEAD_DIM)
    value_column = value_part * VALUE_DIM + tl.arange(0, VALUE_DIM)
    query = tl.load(query_ptr + query_head[:, None] * HEAD_DIM + column[None, :], mask=row_valid[:, None], other=0.0)
    key_ptr += batch * key_batch_stride + head * key_head_stride
    value_ptr += batch * value_batch_stride + head * value_head_stride

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUE_DIM), tl.float32)
    if TMA:  # reads beyond `end` give zeros
        key_tiles = tl.make_tensor_descriptor(key_ptr, [end, HEAD_DIM], [HEAD_DIM, 1], [KEYS, HEAD_DIM])
        value_tiles = tl.make_tensor_descriptor(value_ptr, [end, HEAD_DIM], [HEAD_DIM, 1], [KEYS, VALUE_DIM])
    for start in range(begin, end, KEYS):
        slot = start + tl.arange(0, KEYS)
        slot_valid = slot < end
        offset = slot.to(tl.int64) * HEAD_DIM
        if TMA:
            key = key_tiles.load([start, 0]).T  # (H, KEYS)
        else:
            key = tl.load(key_ptr + offset[None, :] + column[:, None], mask=slot_valid[None, :], other=0.0)
        score = tl.dot(query, key, input_precision="ieee")
        if CAUSAL:
            first_seen, last_seen = seen_slots(token, num_tokens, WINDOW, CANVAS, KEEP)
            seen = slot[None, :] <= prefix_len + last_seen[:, None]
            if WINDOW > 0:
                seen = seen & (slot[None, :] >= prefix_len + first_seen[:, None])
            score = tl.where(seen & slot_valid[None, :], score, float("-inf"))
        else:
            score = tl.where(slot_valid[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * 1.4426950408889634)  # base 2
        if CAUSAL:
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet
        else:
            shift = new_top
        weight = tl.exp2(score * 1.4426950408889634 - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weight, 1)
        acc = acc * decay[:, None]
        if TMA:
            value = value_tiles.load([start, value_part * VALUE_DIM])  # (KEYS, VALUE_DIM)
        else:
            value = tl.load(value_ptr + offset[:, None] + value_column[None, :], mask=slot_valid[:, None], other=0.0)
        acc = tl.dot(weight.to(value.dtype), value, acc, input_precision="ieee")
        top = new_top

    # A part without a visible key has weight zero; its values are neither written nor read.
    seen_any = total > 0.0
    total = tl.where(seen_any, total, 1.0)
    acc = acc / total[:, None]
    query_head += tl.program_id(1).to(tl.int64) * num_query_heads
    if SPLIT and value_part == 0:
        log_weight = tl.where(seen_any, top + tl.log2(total), float("-inf"))
        tl.store(log_weight_ptr + query_head, log_weight, mask=row_valid)
    target = partial_ptr + query_head[:, None] * HEAD_DIM + value_column[None, :]
    tl.store(target, acc.to(partial_ptr.dtype.element_ty), mask=(row_valid & seen_any)[:, None])


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _num_multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4  # the interpreter: enough to exercise the split path


def _check(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    causal: bool,
    window: int | None,
    canvas_len: int,
    keep: int,
) -> None:
    if queries.dim() != 4 or not queries.is_contiguous():
        raise ValueError(
            f"attention queries must be contiguous (B, T, N, H), got shape {tuple(queries.shape)} with strides "
            f"{queries.stride()}. Call .contiguous()."
        )
    batch, num_tokens, num_heads, head_dim = queries.shape
    if keys.dim() != 4 or keys.shape != values.shape or keys.shape[0] != batch or keys.shape[3] != head_dim:
        raise ValueError(
            f"attention keys and values must both be (B, K, capacity, H) with the queries' B and H, got "
            f"{tuple(keys.shape)} and {tuple(values.shape)} for queries {tuple(queries.shape)}."
        )
    if keys.stride()[2:] != (head_dim, 1) or values.stride()[2:] != (head_dim, 1):
        raise ValueError(
            "attention keys and values must be contiguous in their last two dimensions. Call .contiguous()."
        )
    if num_heads % keys.shape[1] or head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(
            f"attention needs query heads divisible by key heads and a head_dim that is a power of two >= 16, got "
            f"{num_heads} query heads, {keys.shape[1]} key heads, head_dim {head_dim}."
        )
    if queries.dtype not in (torch.bfloat16, torch.float16, torch.float32) or {keys.dtype, values.dtype} != {
        queries.dtype
    }:
        raise ValueError(
            f"attention queries, keys and values must share one dtype of bfloat16, float16, float32, got "
            f"{queries.dtype}, {keys.dtype}, {values.dtype}."
        )
    if length.shape != (batch,) or length.dtype not in (torch.int32, torch.int64) or length.device != queries.device:
        raise ValueError(
            f"attention length must be (B,) int32 or int64 on the queries' device, got {tuple(length.shape)} "
            f"{length.dtype} on {length.device}."
        )
    if num_tokens < 1 or num_tokens > keys.shape[2]:
        raise ValueError(
            f"attention must have 1 to capacity new tokens, got {num_tokens} for capacity {keys.shape[2]}. "
            "Grow the buffers."
        )
    if window is not None and (not causal or window < 1):
        raise ValueError(
            f"attention window must be >= 1 and comes with causal=True, got {window} with causal={causal}."
        )
    if not 0 <= canvas_len <= num_tokens or (canvas_len and not causal):
        raise ValueError(
            f"attention canvas_len must be within the {num_tokens} tokens and comes with causal=True, got {canvas_len} "
            f"with causal={causal}."
        )
    if window is not None and not 0 <= keep <= window:
        raise ValueError(f"attention keep must be within the window of {window}, got {keep}.")
