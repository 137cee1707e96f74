"""Norms and rotations of heads in training, with their gradient, in one pass each. Reference: `reference.py`.

Values round where the published model rounds them: after a norm, after each of the two products of a rotation, and
after their sum. The gradient is computed in float32 and rounded once. It adds the gradients of two parts of a sequence,
text and canvases, as it reads them.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_ELEMENTS = 2048  # values per program


class HeadInputs(NamedTuple):
    """Heads before their norms, and what norms and rotates them.

    raw: (M, (N + 2K)·H) contiguous, the heads of q, then k, then v; or (M, (N + K)·H) if v is the norm of the raw k.
    query_weight, key_weight: (H,). cos, sin: (M, H), with equal halves.
    """

    raw: Any
    query_weight: Any
    key_weight: Any
    cos: Any
    sin: Any


def norm_heads(inputs: HeadInputs, *, num_heads: int, kv_heads: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Norm queries, keys and values per head and rotate the first two: (M, N, H), (M, K, H), (M, K, H).

    Example: `norm_heads(HeadInputs(x @ w.T, wq, wk, cos, sin), num_heads=16, kv_heads=8, eps=1e-6)`.
    """
    raw, sizes = inputs.raw, _sizes(inputs, num_heads, kv_heads)
    outs = [raw.new_empty(raw.shape[0], heads, 2 * sizes["HALF"]) for heads in (num_heads, kv_heads, kv_heads)]
    _norm_heads_kernel[_grid(raw, sizes)](inputs, *outs, eps, **sizes, num_warps=_warps(sizes))
    return outs[0], outs[1], outs[2]


def norm_heads_gradient(
    inputs: HeadInputs, firsts: Sequence[Tensor], seconds: Sequence[Tensor], *, eps: float
) -> Tensor:
    """Return the gradient of `inputs.raw` (B · L, …), for B sequences of L tokens.

    firsts: gradients of queries, keys and values at the first T tokens of each sequence, (B, T, heads, H). seconds: the
    same for the last T tokens. T <= L may differ between the six tensors. Where both have a token, they are added.

    Example: `norm_heads_gradient(inputs, (dq, dk, dv), (dq_text, dk_text, dv_text), eps=1e-6)`.
    """
    raw, (batch, _, num_heads, _), kv_heads = inputs.raw, firsts[0].shape, firsts[1].shape[2]
    sizes = _sizes(inputs, num_heads, kv_heads)
    length, pairs = raw.shape[0] // batch, list(zip(firsts, seconds, strict=True))
    assert all(part.stride(-1) == 1 and part.dtype == raw.dtype for pair in pairs for part in pair)
    out = torch.empty_like(raw)
    parts = [
        ((first, *first.stride()[:3], first.shape[1]), (second, *second.stride()[:3], length - second.shape[1]))
        for first, second in pairs
    ]
    _norm_heads_gradient_kernel[_grid(raw, sizes)](inputs, *parts, out, length, eps, **sizes, num_warps=_warps(sizes))
    return out


def _sizes(inputs: HeadInputs, num_heads: int, kv_heads: int) -> dict[str, int | bool]:
    raw, head_dim = inputs.raw, inputs.cos.shape[1]
    assert all(x.is_contiguous() for x in inputs)
    widths = {(num_heads + parts * kv_heads) * head_dim: parts == 2 for parts in (1, 2)}
    assert raw.shape[1] in widths
    assert head_dim & (head_dim - 1) == 0
    assert inputs.cos.shape == (raw.shape[0], head_dim)
    heads = math.gcd(num_heads, kv_heads)  # a tile has heads of only one of q, k, v
    heads = min(heads & -heads, max(1, _TILE_ELEMENTS // head_dim))
    return {
        "NUM_HEADS": num_heads,
        "KV_HEADS": kv_heads,
        "HALF": head_dim // 2,
        "HEADS": heads,
        "HAS_VALUE": widths[raw.shape[1]],
    }


def _grid(raw: Tensor, sizes: dict[str, int | bool]) -> tuple[int, int]:
    return raw.shape[0], raw.shape[1] // (2 * sizes["HALF"] * sizes["HEADS"])


def _warps(sizes: dict[str, int | bool]) -> int:
    return max(1, sizes["HEADS"] * sizes["HALF"] // 512)


@triton.jit
def _norm_heads_kernel(
    inputs: HeadInputs,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_VALUE: tl.constexpr,
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    pair = tl.arange(0, HALF)
    place = tl.arange(0, HEADS)[:, None] * (2 * HALF) + pair[None, :]
    width: tl.constexpr = (NUM_HEADS + KV_HEADS * (2 if HAS_VALUE else 1)) * 2 * HALF
    at = inputs.raw + token * width + head * (2 * HALF) + place
    # All loads come before the first reduction: a later load would wait again.
    first, second = tl.load(at).to(tl.float32), tl.load(at + HALF).to(tl.float32)
    weight, other, cosine, sine = _load_tables(inputs, token, head < NUM_HEADS, HALF)
    inverse = _inverse_rms(first, second, eps, HALF)
    first, second = first * inverse, second * inverse
    dtype: tl.constexpr = inputs.raw.dtype.element_ty
    key_head = head - NUM_HEADS
    if head < NUM_HEADS + KV_HEADS:
        left = (first * weight).to(dtype).to(tl.float32)
        right = (second * other).to(dtype).to(tl.float32)
        left_out = (left * cosine).to(dtype).to(tl.float32) - (right * sine).to(dtype).to(tl.float32)
        right_out = (right * cosine).to(dtype).to(tl.float32) + (left * sine).to(dtype).to(tl.float32)
        if head < NUM_HEADS:
            out = queries + (token * NUM_HEADS + head) * (2 * HALF) + place
        else:
            out = keys + (token * KV_HEADS + key_head) * (2 * HALF) + place
        tl.store(out, left_out.to(dtype))
        tl.store(out + HALF, right_out.to(dtype))
    value_head = key_head - KV_HEADS if HAS_VALUE else key_head
    if value_head >= 0:
        out = values + (token * KV_HEADS + value_head) * (2 * HALF) + place
        tl.store(out, first.to(dtype))
        tl.store(out + HALF, second.to(dtype))


@triton.jit
def _load_tables(
    inputs: HeadInputs, token: tl.tensor, is_query: tl.tensor, HALF: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return both halves of the norm's weights, and the cosines and sines of a token, (1, HALF) each."""
    pair = tl.arange(0, HALF)
    if is_query:
        norm = inputs.query_weight + pair
    else:
        norm = inputs.key_weight + pair
    table = token * (2 * HALF) + pair
    weight, other = tl.load(norm).to(tl.float32)[None, :], tl.load(norm + HALF).to(tl.float32)[None, :]
    cosine, sine = tl.load(inputs.cos + table), tl.load(inputs.sin + table)
    return weight, other, cosine.to(tl.float32)[None, :], sine.to(tl.float32)[None, :]


@triton.jit
def _inverse_rms(first: tl.tensor, second: tl.tensor, eps: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    """Return 1 / RMS of each head from its halves (heads, HALF): (heads, 1)."""
    return tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)[:, None]


@triton.jit
def _norm_heads_gradient_kernel(
    inputs: HeadInputs,
    of_queries: tl.tuple,
    of_keys: tl.tuple,
    of_values: tl.tuple,
    out: tl.tensor,
    length: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_VALUE: tl.constexpr,
) -> None:
    """of_queries, of_keys, of_values: of each, the first and the second part, as for `_load_both`."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    row, place = token // length, token % length
    pair, heads = tl.arange(0, HALF), tl.arange(0, HEADS)
    width: tl.constexpr = (NUM_HEADS + KV_HEADS * (2 if HAS_VALUE else 1)) * 2 * HALF
    own = token * width + head * (2 * HALF) + heads[:, None] * (2 * HALF) + pair[None, :]
    key_head, is_rotated = head - NUM_HEADS, head < NUM_HEADS + KV_HEADS
    # All loads come before the first reduction: a later load would wait again.
    first, second = tl.load(inputs.raw + own).to(tl.float32), tl.load(inputs.raw + own + HALF).to(tl.float32)
    if head < NUM_HEADS:
        left, right = _load_both(of_queries, row, place, head, HEADS, HALF)
    elif is_rotated:
        left, right = _load_both(of_keys, row, place, key_head, HEADS, HALF)
    else:
        left, right = _load_both(of_values, row, place, key_head - KV_HEADS, HEADS, HALF)
    weight, other, cosine, sine = _load_tables(inputs, token, head < NUM_HEADS, HALF)
    if not HAS_VALUE:
        is_key = (head >= NUM_HEADS) & is_rotated
        left_value, right_value = left, right
        if is_key:
            left_value, right_value = _load_both(of_values, row, place, key_head, HEADS, HALF)

    inverse = _inverse_rms(first, second, eps, HALF)
    first, second = first * inverse, second * inverse
    if is_rotated:
        left, right = (left * cosine + right * sine) * weight, (right * cosine - left * sine) * other
    left, right = _grad_of_norm(left, right, first, second, inverse, HALF)
    if not HAS_VALUE:  # noqa: SIM102 (Triton compiles only one branch of this condition)
        if is_key:
            left_value, right_value = _grad_of_norm(left_value, right_value, first, second, inverse, HALF)
            left, right = left + left_value, right + right_value
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + own, left.to(dtype))
    tl.store(out + own + HALF, right.to(dtype))


@triton.jit
def _load_both(
    parts: tl.tuple,
    row: tl.tensor,
    place: tl.tensor,
    head: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return both halves of the heads of the token at `place` in a row, added over the parts that have the token.

    A part is a pointer, its strides by row, token and head, and where the first part ends or the second one starts.
    """
    heads, pair = head.to(tl.int64) + tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    places = place + 0 * (heads + pair)
    one, two = parts[0], parts[1]
    at = one[0] + row * one[1] + place * one[2] + heads * one[3] + pair
    is_there = places < one[4]
    left = tl.load(at, is_there, 0.0).to(tl.float32)
    right = tl.load(at + HALF, is_there, 0.0).to(tl.float32)
    at = two[0] + row * two[1] + (place - two[4]) * two[2] + heads * two[3] + pair
    is_there = places >= two[4]
    left += tl.load(at, is_there, 0.0).to(tl.float32)
    right += tl.load(at + HALF, is_there, 0.0).to(tl.float32)
    return left, right


@triton.jit
def _grad_of_norm(
    left: tl.tensor, right: tl.tensor, first: tl.tensor, second: tl.tensor, inverse: tl.tensor, HALF: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the gradient of raw halves, from that of the normed halves. first, second: the normed halves."""
    mean = (tl.sum(left * first + right * second, 1) / (2 * HALF))[:, None]
    return inverse * (left - first * mean), inverse * (right - second * mean)
