"""From the fused projection to the inputs of attention in one launch: head norms, rotation, cache write.

Values round to the model's dtype where the published model (transformers' DiffusionGemma) rounds them. This is after a
norm, after each of the two products of a rotation, and after their sum. Cosines and sines are float32, then rounded.
Reference: `reference.py`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.blocks import float8_scale, wait_for_launches_before
from dgemma_kernels.formats.float8 import Quantized
from dgemma_kernels.ops.configs import dependent_launch

_TILE_ELEMENTS = 2048  # values per program


def prepare_qkv(
    projected: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    inv_freq: Tensor,
    start: Tensor,
    length: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    eps: float,
    scales: tuple[Tensor, Tensor] | None = None,
    rotary_pairs: int | None = None,
    float8: bool = False,
) -> Tensor | Quantized:
    """Norm queries, keys and values per head, rotate the first two, write keys and values into the cache.

    projected: (B·T, (N + 2K)·H) contiguous, the heads of q, then k, then v; or (B·T, (N + K)·H) if the layer has no
    v_proj and v is the norm of the raw k. query_weight, key_weight: (H,). inv_freq: (H / 2,) float32, zero for pairs
    without rotation. start: (B,) the position of each row's first new token. length: (B,) the cache slot of that token,
    with length + T <= capacity. keys, values: (B, K, capacity, H), written in place. `scales`, float32, multiply the
    rows (B·T,) and columns of `projected` first. Returns the queries (B, T, N, H). With `float8`, they are rounded,
    with one scale per token and head.

    With `rotary_pairs`, for a layer without v_proj, only the first pairs rotate. In the other columns, key_weight
    multiplies the queries instead of the keys. Products of queries and keys stay the same, and keys equal values
    there, as `attention(..., rotary_pairs=...)` needs.

    Example: `queries = prepare_qkv(x @ w.T, wq, wk, inv_freq, start, length, keys, values, num_heads=16, eps=1e-6)`.
    """
    batch, kv_heads, capacity, head_dim = keys.shape
    has_value = projected.shape[1] == (num_heads + 2 * kv_heads) * head_dim
    num_tokens = projected.shape[0] // batch
    assert has_value or projected.shape[1] == (num_heads + kv_heads) * head_dim
    assert not has_value or rotary_pairs is None
    assert num_tokens <= capacity
    assert projected.is_contiguous()
    assert keys.stride()[2:] == values.stride()[2:] == (head_dim, 1)
    shape, dtype = (batch, num_tokens, num_heads, head_dim), torch.float8_e4m3fn if float8 else projected.dtype
    queries = torch.empty(shape, dtype=dtype, device=projected.device)
    query_scale = torch.empty(shape[:3], dtype=torch.float32, device=projected.device) if float8 else None
    heads = math.gcd(num_heads, kv_heads)  # a tile has heads of only one of q, k, v
    heads = min(heads & -heads, max(1, _TILE_ELEMENTS // head_dim))
    _prepare_qkv_kernel[(projected.shape[0], (num_heads + kv_heads * (2 if has_value else 1)) // heads)](
        projected,
        *(scales or (None, None)),
        query_weight,
        key_weight,
        inv_freq,
        start,
        length,
        queries,
        query_scale,
        keys,
        values,
        num_tokens,
        *keys.stride()[:2],
        *values.stride()[:2],
        eps,
        NUM_HEADS=num_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        HEADS=heads,
        HAS_VALUE=has_value,
        OWN_PAIRS=head_dim // 2 if rotary_pairs is None else rotary_pairs,
        num_warps=max(1, heads * head_dim // (512 if float8 else 1024)),
        **dependent_launch(keys.device),
    )
    return queries if query_scale is None else Quantized(values=queries, scale=query_scale, dtype=projected.dtype)


@triton.jit
def _cos_sin(angle: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return cosine and sine to float32 accuracy for any angle of a position.

    Triton's functions need a stack for large angles. Here the angle is reduced to [-π/4, π/4] in float64, where a few
    terms of each series suffice.
    """
    quarter = tl.floor(angle.to(tl.float64) * 0.6366197723675814 + 0.5)
    x = (angle.to(tl.float64) - quarter * 1.5707963267948966).to(tl.float32)
    y = x * x
    cos = 1.0 + y * (-0.5 + y * (1.0 / 24 + y * (-1.0 / 720 + y * (1.0 / 40320))))
    sin = x + x * y * (-1.0 / 6 + y * (1.0 / 120 + y * (-1.0 / 5040 + y * (1.0 / 362880))))
    turn = quarter.to(tl.int32) & 3
    swap = (turn & 1) == 1
    turned_cos = tl.where(swap, sin, cos)
    turned_sin = tl.where(swap, cos, sin)
    return tl.where((turn == 1) | (turn == 2), -turned_cos, turned_cos), tl.where(turn >= 2, -turned_sin, turned_sin)


@triton.jit
def _prepare_qkv_kernel(
    projected_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    col_scale_ptr: tl.tensor,
    query_weight_ptr: tl.tensor,
    key_weight_ptr: tl.tensor,
    inv_freq_ptr: tl.tensor,
    start_ptr: tl.tensor,
    length_ptr: tl.tensor,
    query_ptr: tl.tensor,
    query_scale_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    num_tokens: tl.tensor,
    key_batch_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_batch_stride: tl.tensor,
    value_head_stride: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    OWN_PAIRS: tl.constexpr,  # from this pair on, keys equal values
    DEPENDENT: tl.constexpr,
) -> None:
    HEAD_DIM: tl.constexpr = 2 * HALF
    COLUMNS: tl.constexpr = (NUM_HEADS + KV_HEADS * (2 if HAS_VALUE else 1)) * HEAD_DIM
    row = tl.program_id(0).to(tl.int64)
    batch = row // num_tokens
    token = row % num_tokens
    first = tl.program_id(1) * HEADS  # of the projection's heads
    head = tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)

    column = (first + head[:, None]) * HEAD_DIM + pair[None, :]
    source = projected_ptr + row * COLUMNS + column
    wait_for_launches_before(DEPENDENT)
    low = tl.load(source).to(tl.float32)  # (HEADS, HALF): dimensions pair and pair + HALF rotate together
    high = tl.load(source + HALF).to(tl.float32)
    # Loaded here too: a load after a reduction would wait for memory again.
    is_query = first < NUM_HEADS
    if is_query:
        weight_ptr = query_weight_ptr
    else:
        weight_ptr = key_weight_ptr
    low_weight = tl.load(weight_ptr + pair)[None, :].to(tl.float32)
    high_weight = tl.load(weight_ptr + HALF + pair)[None, :].to(tl.float32)
    if OWN_PAIRS < HALF:
        own = (pair < OWN_PAIRS)[None, :]
        if is_query:
            low_weight *= tl.where(own, 1.0, tl.load(key_weight_ptr + pair)[None, :].to(tl.float32))
            high_weight *= tl.where(own, 1.0, tl.load(key_weight_ptr + HALF + pair)[None, :].to(tl.float32))
        else:
            low_weight = tl.where(own, low_weight, 1.0)
            high_weight = tl.where(own, high_weight, 1.0)
    if col_scale_ptr is not None:
        row_scale = tl.load(row_scale_ptr + row)
        low *= row_scale * tl.load(col_scale_ptr + column)
        high *= row_scale * tl.load(col_scale_ptr + column + HALF)
    angle = (tl.load(start_ptr + batch) + token).to(tl.float32) * tl.load(inv_freq_ptr + pair)
    slot = (tl.load(length_ptr + batch) + token) * HEAD_DIM
    mean_square = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM
    scale = (1.0 / tl.sqrt(mean_square + eps))[:, None]

    first_value = NUM_HEADS + (KV_HEADS if HAS_VALUE else 0)
    if first >= first_value:  # the heads of v, or without v_proj those of k
        value_head = (first - first_value + head).to(tl.int64)[:, None]
        target = value_ptr + batch * value_batch_stride + value_head * value_head_stride + slot + pair[None, :]
        tl.store(target, low * scale)
        tl.store(target + HALF, high * scale)

    if first < NUM_HEADS + KV_HEADS:
        dtype = projected_ptr.dtype.element_ty
        low = (low * scale * low_weight).to(dtype).to(tl.float32)
        high = (high * scale * high_weight).to(dtype).to(tl.float32)
        cos, sin = _cos_sin(angle)
        cos = cos.to(dtype).to(tl.float32)[None, :]
        sin = sin.to(dtype).to(tl.float32)[None, :]
        turned_low = (low * cos).to(dtype).to(tl.float32) - (high * sin).to(dtype).to(tl.float32)
        turned_high = (high * cos).to(dtype).to(tl.float32) + (low * sin).to(dtype).to(tl.float32)
        if query_scale_ptr is None:
            if is_query:
                target = query_ptr + (row * NUM_HEADS + first + head[:, None]) * HEAD_DIM + pair[None, :]
            else:
                key_head = (first - NUM_HEADS + head).to(tl.int64)[:, None]
                target = key_ptr + batch * key_batch_stride + key_head * key_head_stride + slot + pair[None, :]
            tl.store(target, turned_low)
            tl.store(target + HALF, turned_high)
        elif is_query:
            turned_low = turned_low.to(dtype).to(tl.float32)
            turned_high = turned_high.to(dtype).to(tl.float32)
            query_scale = float8_scale(tl.maximum(tl.abs(turned_low), tl.abs(turned_high)), 1)
            query_head = row * NUM_HEADS + first + head
            tl.store(query_scale_ptr + query_head, query_scale)
            at_query = query_ptr + query_head[:, None] * HEAD_DIM + pair[None, :]
            inverse = (1.0 / query_scale)[:, None]
            tl.store(at_query, (turned_low * inverse).to(query_ptr.dtype.element_ty))
            tl.store(at_query + HALF, (turned_high * inverse).to(query_ptr.dtype.element_ty))
        else:
            key_head = (first - NUM_HEADS + head).to(tl.int64)[:, None]
            at_key = key_ptr + batch * key_batch_stride + key_head * key_head_stride + slot + pair[None, :]
            tl.store(at_key, turned_low)
            tl.store(at_key + HALF, turned_high)
