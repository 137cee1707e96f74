"""Attention in training. Reference: `dgemma.model.attention.attend`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from dgemma.doors import plain
from dgemma.model import attention
from dgemma.model.attention import Mask
from dgemma_kernels.ops.masked import kernel as masked
from dgemma_kernels.training.fused import COMPILED_ON, fused, runs_kernels

_NARROW = (torch.bfloat16, torch.float16)
_FLASH_DIM = 256  # the largest head size that torch's fastest kernels support
_ALIGNED = 8  # products of 16-bit matrices are fast if rows have a multiple of 8 values

_BY_KEY_HEAD, _BY_TOKEN = "b t (k g) h -> (b k) (g t) h", "(b k) (g t) h -> b t (k g) h"


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Mask | None) -> Tensor:
    """Compute attention without a copy of keys: by torch's flash kernels, or by products for larger heads.

    Under a mask, small heads have kernels that skip its empty blocks; larger heads have plain attention.
    """
    device = queries.device.type
    if isinstance(mask, Tensor) and device in COMPILED_ON and masked.fits(queries, mask):
        is_rounded = torch.is_autocast_enabled(device) and values.dtype != torch.float64  # as by autocast
        dtype = torch.get_autocast_dtype(device) if is_rounded else values.dtype
        if dtype in _NARROW:
            return masked.attend(queries.to(dtype), keys.to(dtype), values.to(dtype), mask)
    if not runs_kernels(queries) or isinstance(mask, Tensor) or values.dtype not in _NARROW:
        return plain(attention.attend)(queries, keys, values, mask)
    if queries.shape[-1] > _FLASH_DIM:
        return attend_by_products(queries, keys, values, causal=mask == "causal")
    q, is_causal = queries.transpose(1, 2), mask == "causal"
    out = F.scaled_dot_product_attention(q, keys, values, is_causal=is_causal, scale=1.0, enable_gqa=True)
    return out.transpose(1, 2)


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


@fused
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


@fused
def _grad_of_softmax(grad: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient of scores (M, S), from that of their softmax."""
    product = grad * weights
    return (product - weights * product.sum(-1, keepdim=True)).to(weights.dtype)


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the batched product. On a GPU, the product of 16-bit tensors is in float32."""
    if left.is_cuda and left.dtype in _NARROW:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left @ right
