"""Ancestral sampling: each step is the exact reverse kernel of the noise process (D3PM, arXiv:2107.03006)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dgemma.checks import Checked
from dgemma.diffusion.decision import transition
from dgemma.diffusion.law import log_transition
from dgemma.sampling.base import Decision, DenoiseState, Law, Prediction, Sampler


@dataclass(frozen=True, kw_only=True)
class Ancestral(Sampler, Checked):
    """Draw x0, then the next canvas from q(z_s | z_t, x0). It is exact for an exact network in the limit of many steps.

    parametrisation: what the network predicts. "mean" is p(x0 | z), which a network learns with cross-entropy
    (DiffusionGemma). "loo" is p(x0 | z without this position), which a network learns with the bounds of UDLM, Duo and
    GIDD. Under mask noise the two agree. To convert a "loo" prediction to "mean", the sampler uses the state's noise
    level.

    Example: `Ancestral()(prediction, state).write` marks positions that become their drawn x0.
    """

    parametrisation: Literal["mean", "loo"] = "mean"
    redecides: ClassVar[frozenset[str]] = frozenset({"uniform", "hybrid"})
    kappa: ClassVar[float] = 1.0  # the share of the exact reverse kernel; `Psi` has less

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        x0 = self._mean(prediction, state).sample(state.uniform("token"))
        return transition(x0, state, kappa=self.kappa)

    def law(self, prediction: Prediction, state: DenoiseState, decision: Decision) -> Law:
        changes = decision.write | decision.renoise
        log_prob = log_transition(self._mean(prediction, state), state, decision, kappa=self.kappa)
        return Law(log_prob, (state.open | ~changes).all(-1))

    def _mean(self, prediction: Prediction, state: DenoiseState) -> Prediction:
        if self.parametrisation == "mean":
            return prediction
        return prediction.revised(
            lambda logits: state.noise.to_mean(logits, state.canvas, state.noise_level, allowed=state.allowed)
        )

    def final(self, prediction: Prediction, state: DenoiseState) -> Tensor:
        """Return the canvas (B, C) if no noise is left; otherwise the argmax at positions that may be noise."""
        masked = state.noise.masked(state.canvas)
        unseen = state.open & (state.noise_level > 0)[:, None] & (state.noise.kind != "mask")
        return torch.where(masked | unseen, prediction.argmax, state.canvas)
