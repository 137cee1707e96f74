"""The log-probability of each written token, and of its best alternatives, in the prediction that decided it."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from dgemma.run.records import StepRecord


class Scores(NamedTuple):
    """Candidates of every position: the written token, then the k most probable ones, best first."""

    tokens: Tensor  # (..., C, 1 + k) int64
    log_probs: Tensor  # (..., C, 1 + k) float32

    @classmethod
    def of_step(cls, record: StepRecord, k: int) -> Self:
        """Score the tokens (B, C) that each row would write if its canvas ended with this step.

        Example: `Scores.of_step(record, 5).log_probs[..., 0]`.
        """
        written = record.state.draft[..., None]
        tokens = torch.cat((written, record.prediction.top(k).tokens), dim=-1) if k else written
        return cls(tokens, record.prediction.log_prob(tokens))

    def update(self, new: Self, decided: Tensor) -> Self:
        """Take the scores of a later step at the positions that it decided, (C,) bool."""
        pairs = zip(new, self, strict=True)
        return type(self)(*(torch.where(decided[:, None], later, earlier) for later, earlier in pairs))

    def row(self, at: int, k: int) -> Self:
        """The scores of one row of a batch, with at most k alternatives."""
        return type(self)(self.tokens[at, :, : 1 + k], self.log_probs[at, :, : 1 + k])
