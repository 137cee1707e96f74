"""The Ψ sampler: part of each ancestral step forgets the canvas (arXiv:2602.21185)."""

from dataclasses import dataclass
from typing import ClassVar

from dgemma.checks import Probability
from dgemma.diffusion.decision import transition
from dgemma.diffusion.law import log_transition
from dgemma.sampling.ancestral import Ancestral
from dgemma.sampling.base import Decision, DenoiseState, Law, Prediction


@dataclass(frozen=True, kw_only=True)
class Psi(Ancestral):
    """Draw x0, then the next canvas from κ q(z_s | z_t, x0) + (1 - κ) q(z_s | x0).

    The second part noises x0 afresh. It corrects wrong tokens, which under uniform noise make themselves more likely.
    The canvas keeps its distribution at every noise level, so it is exact for an exact network with many steps.
    kappa=1 is `Ancestral`.

    Example: `Psi(kappa=0.9)`.
    """

    kappa: Probability = 0.9
    valid_for: ClassVar[frozenset[str]] = frozenset({"uniform"})

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        x0 = self._mean(prediction, state).sample(state.uniform("token"))
        return transition(x0, state, kappa=self.kappa)

    def law(self, prediction: Prediction, state: DenoiseState, decision: Decision) -> Law:
        log_prob = log_transition(self._mean(prediction, state), state, decision, kappa=self.kappa)
        return Law(log_prob, (state.open | ~(decision.write | decision.renoise)).all(-1))
