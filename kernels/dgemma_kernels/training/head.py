"""The tied head in training: losses of large slices of tokens, each with one kernel. Reference: `dgemma.train.head`.

The backward computes the logits of a slice again, unless one slice holds all tokens: then they are kept.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.layers import wide_dtype
from dgemma_kernels.training.adapted_linear import product_dtype
from dgemma_kernels.training.fused import compiled, runs_kernels

_SMALL_CAP = 40.0  # exp(-2 · 40) is still a normal float32
# Logits at once: 2,048 tokens of the published vocabulary. Every slice adds to a float32 gradient (V, D). For slices of
# 512 tokens that would take longer than the products.
_SLICE_ELEMENTS = 1 << 29


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    cap: float,
    observed: Tensor | None = None,
    evidence: Tensor | None = None,
    banned: int | None = None,
) -> Tensor:
    """Return -log p(target), (M,). For a frozen head, the gradient of `hidden` is computed with the loss."""
    with_grad = torch.is_grad_enabled() and hidden.requires_grad and not weight.requires_grad
    # A frozen head has no gradient that every slice adds to, so smaller slices take no longer.
    elements = _SLICE_ELEMENTS // (2 if with_grad else 1)
    size, dtype = _rows_at_once(weight, elements), product_dtype(hidden)
    loss: Tensor = _CrossEntropy.apply(hidden, weight, targets, observed, evidence, cap, banned, dtype, size, with_grad)
    return loss


def soft_embedding(model: DiffusionGemma, hidden: Tensor, *, allowed: Tensor | None = None) -> Tensor:
    """Return the expected embedding of the prediction from hidden (..., D). The gradient reaches the embedding."""
    weight, rows = model.embed_tokens.weight, hidden.detach().flatten(0, -2)
    rounded = model.dtype if model.conventions.self_cond_logits == "rounded" else None
    elements = _SLICE_ELEMENTS // (1 if weight.requires_grad else 2)  # as in `cross_entropy`
    size, dtype = _rows_at_once(weight, elements), product_dtype(hidden)
    allowed = None if allowed is None else allowed.flatten()
    soft: Tensor = _SoftEmbedding.apply(
        rows, weight, allowed, model.config.final_logit_softcapping, rounded, dtype, size
    )
    return (soft * model.embed_scale()).view(hidden.shape)


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
        with_grad: bool,
    ) -> Tensor:
        """with_grad: compute the gradient of hidden now, so that the backward need not compute the logits again."""
        narrow, logits = weight.to(dtype), None
        losses = hidden.new_empty(hidden.shape[0], dtype=wide_dtype(hidden))
        normalizers = torch.empty_like(losses)
        grad_hidden = torch.empty_like(hidden) if with_grad else None
        forward = _fast(_loss_and_grad_of_slice if with_grad else _loss_of_slice, hidden)
        for rows in _slices(hidden.shape[0], num_rows):
            with torch.autocast(hidden.device.type, enabled=False):
                logits = F.linear(hidden[rows].to(dtype), narrow)
            losses[rows], normalizers[rows], *slopes = forward(
                logits, targets[rows], *_bump_of(rows, observed, evidence), cap, banned
            )
            if grad_hidden is not None:
                with torch.autocast(hidden.device.type, enabled=False):
                    grad_hidden[rows] = slopes[0] @ narrow
        ctx.with_grad = with_grad
        if with_grad:
            ctx.save_for_backward(grad_hidden)
            return losses
        kept = logits if hidden.shape[0] <= num_rows else None
        ctx.save_for_backward(hidden, weight, targets, observed, evidence, normalizers, kept)
        ctx.cap, ctx.banned, ctx.dtype, ctx.num_rows = cap, banned, dtype, num_rows
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rest = (None,) * 8
        if ctx.with_grad:
            (grad_hidden,) = ctx.saved_tensors
            return (grad_hidden * grad[:, None]).to(grad_hidden.dtype), None, *rest
        hidden, weight, targets, observed, evidence, normalizers, kept = ctx.saved_tensors
        narrow = weight.to(ctx.dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Summed over slices in float32, for every dtype of the weights.
        grad_weight = torch.zeros_like(weight, dtype=wide_dtype(weight)) if needs_weight else None
        backward = _fast(_grad_of_slice, hidden)
        for rows in _slices(hidden.shape[0], ctx.num_rows):
            inputs = hidden[rows].to(ctx.dtype)
            logits = F.linear(inputs, narrow) if kept is None else kept
            bump = _bump_of(rows, observed, evidence)
            slopes = backward(logits, targets[rows], *bump, ctx.cap, ctx.banned, normalizers[rows], grad[rows])
            if grad_hidden is not None:
                grad_hidden[rows] = slopes @ narrow
            if grad_weight is not None:
                grad_weight += slopes.T @ inputs
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *rest


class _SoftEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        allowed: Tensor | None,
        cap: float,
        rounded: torch.dtype | None,
        dtype: torch.dtype,
        num_rows: int,
    ) -> Tensor:
        narrow, pieces, kept = weight.to(dtype), [], None
        of_slice = _fast(_probabilities_of_slice, hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in hidden.split(num_rows):
                probabilities = of_slice(F.linear(rows.to(dtype), narrow), allowed, cap, rounded)
                pieces.append(probabilities @ narrow)
                if hidden.shape[0] <= num_rows and ctx.needs_input_grad[1]:
                    kept = probabilities
                del probabilities  # before the next slice's are computed
        ctx.save_for_backward(hidden, weight, allowed, kept)
        ctx.cap, ctx.rounded, ctx.dtype, ctx.num_rows = cap, rounded, dtype, num_rows
        return torch.cat(pieces)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, allowed, kept = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return None, None, None, None, None, None, None
        narrow = weight.to(ctx.dtype)
        grad_weight = torch.zeros_like(weight, dtype=wide_dtype(weight))
        of_slice = _fast(_probabilities_of_slice, hidden)
        for rows, grad_rows in zip(hidden.split(ctx.num_rows), grad.split(ctx.num_rows), strict=True):
            probabilities = kept
            if probabilities is None:
                probabilities = of_slice(F.linear(rows.to(ctx.dtype), narrow), allowed, ctx.cap, ctx.rounded)
            grad_weight += probabilities.T @ grad_rows.to(ctx.dtype)
        return None, grad_weight.to(weight.dtype), None, None, None, None, None


def _fast(function: Callable[..., Any], x: Tensor) -> Callable[..., Any]:
    return compiled(function) if runs_kernels(x) else function


def _loss_of_slice(
    logits: Tensor, targets: Tensor, observed: Tensor | None, evidence: Tensor | None, cap: float, banned: int | None
) -> tuple[Tensor, Tensor]:
    """Return the loss and the log of the normaliser, (m,) each, of uncapped logits (m, V)."""
    scores = _scores(_cap(logits, cap), observed, evidence, banned)
    if evidence is None and cap <= _SMALL_CAP:
        normalizer = (scores - cap).exp().sum(-1).log() + cap  # no score is above the cap, so no maximum is needed
    else:
        normalizer = scores.logsumexp(-1)
    return normalizer - scores.gather(1, targets[:, None])[:, 0], normalizer


def _grad_of_slice(
    logits: Tensor,
    targets: Tensor,
    observed: Tensor | None,
    evidence: Tensor | None,
    cap: float,
    banned: int | None,
    normalizer: Tensor,
    grad: Tensor,
) -> Tensor:
    """Return the gradient of uncapped logits (m, V), in their dtype, for the gradient of the losses (m,)."""
    capped = _cap(logits, cap)
    probabilities = (_scores(capped, observed, evidence, banned) - normalizer[:, None]).exp()
    slopes = probabilities - (_ids(logits) == targets[:, None]).to(probabilities.dtype)
    return (slopes * (1 - (capped / cap).square()) * grad[:, None]).to(logits.dtype)


def _loss_and_grad_of_slice(
    logits: Tensor, targets: Tensor, observed: Tensor | None, evidence: Tensor | None, cap: float, banned: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, the log of the normaliser, and the gradient of each loss."""
    loss, normalizer = _loss_of_slice(logits, targets, observed, evidence, cap, banned)
    ones = torch.ones_like(loss)
    return loss, normalizer, _grad_of_slice(logits, targets, observed, evidence, cap, banned, normalizer, ones)


def _probabilities_of_slice(logits: Tensor, allowed: Tensor | None, cap: float, rounded: torch.dtype | None) -> Tensor:
    """Return probabilities (m, V) of uncapped logits (m, V), in their dtype."""
    capped = _cap(logits, cap)
    capped = capped if allowed is None else capped.masked_fill(~allowed, -torch.inf)
    capped = capped if rounded is None else capped.to(rounded)
    return capped.softmax(-1, dtype=wide_dtype(capped)).to(logits.dtype)


def _bump_of(rows: slice, observed: Tensor | None, evidence: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if observed is None or evidence is None else (observed[rows], evidence[rows])


def _scores(capped: Tensor, observed: Tensor | None, evidence: Tensor | None, banned: int | None) -> Tensor:
    if observed is not None and evidence is not None:
        capped = capped + torch.where(_ids(capped) == observed[:, None], evidence[:, None].to(capped.dtype), 0.0)
    return capped if banned is None else capped.masked_fill(_ids(capped) == banned, -torch.inf)


def _cap(logits: Tensor, cap: float) -> Tensor:
    return (logits.to(wide_dtype(logits)) / cap).tanh() * cap


def _ids(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[-1], device=logits.device)


def _rows_at_once(weight: Tensor, slice_elements: int) -> int:
    return max(1, slice_elements // weight.shape[0])


def _slices(num_tokens: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, num_tokens, size)]
