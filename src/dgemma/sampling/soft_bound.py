"""Entropy-bound acceptance with random positions, whose probabilities have gradients (Plackett-Luce)."""

from dataclasses import dataclass, replace
from typing import Annotated

from dgemma.checks import FINITE, above
from dgemma.diffusion import draws
from dgemma.diffusion.law import law_of_rule
from dgemma.sampling.base import Decision, DenoiseState, Law, Prediction
from dgemma.sampling.entropy_bound import EntropyBound
from dgemma.sampling.ranking import best, certainty, is_choice, log_gumbel_choice


@dataclass(frozen=True, kw_only=True)
class SoftEntropyBound(EntropyBound):
    """Accept as many positions as `EntropyBound` does, drawn one after another from softmax(certainty / softness).

    A hard rule has no gradient in its positions, and other weights may make its runs impossible. Here every choice of
    positions has a probability, which a policy gradient can change. Only their number follows from the prediction
    without randomness. With a softness near 0 it is `EntropyBound`.

    Example: `SoftEntropyBound(bound=0.1, softness=0.05)`.
    """

    softness: Annotated[float, above(0), FINITE] = 0.05

    @property
    def has_fixed_order(self) -> bool:
        return False

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        hard = super().__call__(prediction, state)
        score = certainty(prediction, self.order).double() / self.softness + draws.gumbel(state.uniform("order"))
        accept = best(score, state.open, hard.write.sum(-1))
        return replace(hard, write=accept, renoise=state.open & ~accept)

    def law(self, prediction: Prediction, state: DenoiseState, decision: Decision) -> Law:
        hard, write = super().__call__(prediction, state), decision.write
        score = certainty(prediction, self.order).double() / self.softness
        choice = log_gumbel_choice(score, write, state.open)
        is_possible = is_choice(write, state.open, hard.write.sum(-1))
        implied = replace(hard, write=write, renoise=state.open & ~write)
        law = law_of_rule(implied, prediction, state, decision, drawn=not self.greedy)
        return law._replace(drawn=law.drawn + choice, agrees=law.agrees & is_possible)
