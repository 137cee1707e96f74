"""Attention under any boolean mask, with its gradient, for training. Reference: `reference.py`.

Rows of several documents and canvases have masks of which most is False: a canvas sees its document and itself. Scores
are computed in blocks of 64 queries and 64 keys, and blocks in which nothing is visible are skipped. A block of the
mask is read once per head. Scores are not stored: the gradient computes them again from the log-sum-exp of each query.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.blocks import finish_products

_BLOCK = 64  # queries, and keys
_LARGEST = 64  # head size; the gradient of larger heads would spill registers
_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


class _Inputs(NamedTuple):
    """The arguments of `attend`, and which blocks of the mask have a visible key: (B, T / 64, S / 64) bool."""

    query: Any
    key: Any
    value: Any
    mask: Any
    blocks: Any


class _Strides(NamedTuple):
    """Strides by row, position and head; of the mask by row and query."""

    query: Any
    key: Any
    value: Any
    mask: Any


def fits(queries: Tensor, mask: Tensor) -> bool:
    """Return True for heads and masks that the kernels support.

    Example: `fits(torch.empty(2, 96, 6, 64), torch.ones(2, 1, 96, 160, dtype=torch.bool))`.
    """
    head_dim = queries.shape[-1]
    return 16 <= head_dim <= _LARGEST and head_dim & (head_dim - 1) == 0 and mask.shape[2] == queries.shape[1]


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return softmax(q·k) v: queries (B, T, N, H), keys and values (B, K, S, H), mask (B or 1, 1, T, S) bool.

    Example: `attend(queries, keys, values, mask).sum().backward()`.
    """
    mask = mask[:, 0].expand(queries.shape[0], -1, -1)
    pads = (0, -mask.shape[2] % _BLOCK, 0, -mask.shape[1] % _BLOCK)
    blocks = F.pad(mask, pads).unflatten(2, (-1, _BLOCK)).any(-1).unflatten(1, (-1, _BLOCK)).any(2)
    out, _ = masked_attention(queries, keys, values, mask, blocks)
    return out


@torch.library.custom_op("dgemma::masked_attention", mutates_args=())
def masked_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, blocks: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output (B, T, N, H), and the log2 of each query's sum of exponentials, (B, N, T)."""
    batch, num_queries, num_heads, _ = queries.shape
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    sums = queries.new_empty(batch, num_heads, num_queries, dtype=torch.float32)
    inputs, strides, sizes = _launch(queries, keys, values, mask, blocks)
    _masked_attention_kernel[batch * num_heads, blocks.shape[1]](inputs, strides, out, sums, **sizes)
    return out, sums


@masked_attention.register_fake
def _(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    batch, num_queries, num_heads, _ = queries.shape
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    return out, queries.new_empty(batch, num_heads, num_queries, dtype=torch.float32)


@torch.library.custom_op("dgemma::masked_attention_gradient", mutates_args=())
def masked_attention_gradient(
    grad: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    blocks: Tensor,
    out: Tensor,
    sums: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values from that of the output."""
    grad, (batch, kv_heads) = grad.contiguous(), keys.shape[:2]
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (queries, keys, values)]
    shares = torch.empty_like(sums)  # Σ grad · out of each query
    inputs, strides, sizes = _launch(queries, keys, values, mask, blocks)
    _query_gradient_kernel[batch * queries.shape[2], blocks.shape[1]](
        inputs, strides, grad, out, sums, shares, grads[0], **sizes
    )
    _key_gradient_kernel[batch * kv_heads, blocks.shape[2]](inputs, strides, grad, sums, shares, *grads[1:], **sizes)
    return grads[0], grads[1], grads[2]


@masked_attention_gradient.register_fake
def _(
    grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, blocks: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    of_queries, of_keys, of_values = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (queries, keys, values)
    )
    return of_queries, of_keys, of_values


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *masked_attention_gradient(grad, *ctx.saved_tensors), None, None


masked_attention.register_autograd(_backward, setup_context=_keep)


def _launch(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, blocks: Tensor
) -> tuple[_Inputs, _Strides, dict[str, Any]]:
    """Return the inputs of a kernel, their strides, and its other arguments."""
    queries, keys, values, mask = (x if x.stride(-1) == 1 else x.contiguous() for x in (queries, keys, values, mask))
    (num_queries, num_heads, head_dim), (kv_heads, num_keys) = queries.shape[1:], keys.shape[1:3]
    of_keys, of_values = ((x.stride(0), x.stride(2), x.stride(1)) for x in (keys, values))
    strides = _Strides(queries.stride()[:3], of_keys, of_values, mask.stride()[:2])
    sizes = {"num_queries": num_queries, "num_keys": num_keys, "HEADS": num_heads, "GROUP": num_heads // kv_heads}
    return (
        _Inputs(queries, keys, values, mask, blocks.contiguous()),
        strides,
        sizes | {"DIM": head_dim, "BLOCK": _BLOCK},
    )


@triton.jit
def _masked_attention_kernel(
    inputs: _Inputs,
    strides: _Strides,
    out: tl.tensor,
    sums: tl.tensor,
    num_queries: tl.tensor,
    num_keys: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    block, row, head = tl.program_id(1), tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    queries = _load(inputs.query, strides.query, row, block, head, num_queries, DIM, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total, mixed = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK, DIM), tl.float32)
    num_blocks = tl.cdiv(num_keys, BLOCK)
    is_seen = inputs.blocks + (row * tl.num_programs(1) + block) * num_blocks
    for number in range(num_blocks):
        if tl.load(is_seen + number):
            keys = _load(inputs.key, strides.key, row, number, head // GROUP, num_keys, DIM, BLOCK)
            values = _load(inputs.value, strides.value, row, number, head // GROUP, num_keys, DIM, BLOCK)
            visible = _visible(inputs.mask, strides.mask, row, block, number, num_queries, num_keys, BLOCK)
            scores = tl.where(visible, _product(queries, tl.trans(keys)) * _LOG2E, float("-inf"))
            new = tl.maximum(largest, tl.max(scores, 1))
            base = tl.where(new == float("-inf"), 0.0, new)  # of queries that have not yet seen a key
            weights, scale = tl.exp2(scores - base[:, None]), tl.exp2(largest - base)
            total = total * scale + tl.sum(weights, 1)
            mixed = mixed * scale[:, None] + _product(weights.to(values.dtype), values)
            largest = new
    is_blind = total == 0.0
    place = block * BLOCK + tl.arange(0, BLOCK)
    sum_of_query = tl.where(is_blind, 0.0, largest + tl.log2(tl.where(is_blind, 1.0, total)))
    tl.store(sums + tl.program_id(0) * num_queries + place, sum_of_query, place < num_queries)
    mixed = mixed / tl.where(is_blind, 1.0, total)[:, None]
    _store(out, mixed, row, block, head, num_queries, HEADS)


@triton.jit
def _query_gradient_kernel(
    inputs: _Inputs,
    strides: _Strides,
    grad: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    shares: tl.tensor,
    of_queries: tl.tensor,
    num_queries: tl.tensor,
    num_keys: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program has a block of queries of one head. It also writes the queries' shares."""
    block, row, head = tl.program_id(1), tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    queries = _load(inputs.query, strides.query, row, block, head, num_queries, DIM, BLOCK)
    plain = (num_queries * HEADS * DIM, HEADS * DIM, DIM)  # the strides of contiguous outputs
    grads = _load(grad, plain, row, block, head, num_queries, DIM, BLOCK)
    outs = _load(out, plain, row, block, head, num_queries, DIM, BLOCK)
    place = block * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0) * num_queries + place
    share = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)
    tl.store(shares + at, share, place < num_queries)
    sum_of_query = tl.load(sums + at, place < num_queries, 0.0)
    gradient = tl.zeros((BLOCK, DIM), tl.float32)
    num_blocks = tl.cdiv(num_keys, BLOCK)
    is_seen = inputs.blocks + (row * tl.num_programs(1) + block) * num_blocks
    for number in range(num_blocks):
        if tl.load(is_seen + number):
            keys = _load(inputs.key, strides.key, row, number, head // GROUP, num_keys, DIM, BLOCK)
            values = _load(inputs.value, strides.value, row, number, head // GROUP, num_keys, DIM, BLOCK)
            visible = _visible(inputs.mask, strides.mask, row, block, number, num_queries, num_keys, BLOCK)
            scores = _product(queries, tl.trans(keys)) * _LOG2E
            weights = tl.where(visible, tl.exp2(scores - sum_of_query[:, None]), 0.0)
            of_weights = _product(grads, tl.trans(values)) - share[:, None]
            gradient += _product((weights * of_weights).to(keys.dtype), keys)
    _store(of_queries, gradient, row, block, head, num_queries, HEADS)


@triton.jit
def _key_gradient_kernel(
    inputs: _Inputs,
    strides: _Strides,
    grad: tl.tensor,
    sums: tl.tensor,
    shares: tl.tensor,
    of_keys: tl.tensor,
    of_values: tl.tensor,
    num_queries: tl.tensor,
    num_keys: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program has a block of keys of one head, and adds over the queries of all heads that share it."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    number, row, kv_head = tl.program_id(1), tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    keys = _load(inputs.key, strides.key, row, number, kv_head, num_keys, DIM, BLOCK)
    values = _load(inputs.value, strides.value, row, number, kv_head, num_keys, DIM, BLOCK)
    of_key, of_value = tl.zeros((BLOCK, DIM), tl.float32), tl.zeros((BLOCK, DIM), tl.float32)
    plain = (num_queries * HEADS * DIM, HEADS * DIM, DIM)
    num_blocks = tl.cdiv(num_queries, BLOCK)
    is_seen = inputs.blocks + row * num_blocks * tl.num_programs(1) + number
    for block in range(num_blocks):
        if tl.load(is_seen + block * tl.num_programs(1)):
            place = block * BLOCK + tl.arange(0, BLOCK)
            key = number * BLOCK + tl.arange(0, BLOCK)[:, None]
            of_mask = inputs.mask + row.to(tl.int64) * strides.mask[0] + place[None, :] * strides.mask[1] + key
            is_inside = (place[None, :] < num_queries) & (key < num_keys)
            for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
                queries = _load(inputs.query, strides.query, row, block, head, num_queries, DIM, BLOCK)
                grads = _load(grad, plain, row, block, head, num_queries, DIM, BLOCK)
                at = (row * HEADS + head) * num_queries + place
                sum_of_query = tl.load(sums + at, place < num_queries, 0.0)
                share = tl.load(shares + at, place < num_queries, 0.0)
                scores = _product(keys, tl.trans(queries)) * _LOG2E  # (keys, queries)
                visible = tl.load(of_mask, is_inside, 0) != 0
                weights = tl.where(visible, tl.exp2(scores - sum_of_query[None, :]), 0.0)
                of_value += _product(weights.to(grads.dtype), grads)
                of_weights = _product(values, tl.trans(grads)) - share[None, :]
                of_key += _product((weights * of_weights).to(queries.dtype), queries)
    place = number * BLOCK + tl.arange(0, BLOCK)
    at = (tl.program_id(0).to(tl.int64) * num_keys + place[:, None]) * DIM + tl.arange(0, DIM)[None, :]
    tl.store(of_keys + at, of_key.to(of_keys.dtype.element_ty), place[:, None] < num_keys)
    tl.store(of_values + at, of_value.to(of_values.dtype.element_ty), place[:, None] < num_keys)


@triton.jit
def _load(
    tensor: tl.tensor,
    strides: tl.tuple,
    row: tl.tensor,
    block: tl.tensor,
    head: tl.tensor,
    size: tl.tensor,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return a block (BLOCK, DIM) of positions of one head; zeros after the last position."""
    place = block * BLOCK + tl.arange(0, BLOCK)
    at = tensor + row.to(tl.int64) * strides[0] + head * strides[2] + place[:, None] * strides[1]
    return tl.load(at + tl.arange(0, DIM)[None, :], place[:, None] < size, 0.0)


@triton.jit
def _store(
    out: tl.tensor,
    values: tl.tensor,
    row: tl.tensor,
    block: tl.tensor,
    head: tl.tensor,
    size: tl.tensor,
    HEADS: tl.constexpr,
) -> None:
    """Store a block (BLOCK, DIM) of positions of one head in a contiguous tensor (B, size, HEADS, DIM)."""
    BLOCK: tl.constexpr = values.shape[0]
    DIM: tl.constexpr = values.shape[1]
    place = block * BLOCK + tl.arange(0, BLOCK)[:, None]
    at = ((row.to(tl.int64) * size + place) * HEADS + head) * DIM + tl.arange(0, DIM)[None, :]
    tl.store(out + at, values.to(out.dtype.element_ty), place < size)


@triton.jit
def _visible(
    mask: tl.tensor,
    strides: tl.tuple,
    row: tl.tensor,
    block: tl.tensor,
    number: tl.tensor,
    num_queries: tl.tensor,
    num_keys: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return a block (BLOCK, BLOCK) of the mask; False after the last query and key."""
    query, key = block * BLOCK + tl.arange(0, BLOCK)[:, None], number * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = mask + row.to(tl.int64) * strides[0] + query * strides[1] + key
    return tl.load(at, (query < num_queries) & (key < num_keys), 0) != 0


@triton.jit
def _product(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    return finish_products(tl.dot(left, right, input_precision="ieee"))
