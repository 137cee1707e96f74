"""Path planning, P2-self (Peng et al., arXiv:2502.03540): unmask high scores and mask low scores again."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from dgemma.checks import check_size
from dgemma.diffusion.decision import Decision
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState
from dgemma.sampling.base import Sampler
from dgemma.sampling.ranking import best, propose

_ROUNDING = 1e-9  # in floating point (1 - 0.9) · 10 is below 1, but it must count as 1


@dataclass(frozen=True, kw_only=True)
class P2(Sampler):
    """After each step, mask the positions of lowest score, committed or not, as many as the noise level requires.

    This number is ⌊L (1 - α)⌋. L counts the unfrozen positions, and 1 - α is the noise level after the step. In the
    paper α is called κ(t), and the schedule is linear.

    The score is the log-probability of the token that a position has or would get. For committed positions it is
    multiplied by `eta`. Logs are negative, so eta = 0 never masks a committed token, 1 treats all positions alike, and
    larger values revise more.

    Example: `P2(eta=1.0)`.
    """

    eta: float = 1.0
    greedy: bool = False
    valid_for: ClassVar[frozenset[str]] = frozenset({"mask"})

    def __post_init__(self) -> None:
        check_size(self, "eta", fix="Use 0 to never mask a committed token again.")

    @property
    def revises(self) -> bool:
        return self.eta > 0

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        tokens = propose(prediction, state, greedy=self.greedy)
        log_prob = prediction.log_prob(torch.where(state.open, tokens, state.canvas))
        # A committed token that top-p or an allowed set now excludes has log-probability -inf, and 0 · -inf is NaN. A
        # proposal of probability 1 must rank below a committed token of score 0, so it is clamped below 0.
        limits = torch.finfo(log_prob.dtype)
        log_prob = log_prob.clamp(min=limits.min)
        score = torch.where(state.open, log_prob.clamp(max=-limits.tiny), self.eta * log_prob)
        num_masked = ((~state.frozen).sum(-1) * state.next_noise_level + _ROUNDING).floor().long()
        mask = best(-score, ~state.frozen, num_masked)
        return Decision(tokens=tokens, write=state.open & ~mask, renoise=mask & ~state.open)
