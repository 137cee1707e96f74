"""Attention of new tokens over the cached prefix and themselves, causal or bidirectional."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dgemma.model.config import LayerShape, ModelConfig
from dgemma.model.fused import fusible, fusible_with, is_fusing
from dgemma.model.layers import RMSNorm, project, rms_norm
from dgemma.model.rotary import rotate

_FLASH_DIM = 256  # the largest head size that torch's fastest kernels support
_ALIGNED = 8  # products of 16-bit matrices are fast if rows have a multiple of 8 values

_BY_KEY_HEAD, _BY_TOKEN = "b t (k g) h -> (b k) (g t) h", "(b k) (g t) h -> b t (k g) h"

Mask = Tensor | BlockMask | Literal["causal"]


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Mask | None) -> Tensor:
    """Return softmax(q·k) v with scale 1: queries (B, T, N, H), keys and values (B, K, S, H) → (B, T, N, H).

    mask: (B, 1, T or 1, S), True where a query sees a key; None means everywhere. With a `BlockMask`, FlexAttention
    skips masked blocks. "causal" requires T = S and is fastest: a query sees keys up to its own position.
    """
    if isinstance(mask, BlockMask):
        return _attend_in_blocks(queries, keys, values, mask)
    trains = (torch.is_grad_enabled() or is_fusing()) and not torch.compiler.is_compiling()
    if trains and queries.is_cuda and not isinstance(mask, Tensor) and values.dtype in (torch.bfloat16, torch.float16):
        if queries.shape[-1] > _FLASH_DIM:
            return attend_by_products(queries, keys, values, causal=mask == "causal")
        q, is_causal = queries.transpose(1, 2), mask == "causal"
        # Flash kernels share keys without a copy, also in the gradient.
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=is_causal, scale=1.0, enable_gqa=True)
        return out.transpose(1, 2)
    batch, num_kv_heads = keys.shape[:2]
    group = queries.shape[2] // num_kv_heads
    # Each kv head becomes a batch entry with its query heads, so that keys are shared and not copied.
    q = rearrange(queries, "b t (k g) h -> (b k) g t h", k=num_kv_heads)
    k, v = (x.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for x in (keys, values))
    if queries.is_cuda:
        # Copied on CUDA: torch's memory-efficient kernel misreads shared keys of some lengths (pytorch issue 191937).
        k, v = k.contiguous(), v.contiguous()
    if isinstance(mask, Tensor):
        mask = mask.expand(batch, num_kv_heads, *mask.shape[2:]).reshape(batch * num_kv_heads, 1, *mask.shape[2:])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal", scale=1.0)
    return rearrange(out, "(b k) g t h -> b t (k g) h", b=batch)


def attend_by_products(queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> Tensor:
    """Compute `attend` by two matrix products around a softmax, which stores all weights (B, N, T, S).

    Its gradient is several times faster than that of torch's kernels for large heads.

    Example: `attend_by_products(queries, keys, values, causal=True)`.
    """
    out: Tensor = _AttendByProducts.apply(queries, keys, values, causal)
    return out


def words(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors as words of 8 bytes, or unchanged if their dtypes, sizes or strides do not allow it.

    A GPU copies slices of words several times faster than those of 16-bit values.

    Example: `target, source = words(cache[:, :, :5], keys); target.copy_(source)`.
    """
    size, same = tensors[0].itemsize, all(x.dtype == tensors[0].dtype for x in tensors)
    if not same or any(
        x.stride(-1) != 1 or any(n * size % 8 for n in (x.shape[-1], *x.stride()[:-1])) for x in tensors
    ):
        return list(tensors)
    return [x.view(torch.int64) for x in tensors]


def in_words(copy: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return copy(*tensors), computed on `words` of the tensors. `copy` only moves values and keeps the last dimension.

    Example: `in_words(lambda x: x.transpose(1, 2).contiguous(), keys)`.
    """
    return copy(*words(*tensors)).view(tensors[0].dtype)


def join(past: Tensor, new: Tensor) -> Tensor:
    """Return past (B, K, P, H) followed by new (B, K, T, H) keys or values: (B, K, P + T, H).

    Example: `join(past_keys, keys)`.
    """
    by_token = past.stride(1) < past.stride(2) and new.stride(1) < new.stride(2)  # memory is ordered by token first
    if by_token and past.dtype == new.dtype and past.is_cuda and not torch.compiler.is_compiling():
        joined: Tensor = _Join.apply(past, new)
        return joined
    return torch.cat((past, new), dim=2)


class _Join(torch.autograd.Function):
    """Joins tensors as `words`, which is several times as fast if the past tokens are a slice of a larger tensor."""

    @staticmethod
    def forward(ctx: Any, past: Tensor, new: Tensor) -> Tensor:
        ctx.num_past = past.shape[2]
        batch, num_heads, num_new, head_dim = new.shape
        out = new.new_empty(batch, ctx.num_past + num_new, num_heads, head_dim)
        joined, *parts = words(out, past.transpose(1, 2), new.transpose(1, 2))
        joined[:, : ctx.num_past], joined[:, ctx.num_past :] = parts
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad[:, :, : ctx.num_past], grad[:, :, ctx.num_past :]


class _AttendByProducts(torch.autograd.Function):
    """Each key head has one product, with the tokens of all its query heads as rows, so that keys are not copied."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
        num_tokens, num_keys = queries.shape[1], keys.shape[2]
        q = in_words(partial(rearrange, pattern=_BY_KEY_HEAD, k=keys.shape[1]), queries)
        # These products are slow if the number of keys is not a multiple of 8.
        pad = partial(F.pad, pad=(0, 0, 0, -num_keys % _ALIGNED))
        k, v = (in_words(pad, x).flatten(0, 1) for x in (keys, values))
        scores = _wide_product(q, k.mT)  # (B K, G T, S)
        weights = _masked_softmax(scores.flatten(0, 1), num_tokens if causal else None, num_keys, v.dtype)
        weights = weights.view_as(scores)
        ctx.save_for_backward(q, k, v, weights)
        ctx.num_keys = num_keys
        return in_words(partial(rearrange, pattern=_BY_TOKEN, b=queries.shape[0], t=num_tokens), weights @ v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, weights = ctx.saved_tensors
        batch, num_tokens = grad.shape[:2]
        num_kv_heads = k.shape[0] // batch
        grad = in_words(partial(rearrange, pattern=_BY_KEY_HEAD, k=num_kv_heads), grad).to(v.dtype)
        grad_weights = _wide_product(grad, v.mT)
        grad_scores = _grad_of_softmax(grad_weights.flatten(0, 1), weights.flatten(0, 1)).view_as(weights)
        grad_q = in_words(partial(rearrange, pattern=_BY_TOKEN, b=batch, t=num_tokens), grad_scores @ k)
        grad_k, grad_v = (
            x[:, : ctx.num_keys].unflatten(0, (batch, -1)) for x in (grad_scores.mT @ q, weights.mT @ grad)
        )
        return grad_q, grad_k, grad_v, None


@fusible
def _masked_softmax(scores: Tensor, num_causal: int | None, num_keys: int, dtype: torch.dtype) -> Tensor:
    """Return attention weights from scores (M, S), of which the first `num_keys` are of real keys.

    num_causal: T for causal attention, where row m belongs to token m mod T and sees keys up to it; otherwise None.
    """
    key = torch.arange(scores.shape[1], device=scores.device)
    hidden = key >= num_keys
    if num_causal is not None:
        token = torch.arange(scores.shape[0], device=scores.device) % num_causal
        hidden = hidden | (key > token[:, None])
    return scores.masked_fill(hidden, -torch.inf).softmax(-1).to(dtype)


@fusible
def _grad_of_softmax(grad: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient of scores (M, S), from that of their softmax."""
    product = grad * weights
    return (product - weights * product.sum(-1, keepdim=True)).to(weights.dtype)


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the batched product. On a GPU, the product of 16-bit tensors is in float32."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left @ right


def _attend_in_blocks(queries: Tensor, keys: Tensor, values: Tensor, mask: BlockMask) -> Tensor:
    # In a compiled layer, `flex_attention` is compiled with the layer. On a CPU it is not compiled: slow but exact.
    attention = flex_attention
    if queries.is_cuda and not torch.compiler.is_compiling():
        attention = _compiled_flex_attention()
    q, k, v = (x.to(values.dtype) for x in (queries.transpose(1, 2), keys, values))
    out: Tensor = attention(q, k, v, block_mask=mask, scale=1.0, enable_gqa=True)
    return out.transpose(1, 2)


@cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention)


class Attention(nn.Module):
    """Projections, per-head norms, rotation, attention. Full layers have no v_proj: V is the normed raw key."""

    def __init__(self, config: ModelConfig, shape: LayerShape) -> None:
        super().__init__()
        self.head_dim, self.eps = shape.head_dim, config.rms_norm_eps
        query_dim = config.num_attention_heads * shape.head_dim
        kv_dim = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_dim, bias=False) if shape.is_sliding else None
        self.o_proj = nn.Linear(query_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, config.rms_norm_eps)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, T, N, H), keys and values (B, K, T, H) of x (B, T, D): normed per head, then rotated."""
        tokens, heads = x.shape[:2], (-1, self.head_dim)
        raw_queries, raw_keys, *others = (out.unflatten(-1, heads).flatten(0, 1) for out in self.raw_heads(x))
        raw_values = others[0] if others else None
        cos, sin = (table.expand(*tokens, -1, -1).flatten(0, 1) for table in rope)
        queries, keys, values = (
            normed.unflatten(0, tokens)
            for normed in _norm_heads(
                raw_queries, raw_keys, raw_values, self.q_norm.weight, self.k_norm.weight, cos, sin, self.eps
            )
        )
        return queries, keys.transpose(1, 2), values.transpose(1, 2)

    def raw_heads(self, x: Tensor) -> list[Tensor]:
        """Return the projections of x (..., D): queries and keys, and values if the layer has `v_proj`."""
        layers = (self.q_proj, self.k_proj) if self.v_proj is None else (self.q_proj, self.k_proj, self.v_proj)
        return project(x, *layers)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None, mask: Mask | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output (B, T, D) and new keys and values, from x (B, T, D) and past ones (B, K, S, H)."""
        queries, keys, values = self.project(x, rope)
        seen_keys, seen_values = keys, values
        if past is not None:
            seen_keys, seen_values = join(past[0], keys), join(past[1], values)
        out = attend(queries, seen_keys, seen_values, mask)
        return self.o_proj(out.flatten(2)), keys, values


@fusible_with(num_joined=3)
def _norm_heads(
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None,
    query_norm: Tensor,
    key_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm each head of queries (M, N, H), keys and values (M, K, H); rotate queries and keys.

    values: None if they are the keys.
    """
    queries = rotate(rms_norm(queries, query_norm, eps), cos, sin)
    rotated = rotate(rms_norm(keys, key_norm, eps), cos, sin)
    return queries, rotated, rms_norm(keys if values is None else values, None, eps)
