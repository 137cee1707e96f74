"""Path planning, P2-self (Peng et al., arXiv:2502.03540): unmask high scores and mask low scores again."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from dgemma.checks import Checked, at_least
from dgemma.diffusion.law import law_of_rule, log_mean
from dgemma.diffusion.prediction import Allow
from dgemma.sampling.base import Decision, DenoiseState, Law, Prediction, Sampler
from dgemma.sampling.ranking import best, is_choice, propose

_ROUNDING = 1e-9  # in floating point (1 - 0.9) · 10 is below 1, but it must count as 1


@dataclass(frozen=True, kw_only=True)
class P2(Sampler, Checked):
    """After each step, mask the positions of lowest score, committed or not, as many as the noise level requires.

    This number is ⌊L (1 - α)⌋. L counts the unfrozen positions, and 1 - α is the noise level after the step. In the
    paper α is called κ(t), and the schedule is linear.

    The score is the log-probability of the token that a position has or would get. For committed positions it is
    multiplied by `eta`. Logs are negative, so eta = 0 never masks a committed token, 1 treats all positions alike, and
    larger values revise more.

    Example: `P2(eta=1.0)`.
    """

    eta: Annotated[float, at_least(0)] = 1.0
    greedy: bool = False
    valid_for: ClassVar[frozenset[str]] = frozenset({"mask"})

    @property
    def revises(self) -> bool:
        return self.eta > 0

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        tokens = propose(prediction, state, greedy=self.greedy)
        score = self._score(prediction.log_prob(torch.where(state.open, tokens, state.canvas)), state.open)
        mask = best(-score, ~state.frozen, self._num_masked(state))
        return Decision(tokens=tokens, write=state.open & ~mask, renoise=mask & ~state.open)

    def law(self, prediction: Prediction, state: DenoiseState, decision: Decision) -> Law:
        if self.greedy:
            return law_of_rule(self(prediction, state), prediction, state, decision, drawn=False)
        kept = torch.where(state.open, decision.write, ~decision.renoise) & ~state.frozen
        masked = ~kept & ~state.frozen
        tokens = torch.where(state.open, decision.tokens, state.canvas)[..., None]
        log_probs = prediction.logits - prediction.statistics.log_normalizer[..., None]
        scores = self._score(log_probs, state.open[..., None])  # (B, C, V)
        # The tokens with which each position gets this decision: a masked one ranks below all that are kept.
        fits = _rank_below(scores, scores.gather(-1, tokens)[..., 0], kept) | ~masked[..., None]
        agrees = is_choice(masked, ~state.frozen, self._num_masked(state))
        agrees &= torch.where(state.open, ~decision.renoise, ~decision.write & fits.gather(-1, tokens)[..., 0]).all(-1)
        # An open position has drawn its token: the written one, or an unknown one with which it is masked.
        is_token = torch.arange(prediction.vocab_size, device=state.device) == tokens
        possible = torch.where(decision.write[..., None], is_token, fits | ~state.open[..., None])
        return Law(log_mean(prediction, Allow(possible)), agrees)

    def _num_masked(self, state: DenoiseState) -> Tensor:
        return ((~state.frozen).sum(-1) * state.next_noise_level + _ROUNDING).floor().long()

    def _score(self, log_prob: Tensor, is_open: Tensor) -> Tensor:
        # A committed token that top-p or an allowed set now excludes has log-probability -inf, and 0 · -inf is NaN. A
        # proposal of probability 1 must rank below a committed token of score 0, so it is clamped below 0.
        limits = torch.finfo(log_prob.dtype)
        log_prob = log_prob.clamp(min=limits.min)
        return torch.where(is_open, log_prob.clamp(max=-limits.tiny), self.eta * log_prob)


def _rank_below(scores: Tensor, score: Tensor, kept: Tensor) -> Tensor:
    """Marks, of all scores (B, C, V) that a position may have, those below the score (B, C) of every `kept` one."""
    lowest, first = (found[:, None, None] for found in score.masked_fill(~kept, torch.inf).min(-1))
    wins_ties = torch.arange(score.shape[1], device=score.device)[:, None] < first  # leftmost first, as in `best`
    return torch.where(wins_ties, scores <= lowest, scores < lowest)
