"""Losses of canvases, as values: the cost of each position of a noisy canvas, given the network's last hidden states.

`CrossEntropy` is the published loss. `Bound` is the exact likelihood bound of the noise (`nelbo`): MDLM's and LLaDA's
for mask noise, Duo's for uniform and GIDD's for hybrid noise. Your own loss is a subclass of `Loss` with one method.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from dgemma.checks import above, check_types, require, require_tensor
from dgemma.diffusion.noise import HybridNoise, Noise
from dgemma.model.diffusion import DiffusionGemma
from dgemma.train import head, nelbo
from dgemma.train.canvases import Canvases, NoisyCanvases

_CERTAIN = 1e4  # the largest evidence (`_evidence`): the softmax is one-hot, and values stay finite

Scored = Literal["all", "noised"]


class Loss:
    """The cost of each position of noisy canvases. Write `of_logits`, or `__call__` for full control.

    `scored` says which positions count: "all", or only those that were "noised".

    Example:

        class Focal(Loss):
            def of_logits(self, noise, logits, x, z, level):
                log_p = logits.log_softmax(-1).gather(-1, x)
                return (-((1 - log_p.exp()) ** 2) * log_p)[:, 0]
    """

    scored: Scored = "all"

    def __post_init__(self) -> None:
        check_types(self)  # of a loss that is a dataclass

    def of_logits(self, noise: Noise, logits: Tensor, x: Tensor, z: Tensor, level: Tensor) -> Tensor:
        """Return the costs (m,) of positions with logits (m, V).

        The clean token x, the noisy token z and the noise level are (m, 1) each.
        """
        raise NotImplementedError(f"{type(self).__name__} must define of_logits or __call__.")

    def __call__(self, model: DiffusionGemma, canvases: Canvases, noisy: NoisyCanvases, hidden: Tensor) -> Tensor:
        """Return the cost of each position, (B, K, C), from the last hidden states (B, K, C, D)."""

        def cost(logits: Tensor, x: Tensor, z: Tensor, level: Tensor) -> Tensor:
            costs, rule = self.of_logits(noisy.noise, logits, x, z, level), f"return one cost per row, ({len(logits)},)"
            require_tensor(costs, f"{type(self).__name__}.of_logits", rule, shape=logits.shape[:1])
            return costs

        tokenwise = (t.reshape(-1, 1) for t in (canvases.x, noisy.z, noisy.position_level))
        costs = head.map_logits(
            cost, hidden.flatten(0, 2), model.embed_tokens.weight, *tokenwise, cap=model.config.final_logit_softcapping
        )
        return costs.view_as(canvases.x)

    def check_noise(self, noise: Noise, allowed: tuple[int, ...] | None) -> None:
        """Raise ValueError if the loss has no meaning under this noise, or under noise of the `allowed` tokens only."""


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Loss):
    """-log p(x | z) of the clean tokens. propose_mask: whether the mask token is in the softmax (LLaDA) or not (MDLM).

    Example: `Objective(noise=MaskNoise(512), canvas_len=32, loss=CrossEntropy(scored="noised"))`.
    """

    scored: Scored = "all"
    propose_mask: bool = False

    def __call__(self, model: DiffusionGemma, canvases: Canvases, noisy: NoisyCanvases, hidden: Tensor) -> Tensor:
        return _cross_entropy(model, canvases, noisy, hidden, propose_mask=self.propose_mask)

    def check_noise(self, noise: Noise, allowed: tuple[int, ...] | None) -> None:
        fits = not self.propose_mask or noise.mask_token is not None
        require(fits, "CrossEntropy.propose_mask", "be False for noise without a mask token", True, "Leave it out.")


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut(Loss):
    """Cross-entropy for logits that mean p(x | z without this position) (arXiv:2605.22765). For uniform noise.

    Example: `Objective(noise=UniformNoise(512), canvas_len=32, loss=LeaveOneOut())`.
    """

    scored: Scored = "all"

    def __call__(self, model: DiffusionGemma, canvases: Canvases, noisy: NoisyCanvases, hidden: Tensor) -> Tensor:
        return _cross_entropy(model, canvases, noisy, hidden, evidence=_evidence(noisy))

    def check_noise(self, noise: Noise, allowed: tuple[int, ...] | None) -> None:
        nelbo.check_process(noise)
        fix = "Under mask noise, CrossEntropy is the same loss."
        require(noise.kind == "uniform", "Objective.noise", "be UniformNoise with LeaveOneOut", noise, fix)


@dataclass(frozen=True, kw_only=True)
class Bound(Loss):
    """The exact bound on -log p(x), with the time drawn uniformly.

    parametrisation: the meaning of the logits, see `nelbo.integrand`; mask noise makes no difference between the two.
    weights: the "exact" ones, or GIDD's "dynamic" ones for hybrid noise. max_weight: the largest weight; GIDD uses 2.
    Other weights train more easily, but the loss is not a bound. propose_mask: as in `CrossEntropy`, for mask noise.

    Example: `Objective(noise=UniformNoise(512), canvas_len=32, loss=Bound(parametrisation="loo"))`.
    """

    parametrisation: nelbo.Parametrisation = "mean"
    weights: Literal["exact", "dynamic"] = "exact"
    max_weight: Annotated[float, above(0)] | None = None
    propose_mask: bool = False

    def of_logits(self, noise: Noise, logits: Tensor, x: Tensor, z: Tensor, level: Tensor) -> Tensor:
        weights = self._weights(noise, x, z, level)
        bound = nelbo.integrand(
            noise, logits[:, None], x, z, level, parametrisation=self.parametrisation, weights=weights
        )
        return bound[:, 0]

    def __call__(self, model: DiffusionGemma, canvases: Canvases, noisy: NoisyCanvases, hidden: Tensor) -> Tensor:
        if noisy.noise.kind != "mask":
            return super().__call__(model, canvases, noisy, hidden)
        losses = _cross_entropy(model, canvases, noisy, hidden, propose_mask=self.propose_mask)
        return losses * self._weights(noisy.noise, canvases.x, noisy.z, noisy.position_level).to(losses.dtype)

    def check_noise(self, noise: Noise, allowed: tuple[int, ...] | None) -> None:
        nelbo.check_process(noise)
        allows_weights, allows_masks = noise.kind == "hybrid", noise.kind == "mask"
        fits = allows_weights or self.weights != "dynamic"
        require(fits, "Objective.noise", "be HybridNoise for dynamic weights", noise)
        require(allows_masks or not self.propose_mask, "Objective.noise", "be MaskNoise to propose masks", noise)
        fits, fix = allows_masks or allowed is None, "Use a model whose vocabulary is the allowed set."
        require(fits, "Objective.allowed", "be None for bounds of uniform and hybrid noise", allowed, fix)

    def _weights(self, noise: Noise, x: Tensor, z: Tensor, level: Tensor) -> Tensor:
        """Return the weight of each position, float64."""
        if isinstance(noise, HybridNoise) and self.weights == "dynamic":
            # arXiv:2503.04482: the weight is 2 for masks, 1 for random tokens, and c / (N·(1 - t)) for clean tokens.
            # Here c is `uniform_rate`, N the number of tokens except the mask, and t the noise level.
            clean = noise.uniform_rate(level) / ((noise.vocab_size - 1) * (1 - level))
            weights = torch.where(noise.masked(z), 2.0, torch.where(z == x, clean, 1.0))
        else:
            weights = nelbo.exact_weights(noise, x, z, level)
        return weights if self.max_weight is None else weights.clamp(max=self.max_weight)


LOSSES: tuple[type[Loss], ...] = (CrossEntropy, LeaveOneOut, Bound)


def _cross_entropy(
    model: DiffusionGemma,
    canvases: Canvases,
    noisy: NoisyCanvases,
    hidden: Tensor,
    *,
    propose_mask: bool = False,
    evidence: Tensor | None = None,
) -> Tensor:
    losses = head.cross_entropy(
        hidden.flatten(0, 2),
        model.embed_tokens.weight,
        canvases.x.flatten(),
        cap=model.config.final_logit_softcapping,
        observed=None if evidence is None else noisy.z.flatten(),
        evidence=None if evidence is None else evidence.flatten(),
        banned=None if propose_mask else noisy.noise.mask_token,
    )
    return losses.view_as(canvases.x)


def _evidence(noisy: NoisyCanvases) -> Tensor:
    """Return what the noisy token z adds to the logit of x = z, (B, K, C): log(1 + nα/(1 - α)).

    n is the number of tokens that noise draws from, and α = 1 - level.
    """
    level, allowed = noisy.position_level, noisy.allowed
    num_tokens = noisy.noise.vocab_size if allowed is None else allowed.sum()
    evidence = torch.log1p(num_tokens * (1 - level) / level).clamp(max=_CERTAIN)
    return evidence if allowed is None else torch.where(allowed[noisy.z], evidence, _CERTAIN)
