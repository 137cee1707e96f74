"""The tied head and its losses, one slice of tokens at a time, to bound the memory of the logits.

With a vocabulary of 262,144 tokens the logits of 8,192 positions are 8.6 GB in float32, and so is their gradient. Here
the logits of a slice are computed, reduced to one result per token and dropped. The backward computes them again. The
reference is `Prediction`, with its soft-capped softmax.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dgemma.doors import replaceable
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.layers import wide_dtype

_SLICE_ELEMENTS = 1 << 27  # logits at once: 512 tokens of the published vocabulary


def map_logits(
    function: Callable[..., Tensor], hidden: Tensor, weight: Tensor, *tokenwise: Tensor, cap: float
) -> Tensor:
    """Apply `function(logits (m, V), *slices of tokenwise (m, …)) -> (m, …)` to slices of hidden (M, D); join them.

    Logits are cap · tanh(hidden @ weightᵀ / cap) in float32, or in float64 for float64 weights. Under autocast the
    product is in autocast's dtype.
    """

    def of_slice(rows: Tensor, weight: Tensor, *values: Tensor) -> Tensor:
        logits = F.linear(rows, weight)
        return function((logits.to(wide_dtype(logits)) / cap).tanh() * cap, *values)

    size = max(1, _SLICE_ELEMENTS // weight.shape[0])
    pieces = zip(hidden.split(size), *(values.split(size) for values in tokenwise), strict=True)
    # Without gradients nothing is recomputed, and torch need not import its compiler, which takes 100 MB.
    run = partial(checkpoint, of_slice, use_reentrant=False) if torch.is_grad_enabled() else of_slice
    return torch.cat([run(rows, weight, *values) for rows, *values in pieces])


@replaceable
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
    """Return -log p(target) under softmax(logits of `map_logits`): (M, D), (V, D), targets (M,) → (M,).

    `evidence` (M,) is added to the capped logit of the `observed` token (M,). This turns logits of
    p(x | z without this position) into those of p(x | z). A `banned` token, such as a mask that
    is never proposed, has probability zero.
    """

    def loss(logits: Tensor, targets: Tensor, *bump: Tensor) -> Tensor:
        if bump:
            observed, evidence = bump
            logits = logits.scatter_add(1, observed[:, None], evidence[:, None].to(logits.dtype))
        if banned is not None:
            logits = logits.masked_fill(torch.arange(logits.shape[1], device=logits.device) == banned, -torch.inf)
        return F.cross_entropy(logits, targets, reduction="none")

    bump = () if observed is None or evidence is None else (observed, evidence)
    return map_logits(loss, hidden, weight, targets, *bump, cap=cap)


def next_token_losses(model: DiffusionGemma, hidden: Tensor | None, tokens: Tensor) -> Tensor:
    """Return the loss of every token after the first: tokens (B, T), hidden states (B, ≥ T - 1, D) → (B, T - 1)."""
    targets = tokens[:, 1:]
    if hidden is None:  # texts of one token
        return targets.float()
    rows, cap = hidden[:, : targets.shape[1]].flatten(0, 1), model.config.final_logit_softcapping
    return cross_entropy(rows, model.embed_tokens.weight, targets.flatten(), cap=cap).view_as(targets)


@replaceable
def soft_embedding(model: DiffusionGemma, hidden: Tensor, *, allowed: Tensor | None = None) -> Tensor:
    """Return `model.soft_embedding` of the prediction from hidden (..., D), without a gradient to hidden: (..., D).

    allowed: (V,) or (1, 1, V) bool, the tokens that may be proposed, as in `generate`; None for all. As in the
    published model, the gradient reaches the embedding that the probabilities are multiplied with, and stops at the
    probabilities.
    """
    weight = model.embed_tokens.weight

    def embed(logits: Tensor) -> Tensor:
        logits = logits.detach()
        if allowed is not None:
            logits = logits.masked_fill(~allowed.flatten(), -torch.inf)
        if model.conventions.self_cond_logits == "rounded":
            logits = logits.to(model.dtype)
        return logits.softmax(-1, dtype=wide_dtype(logits)).to(weight.dtype) @ weight

    cap = model.config.final_logit_softcapping
    rows = hidden.detach().flatten(0, -2)
    return (map_logits(embed, rows, weight, cap=cap) * model.embed_scale()).view(hidden.shape)
