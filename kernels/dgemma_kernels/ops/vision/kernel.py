"""The parts of a layer of the vision tower between its products, for the patches of several images in one sequence.

Attention is bidirectional within an image (FlashAttention, arXiv:2205.14135). Heads are stored (3, N, L, W): queries,
keys and values, padded with zeros from H to W columns. The published H is 72. Its W is 80: a product of 64 columns and
one of 16, because Triton's blocks are powers of two. Values round where the published model rounds them. Reference:
`reference.py`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dgemma_kernels.blocks import blocks_of, load_row, store_block
from dgemma_kernels.ops.norms.kernel import add_attention, inverse_rms


class PatchTile(NamedTuple):
    """The shape of a program of `attend_patches`: `rows` queries by `keys` keys."""

    rows: int = 64
    keys: int = 64
    num_warps: int = 4
    num_stages: int = 3


def norm_patch_heads(
    projected: Tensor, query_norm: Tensor, key_norm: Tensor, cos: Tensor, sin: Tensor, *, num_heads: int, eps: float
) -> Tensor:
    """Norm queries, keys and values per head, and rotate the first two: (L, 3·N·H) → (3, N, L, W).

    query_norm, key_norm: (H,). cos, sin: (L, H), the tables of `rotary_table_2d`.

    Example: `norm_patch_heads(x @ qkv.T, query_norm, key_norm, cos, sin, num_heads=16, eps=1e-6)`.
    """
    num_patches, head_dim = cos.shape
    assert projected.shape == (num_patches, 3 * num_heads * head_dim)
    assert all(x.is_contiguous() for x in (projected, query_norm, key_norm, cos, sin))
    width = sum(_columns(head_dim))
    out = torch.empty(3, num_heads, num_patches, width, dtype=projected.dtype, device=projected.device)
    _norm_patch_heads_kernel[(num_patches, 3)](
        projected,
        query_norm,
        key_norm,
        cos,
        sin,
        out,
        eps,
        NUM_HEADS=num_heads,
        HEADS=triton.next_power_of_2(num_heads),
        HEAD_DIM=head_dim,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
    return out


def attend_patches(heads: Tensor, spans: Tensor, head_dim: int, *, tile: PatchTile | None = None) -> Tensor:
    """Attend from every patch to the patches of its image, with scale 1. heads: (3, N, L, W) → (L, N·H).

    spans: (L, 2) int32, the first patch of a patch's image and the one after its last. Neither decreases from a patch
    to the next. A patch that belongs to no image has an empty span, and its result is zero.

    Example: `attend_patches(norm_patch_heads(...), spans, 72)`.
    """
    _, num_heads, num_patches, width = heads.shape
    main, rest = _columns(head_dim)
    assert width == main + rest
    assert spans.shape == (num_patches, 2)
    assert heads.is_contiguous()
    assert spans.is_contiguous()
    tile = tile or PatchTile()
    out = torch.empty(num_patches, num_heads * head_dim, dtype=heads.dtype, device=heads.device)
    rows = heads.view(-1, width)
    _attend_patches_kernel[(triton.cdiv(num_patches, tile.rows), num_heads)](
        *(TensorDescriptor.from_tensor(rows, [size, main]) for size in (tile.rows, tile.keys)),
        *(TensorDescriptor.from_tensor(rows, [size, rest or main]) for size in (tile.rows, tile.keys)),
        spans,
        out,
        num_patches,
        HEADS=num_heads,
        HEAD_DIM=head_dim,
        MAIN=main,
        REST=rest,
        ROWS=tile.rows,
        KEYS=tile.keys,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def add_normed(x: Tensor, update: Tensor, norm: Tensor, next_norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y = x + norm(update) * norm, and norm(y) * next_norm. x, update: (L, D), norms: (D,).

    Example: `x, normed = add_normed(x, attended, post_attention_norm, pre_feedforward_norm, 1e-6)`.
    """
    assert x.is_contiguous()
    assert update.is_contiguous()
    out, normed = torch.empty_like(x), torch.empty_like(x)
    _add_normed_kernel[(x.shape[0],)](x, update, norm, next_norm, out, normed, eps, **blocks_of(x.shape[1]))
    return out, normed


def _columns(head_dim: int) -> tuple[int, int]:
    """Return the columns of both products of a head: powers of two, at least 16, or 0 for the second.

    Example: `_columns(72)` is (64, 16).
    """
    main = max(16, 1 << head_dim.bit_length() - 1)
    return main, max(16, triton.next_power_of_2(head_dim - main)) if head_dim > main else 0


@triton.jit
def _norm_patch_heads_kernel(
    projected: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Norm and rotate all heads of one patch, of one kind: 0 for queries, 1 for keys, 2 for values."""
    patch, kind = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype: tl.constexpr = out.dtype.element_ty
    QUARTER: tl.constexpr = HEAD_DIM // 4  # pairs that rotate by the column, and pairs that rotate by the row
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    is_first = column // QUARTER % 2 == 0  # of its pair
    other = tl.where(is_first, column + QUARTER, column - QUARTER)
    at = projected + (patch * 3 + kind) * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    used, inside = column < HEAD_DIM, (head < NUM_HEADS) & (column < HEAD_DIM)
    x = tl.load(at + column, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(at + other, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
    x, partner = x * scale, partner * scale
    if kind < 2:
        norm = query_norm
        if kind == 1:
            norm = key_norm
        x *= tl.load(norm + column, mask=used, other=0.0).to(tl.float32)
        partner *= tl.load(norm + other, mask=used, other=0.0).to(tl.float32)
        x, partner = x.to(dtype).to(tl.float32), partner.to(dtype).to(tl.float32)
        cosine = tl.load(cos + patch * HEAD_DIM + column, mask=used, other=0.0).to(tl.float32)
        sine = tl.load(sin + patch * HEAD_DIM + column, mask=used, other=0.0).to(tl.float32)
        turned = (tl.where(is_first, -partner, partner) * sine).to(dtype).to(tl.float32)
        x = (x * cosine).to(dtype).to(tl.float32) + turned
    row = (kind * NUM_HEADS + head).to(tl.int64) * tl.num_programs(0) + patch
    tl.store(out + row * WIDTH + column, x.to(dtype), mask=(head < NUM_HEADS) & (column < WIDTH))


@triton.jit
def _attend_patches_kernel(
    queries: tl.tensor,  # descriptors of (3·N·L, W)
    keys: tl.tensor,
    more_queries: tl.tensor,  # the last REST columns
    more_keys: tl.tensor,
    span_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_patches: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    first_patch, head = tl.program_id(0) * ROWS, tl.program_id(1)
    patch = first_patch + tl.arange(0, ROWS)
    span = span_ptr + 2 * tl.minimum(patch, num_patches - 1)
    first, last = tl.load(span), tl.load(span + 1)
    begin, end = tl.min(first, 0), tl.max(last, 0)
    # If all rows belong to one image, only its last tile of keys needs a mask.
    is_one_image = tl.max(first, 0) == begin
    masked_from = begin + tl.where(is_one_image, (end - begin) // KEYS * KEYS, 0)

    start = head * num_patches
    query = queries.load([start + first_patch, 0])
    more_query = query
    if REST > 0:
        more_query = more_queries.load([start + first_patch, MAIN])
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, MAIN), tl.float32)
    more_acc = tl.zeros((ROWS, REST if REST > 0 else 16), tl.float32)
    for MASKED in tl.static_range(2):
        low, high = begin, masked_from
        if MASKED:
            low, high = masked_from, end
        for slot in range(low, high, KEYS):
            key_row = start + HEADS * num_patches + slot
            value_row = key_row + HEADS * num_patches
            score = tl.dot(query, keys.load([key_row, 0]).T, input_precision="ieee")
            if REST > 0:
                score = tl.dot(more_query, more_keys.load([key_row, MAIN]).T, score, input_precision="ieee")
            if MASKED:
                key = (slot + tl.arange(0, KEYS))[None, :]
                score = tl.where((key >= first[:, None]) & (key < last[:, None]), score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1) * 1.4426950408889634)  # base 2
            shift = new_top
            if MASKED:
                shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row without a visible key so far
            weight = tl.exp2(score * 1.4426950408889634 - shift[:, None])
            decay = tl.exp2(top - shift)
            total = total * decay + tl.sum(weight, 1)
            weight = weight.to(out_ptr.dtype.element_ty)
            acc = tl.dot(weight, keys.load([value_row, 0]), acc * decay[:, None], input_precision="ieee")
            if REST > 0:
                value = more_keys.load([value_row, MAIN])
                more_acc = tl.dot(weight, value, more_acc * decay[:, None], input_precision="ieee")
            top = new_top
    scale = (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    out = out_ptr + patch.to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM
    column = tl.arange(0, MAIN)[None, :]
    inside = (patch < num_patches)[:, None]
    tl.store(out + column, (acc * scale).to(out_ptr.dtype.element_ty), mask=inside & (column < HEAD_DIM))
    if REST > 0:
        column = MAIN + tl.arange(0, REST)[None, :]
        tl.store(out + column, (more_acc * scale).to(out_ptr.dtype.element_ty), mask=inside & (column < HEAD_DIM))


@triton.jit
def _add_normed_kernel(
    x: tl.tensor,
    update: tl.tensor,
    norm: tl.tensor,
    next_norm: tl.tensor,
    out: tl.tensor,
    normed: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * WIDTH
    before, change = load_row(x + row, WIDTH, BLOCK), load_row(update + row, WIDTH, BLOCK)
    weight, next_weight = load_row(norm, WIDTH, BLOCK), load_row(next_norm, WIDTH, BLOCK)
    scale = inverse_rms(change, WIDTH, eps)
    after = add_attention(change, scale, before, weight, out.dtype.element_ty)
    scale = inverse_rms(after, WIDTH, eps)
    for i in tl.static_range(len(after)):
        store_block(out + row, after[i], i, WIDTH)
        store_block(normed + row, after[i] * scale * next_weight[i], i, WIDTH)
