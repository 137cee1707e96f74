"""Entropy-bound acceptance (Ben-Hamu et al., arXiv:2505.24857), the sampler DiffusionGemma was published with."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from dgemma.checks import Checked, at_least
from dgemma.sampling.base import Decision, DenoiseState, FixedOrder, Prediction
from dgemma.sampling.ranking import certainty, propose


@dataclass(frozen=True, kw_only=True)
class EntropyBound(FixedOrder, Checked):
    """Accept the most certain positions while Σh - max h of their entropies stays within `bound` nats.

    This difference is an upper bound on the information that the accepted tokens share. If it is small, drawing them
    independently causes little error. Under mask noise an accepted token is committed. Under uniform noise every
    position is decided again at each step, refused positions get new noise, and the argmax is committed at the end.
    That is the published loop; it has no distributional guarantee.

    `order` ranks the positions. `greedy` writes the argmax instead of a sample. `commit` selects the final
    tokens: the "argmax" at open positions (transformers), or the "canvas" after the last step, including the noise at
    refused positions (Google's JAX code).

    Example: `EntropyBound(bound=0.1)`; `EntropyBound(bound=0.0)` accepts one position per step.
    """

    bound: Annotated[float, at_least(0)] = 0.1  # nats
    order: Literal["entropy", "confidence", "margin"] = "entropy"
    greedy: bool = False
    commit: Literal["argmax", "canvas"] = "argmax"
    valid_for: ClassVar[frozenset[str]] = frozenset({"mask", "uniform"})
    redecides: ClassVar[frozenset[str]] = frozenset({"uniform"})

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        score = certainty(prediction, self.order).masked_fill(~state.open, -torch.inf)
        ranked = score.argsort(dim=-1, descending=True, stable=True)  # (B, C)
        # Closed positions rank last: their entropy must not count.
        entropy = prediction.entropy.gather(-1, ranked)
        # A running maximum, because the newest entropy is the largest only for order="entropy". The first term is
        # h - h = 0, so the most certain position always passes.
        shared = entropy.cumsum(-1) - entropy.cummax(-1).values
        accept = torch.zeros_like(state.open).scatter(-1, ranked, shared <= self.bound) & state.open
        tokens = propose(prediction, state, greedy=self.greedy)
        return Decision(tokens=tokens, write=accept, renoise=state.open & ~accept)

    def final(self, prediction: Prediction, state: DenoiseState) -> Tensor:
        """Return the tokens (B, C) that `commit` selects, never the mask token."""
        decided = ~state.open if self.commit == "argmax" else ~state.noise.masked(state.canvas)
        return torch.where(decided, state.canvas, prediction.argmax)
