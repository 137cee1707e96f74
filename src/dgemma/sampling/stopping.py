"""Stop rules: frozen values that decide when a canvas is finished, combined with `|` and `&`."""

import operator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from dgemma.checks import Checked, Count, above, as_int, at_least, require, require_field
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState


class StopRule:
    """Base class: decides after each step which rows are done. Pure tensor code, like a sampler.

    `state` is the state after the step. Positions that need not be waited for, such as those after the end of a
    constrained text, are frozen in it. `state.stop_memory` is the memory that the rule returned last; before the first
    step it is that of `start`. Memory is batch-first, so that rows of two states can be spliced.

    Example: `StableAndConfident() | EndOfText()`.
    """

    def start(self, state: DenoiseState) -> Any:
        """Return the memory of a new canvas."""
        return None

    def __call__(self, prediction: Prediction, state: DenoiseState) -> tuple[Tensor, Any]:
        """Return which rows are done, (B,) bool, and the memory for the next step."""
        raise NotImplementedError(
            f"{type(self).__name__} must define __call__(self, prediction, state) -> (done, memory)."
        )

    def __or__(self, other: "StopRule") -> "StopRule":
        return _Either(rules=(self, other))

    def __and__(self, other: "StopRule") -> "StopRule":
        return _Both(rules=(self, other))


def ask(rule: StopRule, prediction: Prediction, state: DenoiseState) -> tuple[Tensor, Any]:
    """Call a rule, check its answer, and return done (B,) bool and the memory.

    Example: `done, memory = ask(StepCap(4), prediction, state)`.
    """
    answer = rule(prediction, state)
    is_pair = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Tensor)
    fits = is_pair and answer[0].dtype == torch.bool and answer[0].shape == state.done.shape
    form, fix = f"return (done, memory), done booleans ({state.batch_size},)", "Return `done, None` without memory."
    require(fits, type(rule).__name__, form, answer[0] if is_pair else answer, fix)
    return answer


@dataclass(frozen=True, kw_only=True)
class _Pair(StopRule):
    rules: tuple[StopRule, StopRule]
    combine: ClassVar[Any]  # a function of the two results

    def start(self, state: DenoiseState) -> tuple[Any, Any]:
        return self.rules[0].start(state), self.rules[1].start(state)

    def __call__(self, prediction: Prediction, state: DenoiseState) -> tuple[Tensor, tuple[Any, Any]]:
        # Both are always called: a rule that misses a step would have the wrong memory.
        (left, right), (left_memory, right_memory) = self.rules, state.stop_memory
        left_done, left_memory = ask(left, prediction, replace(state, stop_memory=left_memory))
        right_done, right_memory = ask(right, prediction, replace(state, stop_memory=right_memory))
        return self.combine(left_done, right_done), (left_memory, right_memory)


class _Either(_Pair):
    combine = operator.or_


class _Both(_Pair):
    combine = operator.and_


@dataclass(frozen=True, kw_only=True)
class StableAndConfident(StopRule, Checked):
    """Done when the argmax equals that of the last `stability` steps and the mean entropy is < `confidence` nats.

    This is the published rule. It ignores frozen positions. `compare` is what the argmax is compared with: the last
    steps' "argmax" (transformers), or the "canvas" that each of the last `stability` steps started from (Google's JAX
    code, with stability 1). The first step at which the rule can stop is `stability + 1`; with "canvas" it is
    `stability`.

    Example: `StableAndConfident(stability=1, confidence=0.005)`.
    """

    stability: Annotated[int, at_least(0)] = 1
    confidence: Annotated[float, above(0)] = 0.005
    compare: Literal["argmax", "canvas"] = "argmax"

    def start(self, state: DenoiseState) -> Tensor:
        batch_size, canvas_len = state.canvas.shape
        nothing = state.canvas.new_full((batch_size, self.stability, canvas_len), -1)  # -1 is no token
        return nothing if self.compare == "argmax" else _push(nothing, state.canvas)

    def __call__(self, prediction: Prediction, state: DenoiseState) -> tuple[Tensor, Tensor]:
        recent: Tensor = state.stop_memory
        argmax = prediction.argmax
        stable = ((recent == argmax[:, None]) | state.frozen[:, None]).all(-1).all(-1)
        num_unfrozen = (~state.frozen).sum(-1).clamp(min=1)
        mean_entropy = prediction.entropy.masked_fill(state.frozen, 0.0).sum(-1) / num_unfrozen
        newest = argmax if self.compare == "argmax" else state.canvas
        return stable & (mean_entropy < self.confidence), _push(recent, newest)


def _push(recent: Tensor, newest: Tensor) -> Tensor:
    """Append the newest canvas (B, C) to the last canvases (B, n, C) and drop the oldest."""
    return torch.cat([recent, newest[:, None]], dim=1)[:, 1:]


@dataclass(frozen=True, kw_only=True)
class EndOfText(StopRule):
    """Done when a stop token is committed and nothing before it is open: only padding would follow.

    Tokens before the stop token are all committed, so this rule never changes them. It needs commits that persist: a
    sampler that decides every position again (EntropyBound on uniform noise) never commits before the end.

    Example: `EndOfText(token_ids=(1, 106, 50))`, the published ones.
    """

    token_ids: tuple[int, ...] = (1, 106, 50)

    def __post_init__(self) -> None:
        fits = bool(self.token_ids) and all(as_int(token) is not None for token in self.token_ids)
        require_field(fits, self, "token_ids", "hold at least one token id", "Omit the rule if there are none.")

    def __call__(self, prediction: Prediction, state: DenoiseState) -> tuple[Tensor, None]:
        is_stop = torch.zeros_like(state.open)
        for token_id in self.token_ids:  # no tensor of ids: building one copies from the host
            is_stop = is_stop | (state.canvas == token_id)
        settled = state.open.cumsum(-1) == 0  # up to and including the position
        return (is_stop & settled).any(-1), None


@dataclass(frozen=True, kw_only=True)
class ConfidenceGap(StopRule, Checked):
    """Done when the mean gap between the two best logits reaches a threshold, one for each third of the run.

    This is Prophet (arXiv:2508.19982). The sampler's `final` then fills open positions with the argmax. The gap of the
    shaped logits is averaged over the unfrozen positions of `span`, (start, stop) on the canvas; None means all of it.
    The published rule uses the span of the answer. Its thresholds are for T = 1 logits of LLaDA and Dream.

    Example: `ConfidenceGap(thresholds=(7.5, 5.0, 2.5), span=(200, 205))`.
    """

    thresholds: tuple[float, float, float] = (7.5, 5.0, 2.5)
    span: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.span is None or 0 <= self.span[0] < self.span[1]
        require_field(fits, self, "span", "be 0 <= start < stop", "Use None for the whole canvas.")

    def start(self, state: DenoiseState) -> None:
        fits = self.span is None or self.span[1] <= state.canvas_len
        rule = f"end within the canvas of {state.canvas_len} tokens"
        require_field(fits, self, "span", rule, "Count its positions from the canvas's start.")

    def __call__(self, prediction: Prediction, state: DenoiseState) -> tuple[Tensor, None]:
        watched = slice(*self.span) if self.span is not None else slice(None)
        # log_prob, because the second best probability may underflow.
        best_two = prediction.log_prob(prediction.top(2).tokens)[:, watched]
        gap = best_two[..., 0] - best_two[..., -1]  # (B, span)
        # If only one token is allowed, the gap is infinite and must not count.
        counts = ~state.frozen[:, watched] & gap.isfinite()
        num_watched = counts.sum(-1)
        mean_gap = gap.masked_fill(~counts, 0.0).sum(-1) / num_watched
        early, middle, late = self.thresholds
        third = 3 * (state.step - 1) // state.num_steps
        threshold = torch.where(third < 1, early, torch.where(third < 2, middle, late))
        return (mean_gap >= threshold) | (num_watched == 0), None


@dataclass(frozen=True, kw_only=True)
class Unchanged(StopRule):
    """Done when nothing is open and the step changed no token: for a sampler that edits.

    Example: `Unchanged() | StepCap(64)`.
    """

    def start(self, state: DenoiseState) -> Tensor:
        return state.canvas

    def __call__(self, prediction: Prediction, state: DenoiseState) -> tuple[Tensor, Tensor]:
        same = (state.canvas == state.stop_memory).all(-1)
        return same & ~state.open.any(-1), state.canvas


@dataclass(frozen=True)
class StepCap(StopRule, Checked):
    """Done `steps` steps after the rule started, even if the run allows more.

    Example: `StableAndConfident() | StepCap(16)`.
    """

    steps: Count

    def start(self, state: DenoiseState) -> Tensor:
        return state.step

    def __call__(self, prediction: Prediction, state: DenoiseState) -> tuple[Tensor, Tensor]:
        first_step: Tensor = state.stop_memory
        return state.step - first_step >= self.steps, first_step
