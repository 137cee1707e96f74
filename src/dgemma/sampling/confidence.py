"""Top-k unmasking: MaskGIT (arXiv:2202.04200), LLaDA (arXiv:2502.09992) and Dream (arXiv:2508.15487) in one rule."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dgemma.prediction import Prediction
from dgemma.sampling.base import Decision, Sampler
from dgemma.sampling.ranking import Turn, best, certainty, even_share, take_turn
from dgemma.state import DenoiseState

_ROUNDING = 1e-9  # L · 0.5 must not fall below its integer
_SMALLEST_UNIFORM = 2.0**-54  # half of what the counter can draw above 0; keeps Gumbel noise finite


@dataclass(frozen=True, kw_only=True)
class Confidence(Sampler):
    """Commit the k most certain open positions each step; the rest stay masked (LLaDA's "low-confidence re-masking").

    quota: "fixed" shares the open positions evenly over the steps left; "cosine" is MaskGIT's, which leaves
    ⌊L cos(π/2 · (n+1)/N)⌋ of the L positions first open still masked after step n. Either commits at least one.
    order: "confidence", "margin", "entropy" or "random"; "log_confidence" ranks alike but is the scale to which MaskGIT
    adds its noise. order_temperature τ adds τ times Gumbel noise to the score (Dream's `alg_temp`: choosing from
    softmax(score / τ)), annealed by 1 - (n+1)/N if `anneal` (MaskGIT's choice temperature). block_len decides
    sub-blocks from left to right. greedy writes the argmax: the published T = 0 of LLaDA and Dream.

    One token a step is exact for every order, since none looks at the sampled token.

    Example: LLaDA is `Confidence(greedy=True)`, semi-autoregressive `Confidence(greedy=True, block_len=32)`.
    """

    order: Literal["confidence", "log_confidence", "margin", "entropy", "random"] = "confidence"
    quota: Literal["fixed", "cosine"] = "fixed"
    block_len: int | None = None
    order_temperature: float = 0.0
    anneal: bool = False
    greedy: bool = False
    valid_for: ClassVar[frozenset[str]] = frozenset({"mask"})

    def __post_init__(self) -> None:
        if self.order not in ("confidence", "log_confidence", "margin", "entropy", "random"):
            raise ValueError(
                f"Confidence.order must be a known order, got {self.order!r}. "
                "Use 'confidence', 'log_confidence', 'margin', 'entropy' or 'random'."
            )
        if self.quota not in ("fixed", "cosine"):
            raise ValueError(f"Confidence.quota must be 'fixed' or 'cosine', got {self.quota!r}. Use one of the two.")
        if self.block_len is not None and self.block_len < 1:
            raise ValueError(f"Confidence.block_len must be >= 1, got {self.block_len}. Use None for the whole canvas.")
        if self.order_temperature < 0:
            raise ValueError(
                f"Confidence.order_temperature must be >= 0, got {self.order_temperature}. Use 0 for a strict order."
            )

    def start(self, state: DenoiseState) -> Any:
        return state.open if self.quota == "cosine" else None

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        turn = take_turn(state, self.block_len)
        count = even_share(turn, state) if self.quota == "fixed" else self._cosine_share(turn, state)
        write = best(self._score(prediction, state), state.open & turn.span, count)
        tokens = prediction.argmax if self.greedy else prediction.sample(state.uniform("token"))
        return Decision(tokens=tokens, write=write, renoise=torch.zeros_like(write), memory=state.memory)

    def _score(self, prediction: Prediction, state: DenoiseState) -> Tensor:
        if self.order == "random":
            return state.uniform("order")
        score = certainty(prediction, self.order)
        if self.order_temperature == 0:
            return score
        gumbel = -(-state.uniform("order").clamp(min=_SMALLEST_UNIFORM).log()).log()
        steps_left = (state.num_steps - state.step - 1).double() / state.num_steps  # 1 - (n+1)/N, (B,)
        strength = self.order_temperature * (steps_left[:, None] if self.anneal else 1.0)
        return score.double() + strength * gumbel

    def _cosine_share(self, turn: Turn, state: DenoiseState) -> Tensor:
        first_open = (state.memory & turn.span).sum(-1)  # L, (B,)
        num_steps = (turn.end_step - turn.first_step).clamp(min=1).double()
        progress = ((state.step + 1 - turn.first_step) / num_steps).clamp(0, 1)
        keep = (first_open * torch.cos(progress * (math.pi / 2)) + _ROUNDING).floor().long()
        return ((state.open & turn.span).sum(-1) - keep).clamp(min=1)
