"""Threshold decoding with random positions: one Bernoulli draw per position, whose probability has a gradient."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.checks import FINITE, Checked, Probability, above
from dgemma.diffusion import draws
from dgemma.diffusion.law import law_of_rule
from dgemma.sampling.base import Decision, DenoiseState, Law, Prediction, Sampler
from dgemma.sampling.ranking import best, propose


@dataclass(frozen=True, kw_only=True)
class SoftThreshold(Sampler, Checked):
    """Commit each open position with probability sigmoid((confidence - `tau`) / `softness`).

    If no position is drawn, one is drawn from softmax(confidence / softness). So the probability of a run is a smooth
    function of the weights, positions included: suited to policy gradients and importance ratios. With a softness near
    0 it is `Threshold`, but the noise that positions add to a policy gradient grows. Under uniform noise, commits
    persist and the rest returns to noise.

    Example: `SoftThreshold(tau=0.9, softness=0.2)`.
    """

    tau: Probability = 0.9
    softness: Annotated[float, above(0), FINITE] = 0.2
    greedy: bool = False
    valid_for: ClassVar[frozenset[str]] = frozenset({"mask", "uniform"})

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        score = self._score(prediction)
        accept = state.open & (state.uniform("position") < score.sigmoid())
        one = best(score + draws.gumbel(state.uniform("order")), state.open, 1)
        return self._decide(prediction, state, torch.where(accept.any(-1, keepdim=True), accept, one))

    def law(self, prediction: Prediction, state: DenoiseState, decision: Decision) -> Law:
        score, write = self._score(prediction), decision.write
        num_written = write.sum(-1)
        is_possible = (state.open | ~write).all(-1) & ((num_written > 0) | ~state.open.any(-1))
        refused = F.logsigmoid(-score).masked_fill(~state.open, 0.0)
        choice = torch.where(write, F.logsigmoid(score), refused).sum(-1)
        # A single position may also have been drawn because no other was.
        chosen = score.masked_fill(~state.open, -torch.inf).log_softmax(-1).masked_fill(~write, 0.0).sum(-1)
        choice = torch.where(num_written == 1, torch.logaddexp(choice, refused.sum(-1) + chosen), choice)
        implied = self._decide(prediction, state, write)
        law = law_of_rule(implied, prediction, state, decision, drawn=not self.greedy)
        return law._replace(drawn=law.drawn + choice, agrees=law.agrees & is_possible)

    def _score(self, prediction: Prediction) -> Tensor:
        return (prediction.confidence.double() - self.tau) / self.softness

    def _decide(self, prediction: Prediction, state: DenoiseState, write: Tensor) -> Decision:
        tokens = propose(prediction, state, greedy=self.greedy)
        return Decision(tokens=tokens, write=write, renoise=state.open & ~write)
