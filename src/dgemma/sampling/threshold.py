"""Confidence-aware parallel decoding: a fixed threshold or a factor (Fast-dLLM, arXiv:2505.22618)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from dgemma.checks import Checked, Count, Probability, above
from dgemma.sampling.base import Decision, DenoiseState, FixedOrder, Prediction
from dgemma.sampling.ranking import best, choose_sub_block, propose


@dataclass(frozen=True, kw_only=True)
class Threshold(FixedOrder, Checked):
    """Commit every open position whose confidence is at least `tau`, and always the most confident one.

    The comparison is ≥, as in Fast-dLLM; LLaDA2.0 published the same rule with > and tau = 0.95. With block_len,
    sub-blocks are decided from left to right; the paper uses 32. greedy writes the argmax, as in the paper.

    Example: `Threshold(tau=0.9, block_len=32, greedy=True)`.
    """

    tau: Probability = 0.9
    block_len: Count | None = None
    greedy: bool = False
    valid_for: ClassVar[frozenset[str]] = frozenset({"mask"})

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        among = state.open & choose_sub_block(state, self.block_len).span
        confidence = prediction.confidence
        write = (among & (confidence >= self.tau)) | best(confidence, among, 1)
        tokens = propose(prediction, state, greedy=self.greedy)
        return Decision(tokens=tokens, write=write, renoise=torch.zeros_like(write))


@dataclass(frozen=True, kw_only=True)
class FactorThreshold(FixedOrder, Checked):
    """Commit the n most confident open positions; n is the largest with (n + 1)(1 - the n-th confidence) < `factor`.

    n is at least 1. With factor ≤ 1 and `greedy`, the written tokens are also the most probable ones of their joint
    distribution (Fast-dLLM, theorem 1).

    Example: `FactorThreshold(factor=1.0, greedy=True)`.
    """

    factor: Annotated[float, above(0)] = 1.0
    block_len: Count | None = None
    greedy: bool = False
    valid_for: ClassVar[frozenset[str]] = frozenset({"mask"})

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        among = state.open & choose_sub_block(state, self.block_len).span
        # Closed positions rank last, with a confidence that never passes.
        confidence = prediction.confidence.masked_fill(~among, -torch.inf)
        descending = confidence.sort(dim=-1, descending=True).values
        n = torch.arange(1, state.canvas_len + 1, device=state.device)
        # The left side grows with n, so the positions that pass are a prefix.
        count = ((n + 1) * (1 - descending) < self.factor).sum(-1).clamp(min=1)
        write = best(confidence, among, count)
        tokens = propose(prediction, state, greedy=self.greedy)
        return Decision(tokens=tokens, write=write, renoise=torch.zeros_like(write))
