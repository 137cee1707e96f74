"""Causal attention of long chunks with both products in float8, and the rounding of its keys and values.

Keys and values of the whole prefix are rounded anew in every call, to buffers that live as long as the call. So the
cache keeps its dtype, and no copy of it has to be kept up to date. For a chunk of 8,192 tokens, rounding takes 1 to 2 %
of the time of the attention. `prepare_qkv` rounds the queries. Kernel: `hopper_float8`. Reference: `reference.py`.
"""

import math
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.formats.float8 import Quantized
from dgemma_kernels.ops.attention.kernel import check_arguments, hopper_obstacle
from dgemma_kernels.ops.attention.parts import KeyMask, float8_unit
from dgemma_kernels.ops.configs import gluon_obstacle

_BLOCK = 128  # slots and columns per program


def attention_float8(
    queries: Quantized, keys: Tensor, values: Tensor, length: Tensor, *, float8: bool = False, key_factor: float = 1.0
) -> Tensor | Quantized:
    """Attend causally with the operands of both products in float8. Arguments and result are those of `attention`, but
    queries are already rounded, with one scale per token and head.

    It runs where `float8_obstacle` returns None. Values must have a root mean square of at most 1
    per head, and keys one of at most `key_factor`, a power of two. Rounded copies of them take 2·H bytes per key head
    and slot while it runs.

    Example: `attention_float8(quantize(queries), cache.keys, cache.values, cache.length)`.
    """
    assert (obstacle := float8_obstacle(queries, keys, values)) is None, obstacle
    check_arguments(queries, keys, values, length, KeyMask(causal=True))
    batch, num_tokens, num_heads, head_dim = queries.shape
    unit = float8_unit(head_dim)
    out = torch.empty_like(queries.values, dtype=None if float8 else queries.dtype)
    _hopper_float8().attend(
        queries.values,
        queries.scale if key_factor == 1 else queries.scale * key_factor,
        *round_cache(keys, values, length, num_tokens, key_factor),
        length,
        out,
        unit,
    )
    if not float8:
        return out
    scale = torch.full((batch * num_tokens,), unit, device=out.device)
    return Quantized(values=out.view(batch * num_tokens, num_heads * head_dim), scale=scale, dtype=queries.dtype)


def float8_factor(key_norm: Tensor) -> float:
    """Return `key_factor` for keys that are normed and then multiplied by `key_norm` (H,).

    It is the least power of two, at least 1, by which such keys can be divided to fit into float8.

    Example: `float8_factor(torch.full((512,), 3.0))` is 4.0. These keys are at most 67.9, and float8 in units of
    `float8_unit` reaches 28.
    """
    largest = key_norm.abs().max().item() * key_norm.shape[0] ** 0.5
    limit = torch.finfo(torch.float8_e4m3fn).max * float8_unit(key_norm.shape[0])
    return 2.0 ** max(math.ceil(math.log2(largest / limit)), 0) if largest else 1.0


def float8_obstacle(queries: Tensor | Quantized, keys: Tensor, values: Tensor) -> str | None:
    """Return a requirement of `attention_float8` that these arguments do not meet, None if it can run.

    Example: `float8_obstacle(queries, keys, values)` is "a head_dim of 512, got 256" in a sliding layer.
    """
    if queries.shape[3] != 512:
        return f"a head_dim of 512, got {queries.shape[3]}"
    return gluon_obstacle() or hopper_obstacle(queries, keys, values)


def _hopper_float8() -> ModuleType:
    """Import the kernel at its first use, because other versions of Triton may lack its Gluon functions."""
    from dgemma_kernels.ops.attention import hopper_float8

    return hopper_float8


def round_cache(
    keys: Tensor, values: Tensor, length: Tensor, num_tokens: int, key_factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Round slots [0, length + num_tokens) of keys and values (B, K, capacity, H) to float8, in units of `float8_unit`.

    The unit of keys is `key_factor` times as large.

    Returns keys (B, K, S, H) and values (B, K, S / 128, H, 128), where S is the capacity, rounded up to a multiple of
    256. Slots from length + num_tokens to the next multiple of 256 become zero. Later slots are not written.
    """
    batch, kv_heads, capacity, head_dim = keys.shape
    num_slots = triton.cdiv(capacity, 2 * _BLOCK) * 2 * _BLOCK
    narrow_keys = torch.empty(batch, kv_heads, num_slots, head_dim, dtype=torch.float8_e4m3fn, device=keys.device)
    narrow_values = narrow_keys.new_empty(batch, kv_heads, num_slots // _BLOCK, head_dim, _BLOCK)
    _round_cache_kernel[(num_slots // _BLOCK, head_dim // _BLOCK, batch * kv_heads)](
        keys,
        values,
        narrow_keys,
        narrow_values,
        length,
        num_tokens,
        *keys.stride()[:2],
        *values.stride()[:2],
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK=_BLOCK,
        INVERSE=1.0 / float8_unit(head_dim),
        KEY_INVERSE=1.0 / (float8_unit(head_dim) * key_factor),
        num_warps=8,
    )
    return narrow_keys, narrow_values


@triton.jit(do_not_specialize=["num_tokens"])
def _round_cache_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    narrow_key_ptr: tl.tensor,  # (B, K, S, H)
    narrow_value_ptr: tl.tensor,  # (B, K, S / BLOCK, H, BLOCK)
    length_ptr: tl.tensor,
    num_tokens: tl.tensor,
    key_batch_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_batch_stride: tl.tensor,
    value_head_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    INVERSE: tl.constexpr,
    KEY_INVERSE: tl.constexpr,
) -> None:
    batch = (tl.program_id(2) // KV_HEADS).to(tl.int64)
    head = (tl.program_id(2) % KV_HEADS).to(tl.int64)
    end = tl.load(length_ptr + batch).to(tl.int32) + num_tokens
    if tl.program_id(0) >= tl.cdiv(end, 2 * BLOCK) * 2:
        return
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = slot.to(tl.int64) * HEAD_DIM + column
    inside = slot < end
    keys = tl.load(key_ptr + batch * key_batch_stride + head * key_head_stride + at, mask=inside, other=0.0)
    values = tl.load(value_ptr + batch * value_batch_stride + head * value_head_stride + at, mask=inside, other=0.0)
    narrow = narrow_key_ptr.dtype.element_ty
    first = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * (BLOCK * HEAD_DIM)
    own = tl.arange(0, BLOCK)
    tl.store(narrow_key_ptr + first + own[:, None] * HEAD_DIM + column, (keys.to(tl.float32) * KEY_INVERSE).to(narrow))
    values = tl.trans((values.to(tl.float32) * INVERSE).to(narrow))  # (columns, slots)
    rows = tl.program_id(1) * BLOCK + own[:, None]
    tl.store(narrow_value_ptr + first + rows * BLOCK + own[None, :], values)
