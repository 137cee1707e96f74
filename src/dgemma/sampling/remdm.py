"""ReMDM: masked diffusion that may mask tokens again (arXiv:2503.00307)."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dgemma.checks import Probability, check_types, require, require_field
from dgemma.diffusion.law import log_written, safe_log
from dgemma.diffusion.schedule import Loop
from dgemma.sampling.base import Decision, DenoiseState, Law, Prediction, Sampler

Strategy = Literal["cap", "rescale", "conf", "loop"]
_PUBLISHED_ETA = {"cap": 0.008, "rescale": 0.015, "loop": 0.02}


@dataclass(frozen=True, kw_only=True)
class ReMDM(Sampler):
    """Mask revealed tokens again with probability σ, and reveal more masks per step to compensate.

    The canvas then still has the right distribution at every noise level.

    strategy sets σ, which is at most σ_max = min(1, (1 - α_s)/α_t):
    - "cap": σ = min(eta, σ_max).
    - "rescale": σ = eta·σ_max.
    - "loop": σ = min(eta, σ_max) on the plateau of the `Loop` schedule, otherwise 0.
    - "conf": σ = σ_max · softmax(-p), where p is the probability that each token had when it was revealed. The memory
      stores p, (B, C). As published, masks are not revealed faster, so the distribution at a noise level is not right.

    eta=None uses the published value. Strategy "conf" has no eta. Published runs use `top_p=0.9`.

    Example: `ReMDM(strategy="loop")` with `noise=MaskNoise(vocab_size, schedule=Loop())`.
    """

    strategy: Strategy = "cap"
    eta: Probability | None = None
    valid_for: ClassVar[frozenset[str]] = frozenset({"mask"})

    def __post_init__(self) -> None:
        check_types(self)
        fits = self.strategy != "conf" or self.eta is None
        require_field(fits, self, "eta", 'be None for strategy "conf"', "Its σ has no scale.")

    @property
    def revises(self) -> bool:
        return True

    def start(self, state: DenoiseState) -> Tensor | None:
        schedule, fix = state.noise.schedule, "Pass noise=MaskNoise(vocab_size, schedule=Loop())."
        fits = self.strategy != "loop" or isinstance(schedule, Loop)
        require(fits, 'ReMDM.strategy "loop"', "run on a Loop schedule", schedule, fix)
        return torch.ones_like(state.canvas, dtype=torch.float64) if self.strategy == "conf" else None

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        tokens = prediction.sample(state.uniform("token"))
        reveal, remask = self.rates(state)
        u = state.uniform("event")
        write = state.open & (u < reveal)
        memory = self._remember(prediction, state, tokens, write)
        return Decision(tokens=tokens, write=write, renoise=~state.open & (u < remask), memory=memory)

    def law(self, prediction: Prediction, state: DenoiseState, decision: Decision) -> Law:
        reveal, remask = (rate.clamp(0.0, 1.0) for rate in self.rates(state))
        happens = torch.where(decision.write, reveal, torch.where(decision.renoise, remask, 1 - reveal))
        happens = torch.where(state.open | decision.renoise, happens, 1 - remask).masked_fill(state.frozen, 1.0)
        drawn = log_written(prediction, decision.tokens, decision.write) + safe_log(happens).sum(-1)
        agrees = ((state.open | ~decision.write) & (~state.open | ~decision.renoise)).all(-1)
        return Law(drawn, agrees, self._remember(prediction, state, decision.tokens, decision.write))

    def _remember(self, prediction: Prediction, state: DenoiseState, tokens: Tensor, write: Tensor) -> Any:
        if self.strategy != "conf":
            return state.memory
        return torch.where(write, prediction.log_prob(tokens).exp().double(), state.memory)

    def rates(self, state: DenoiseState) -> tuple[Tensor, Tensor]:
        """Return the probabilities of revealing a mask and of masking a token again in this step, both (B, C)."""
        alpha_t, alpha_s = 1 - state.noise_level[:, None], 1 - state.next_noise_level[:, None]  # (B, 1)
        sigma = self._sigma(state, alpha_t, alpha_s)  # (B, C)
        # A canvas without noise has no masks to reveal.
        masked = torch.where(alpha_t < 1, 1 - alpha_t, 1.0)
        return (alpha_s - (1 - sigma) * alpha_t) / masked, sigma

    def _sigma(self, state: DenoiseState, alpha_t: Tensor, alpha_s: Tensor) -> Tensor:
        # α_t is 0 only on a canvas of pure noise, where there is nothing to re-mask.
        largest = torch.where(alpha_t > 0, (1 - alpha_s) / torch.where(alpha_t > 0, alpha_t, 1.0), 0.0).clamp(max=1.0)
        largest = largest.expand(state.canvas.shape)
        if self.strategy == "conf":
            revealed = ~state.open & ~state.frozen
            weight = torch.where(revealed, torch.exp(-state.memory), 0.0)
            return largest * weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
        eta = _PUBLISHED_ETA[self.strategy] if self.eta is None else self.eta
        if self.strategy == "rescale":
            return eta * largest
        capped = largest.clamp(max=eta)
        rests = alpha_s - alpha_t < 1e-9  # α at the ends of the plateau has a rounding error
        return capped if self.strategy == "cap" else torch.where(rests, capped, 0.0)
