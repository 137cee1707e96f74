"""Top-k unmasking: MaskGIT (arXiv:2202.04200), LLaDA (arXiv:2502.09992) and Dream (arXiv:2508.15487) in one rule."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from dgemma.checks import FINITE, Count, at_least, check_types, require_field
from dgemma.diffusion import draws
from dgemma.diffusion.law import law_of_rule
from dgemma.sampling.base import Decision, DenoiseState, Law, Prediction, Sampler
from dgemma.sampling.ranking import (
    SubBlock,
    best,
    certainty,
    choose_sub_block,
    even_share,
    is_choice,
    log_gumbel_choice,
    log_random_choice,
    propose,
)

_LEAST_STRENGTH = 1e-9  # the strength of annealed noise is 0 at the last step, which commits all that is left
_ROUNDING = 1e-9  # keeps floor(L · cos) from losing 1 to a rounding error


@dataclass(frozen=True, kw_only=True)
class Confidence(Sampler):
    """Commit the k most certain open positions per step; the rest stay masked (LLaDA's "low-confidence re-masking").

    quota sets k, at least 1. "fixed" divides the open positions evenly among the remaining steps. "cosine" is
    MaskGIT's: after step n, ⌊L cos(π/2 · (n+1)/N)⌋ of the L initially open positions are still masked.

    order is the score: "confidence", "log_confidence", "margin", "entropy" or "random". order_temperature τ adds τ
    times Gumbel noise to the score, which samples from softmax(score / τ) (Dream's `alg_temp`). `anneal` multiplies τ
    by 1 - (n+1)/N (MaskGIT's choice temperature). Without noise, "log_confidence" gives the same order as "confidence".
    With noise, the noise is added to the logarithm, as in MaskGIT.

    With block_len, sub-blocks are decided from left to right. greedy writes the argmax, like LLaDA and Dream at T = 0.
    With one token per step every order is exact, because no order depends on the sampled token.

    Example: LLaDA is `Confidence(greedy=True)`, semi-autoregressive `Confidence(greedy=True, block_len=32)`.
    """

    order: Literal["confidence", "log_confidence", "margin", "entropy", "random"] = "confidence"
    quota: Literal["fixed", "cosine"] = "fixed"
    block_len: Count | None = None
    order_temperature: Annotated[float, at_least(0), FINITE] = 0.0
    anneal: bool = False
    greedy: bool = False
    valid_for: ClassVar[frozenset[str]] = frozenset({"mask"})

    def __post_init__(self) -> None:
        check_types(self)
        if self.order == "random":
            fix = "That order has no score to add noise to."
            require_field(self.order_temperature == 0, self, "order_temperature", "be 0 for order 'random'", fix)
        if self.order_temperature == 0:
            rule, fix = "be False without an order_temperature", "Set order_temperature, which anneal lowers."
            require_field(not self.anneal, self, "anneal", rule, fix)

    @property
    def has_fixed_order(self) -> bool:
        return self.order != "random" and self.order_temperature == 0

    def start(self, state: DenoiseState) -> Any:
        return state.open if self.quota == "cosine" else None

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        among, count = self._candidates(state)
        write = best(self._score(prediction, state), among, count)
        tokens = propose(prediction, state, greedy=self.greedy)
        return Decision(tokens=tokens, write=write, renoise=torch.zeros_like(write), memory=state.memory)

    def law(self, prediction: Prediction, state: DenoiseState, decision: Decision) -> Law:
        implied, drawn = self(prediction, state), not self.greedy
        if self.has_fixed_order:
            return law_of_rule(implied, prediction, state, decision, drawn=drawn)
        among, count = self._candidates(state)
        if self.order == "random":
            choice = log_random_choice(decision.write, among)
        else:
            score = certainty(prediction, self.order) / self._strength(state).clamp(min=_LEAST_STRENGTH)
            choice = log_gumbel_choice(score, decision.write, among)
        is_possible = is_choice(decision.write, among, count)
        law = law_of_rule(replace(implied, write=decision.write), prediction, state, decision, drawn=drawn)
        return law._replace(drawn=law.drawn + choice, agrees=law.agrees & is_possible)

    def _candidates(self, state: DenoiseState) -> tuple[Tensor, Tensor]:
        """The positions to choose from, (B, C) bool, and how many of them are committed, (B,)."""
        sub_block = choose_sub_block(state, self.block_len)
        count = even_share(sub_block, state) if self.quota == "fixed" else self._cosine_share(sub_block, state)
        return state.open & sub_block.span, count

    def _score(self, prediction: Prediction, state: DenoiseState) -> Tensor:
        if self.order == "random":
            return state.uniform("order")
        score = certainty(prediction, self.order)
        if self.order_temperature == 0:
            return score
        return score.double() + self._strength(state) * draws.gumbel(state.uniform("order"))

    def _strength(self, state: DenoiseState) -> Tensor:
        """The factor of the Gumbel noise, (B, 1)."""
        steps_left = (state.num_steps - state.step - 1).double() / state.num_steps  # 1 - (n+1)/N, (B,)
        return self.order_temperature * (steps_left if self.anneal else torch.ones_like(steps_left))[:, None]

    def _cosine_share(self, sub_block: SubBlock, state: DenoiseState) -> Tensor:
        first_open = (state.memory & sub_block.span).sum(-1)  # L, (B,)
        num_steps = (sub_block.end_step - sub_block.first_step).clamp(min=1).double()
        progress = ((state.step + 1 - sub_block.first_step) / num_steps).clamp(0, 1)
        keep = (first_open * torch.cos(progress * (math.pi / 2)) + _ROUNDING).floor().long()
        return ((state.open & sub_block.span).sum(-1) - keep).clamp(min=1)
