"""The tied head and its losses a slice of tokens at a time, so that no float32 (tokens, vocabulary) tensor ever exists.

With 262,144 tokens in the vocabulary the logits of 8,192 positions are 8.6 GB in float32, and their gradient as much
again. Here a slice's logits are made, reduced to one number a token, and dropped; the backward makes them once more.
What is computed is `Prediction`'s soft-capped softmax.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.layers import wide_dtype

SLICE_ELEMENTS = 1 << 27  # logits at once: 512 tokens of the published vocabulary, enough rows for a full-speed product


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    cap: float,
    observed: Tensor | None = None,
    evidence: Tensor | None = None,
    banned: int | None = None,
    slice_elements: int = SLICE_ELEMENTS,
) -> Tensor:
    """-log p(target) under softmax(cap · tanh(hidden @ weightᵀ / cap)): (M, D), (V, D) and targets (M,) → (M,).

    `evidence` (M,) is added to the capped logit of the `observed` token (M,): it turns leave-one-out logits into those
    of the mean. A `banned` token has probability zero: the mask, where it is never a proposal. The result is float32
    (float64 for float64 weights); under autocast the products are in its dtype.

    Example: `cross_entropy(hidden, model.embed_tokens.weight, targets, cap=30.0).mean().backward()`.
    """
    if (observed is None) != (evidence is None):
        raise ValueError("cross_entropy observed and evidence must come together. Give both or neither.")
    dtype = torch.get_autocast_dtype(hidden.device.type) if _autocast(hidden) else hidden.dtype
    loss: Tensor = _CrossEntropy.apply(
        hidden, weight, targets, observed, evidence, cap, banned, dtype, _rows_at_once(weight, slice_elements)
    )
    return loss


def map_logits(
    function: Callable[..., Tensor],
    hidden: Tensor,
    weight: Tensor,
    *tokenwise: Tensor,
    cap: float,
    slice_elements: int = SLICE_ELEMENTS,
) -> Tensor:
    """`function(logits (m, V), *slices of tokenwise (m, …)) -> (m,)` over slices of hidden (M, D), joined: (M,).

    For losses that read the whole distribution. Each slice is recomputed in the backward.

    Example: `map_logits(lambda logits, x: F.cross_entropy(logits, x, reduction="none"), hidden, weight, x, cap=30.0)`.
    """

    def of_slice(rows: Tensor, weight: Tensor, *given: Tensor) -> Tensor:
        return function(_cap(F.linear(rows, weight), cap), *given)

    size = _rows_at_once(weight, slice_elements)
    pieces = zip(hidden.split(size), *(values.split(size) for values in tokenwise), strict=True)
    return torch.cat([checkpoint(of_slice, rows, weight, *given, use_reentrant=False) for rows, *given in pieces])


@torch.no_grad()
def expected_embedding(model: DiffusionGemma, hidden: Tensor, *, slice_elements: int = SLICE_ELEMENTS) -> Tensor:
    """What self-conditioning is given next: softmax(logits) @ embedding of hidden (B, T, D), detached → (B, T, D)."""
    weight, cap = model.embed_tokens.weight, model.config.final_logit_softcapping
    pieces = hidden.flatten(0, 1).split(_rows_at_once(weight, slice_elements))
    soft = [model.soft_embedding(_cap(F.linear(rows, weight), cap)[None])[0] for rows in pieces]
    return torch.cat(soft).view_as(hidden)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        observed: Tensor | None,
        evidence: Tensor | None,
        cap: float,
        banned: int | None,
        dtype: torch.dtype,
        num_rows: int,
    ) -> Tensor:
        narrow = weight.to(dtype)
        losses = hidden.new_empty(hidden.shape[0], dtype=wide_dtype(hidden))
        normalizers = torch.empty_like(losses)
        forward = _for_device(_loss_of_slice, hidden.device.type)
        for rows in _slices(hidden.shape[0], num_rows):
            with torch.autocast(hidden.device.type, enabled=False):
                logits = F.linear(hidden[rows].to(dtype), narrow)
            bump = None if observed is None or evidence is None else (observed[rows], evidence[rows])
            losses[rows], normalizers[rows] = forward(logits, targets[rows], bump, cap, banned)
        ctx.save_for_backward(hidden, weight, targets, observed, evidence, normalizers)
        ctx.cap, ctx.banned, ctx.dtype, ctx.num_rows = cap, banned, dtype, num_rows
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, observed, evidence, normalizers = ctx.saved_tensors
        narrow = weight.to(ctx.dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Summed over slices in float32, whatever the weights are in.
        grad_weight = torch.zeros_like(weight, dtype=wide_dtype(weight)) if needs_weight else None
        backward = _for_device(_grad_of_slice, hidden.device.type)
        for rows in _slices(hidden.shape[0], ctx.num_rows):
            inputs = hidden[rows].to(ctx.dtype)
            bump = None if observed is None else (observed[rows], evidence[rows])
            logits = F.linear(inputs, narrow)
            slopes = backward(logits, targets[rows], bump, normalizers[rows], grad[rows], ctx.cap, ctx.banned)
            if grad_hidden is not None:
                grad_hidden[rows] = slopes @ narrow
            if grad_weight is not None:
                grad_weight += slopes.T @ inputs
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None, None


def _loss_of_slice(
    logits: Tensor, targets: Tensor, bump: tuple[Tensor, Tensor] | None, cap: float, banned: int | None
) -> tuple[Tensor, Tensor]:
    """logits (m, V), uncapped → the loss and the log of the normaliser, (m,) each."""
    scores = _scores(_cap(logits, cap), bump, banned)
    normalizer = scores.logsumexp(-1)
    return normalizer - scores.gather(1, targets[:, None])[:, 0], normalizer


def _grad_of_slice(
    logits: Tensor,
    targets: Tensor,
    bump: tuple[Tensor, Tensor] | None,
    normalizer: Tensor,
    grad: Tensor,
    cap: float,
    banned: int | None,
) -> Tensor:
    """The gradient of uncapped logits (m, V), in their dtype."""
    capped = _cap(logits, cap)
    probabilities = (_scores(capped, bump, banned) - normalizer[:, None]).exp()
    slopes = probabilities - (_ids(logits) == targets[:, None]).to(probabilities.dtype)
    return (slopes * (1 - (capped / cap).square()) * grad[:, None]).to(logits.dtype)


def _scores(capped: Tensor, bump: tuple[Tensor, Tensor] | None, banned: int | None) -> Tensor:
    if bump is not None:
        observed, evidence = bump
        capped = capped + torch.where(_ids(capped) == observed[:, None], evidence[:, None].to(capped.dtype), 0.0)
    return capped if banned is None else capped.masked_fill(_ids(capped) == banned, -torch.inf)


def _cap(logits: Tensor, cap: float) -> Tensor:
    return (logits.to(wide_dtype(logits)) / cap).tanh() * cap


def _ids(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[-1], device=logits.device)


def _autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def _rows_at_once(weight: Tensor, slice_elements: int) -> int:
    return max(1, slice_elements // weight.shape[0])


def _slices(num_tokens: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


@cache
def _for_device(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """On a GPU the passes over the vocabulary, which would cost more than the products, are fused into one or two."""
    return torch.compile(function) if device_type == "cuda" else function
