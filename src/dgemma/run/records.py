"""Records of a run: its steps, its committed blocks and its result."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dgemma.checks import short_repr
from dgemma.diffusion.decision import Decision
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState
from dgemma.model.cache import Cache
from dgemma.run.changes import Changes
from dgemma.run.knobs import Knobs


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One denoising step of B rows and C positions. `state` is the state after the step."""

    prediction: Prediction  # shaped by temperature, allowed tokens, top-k and top-p
    accepted: Tensor  # (B, C) bool: written
    renoised: Tensor  # (B, C) bool: returned to noise
    active: Tensor  # (B,) bool: rows that were not done before the step
    num_forwards: int = 1  # calls of the network in this step; a guided step takes two
    verdict: Tensor  # (3, B) int64, see `judge`
    before: DenoiseState  # the state before the step, without its self-conditioning
    state: DenoiseState
    cache: Cache  # the cache that the step used
    knobs: Knobs

    block = property(attrgetter("before.block"))  # (B,)
    step = property(attrgetter("before.step"))  # (B,)
    seeds = property(attrgetter("before.seeds"))  # (B,)
    temperature = property(attrgetter("before.temperature"))  # (B,)
    rows = property(attrgetter("before.rows"))  # (B,) row numbers in the whole batch, without finished rows
    canvas = property(attrgetter("before.canvas"))  # (B, C) before the step
    argmax = property(attrgetter("prediction.argmax"))  # (B, C)
    entropy = property(attrgetter("prediction.entropy"))  # (B, C)
    confidence = property(attrgetter("prediction.confidence"))  # (B, C)

    __repr__ = short_repr

    @property
    def noise_level(self) -> Tensor:
        """The noise level of the canvas before the step, (B,)."""
        return self.knobs.sampler.noise_level(self.before)

    @property
    def log_prob(self) -> Tensor:
        """The log-probability of the decision, (B,) float64: positions, tokens and renoising, but not the noise tokens.

        It is 0 in rows that were done before. It is computed on demand, from the prediction.
        """
        decision = Decision(tokens=self.state.canvas, write=self.accepted, renoise=self.renoised)
        law = self.knobs.sampler.law(self.prediction, self.before, decision)
        return torch.where(self.active, law.log_prob, 0.0)


@dataclass(frozen=True, kw_only=True)
class BlockCommit:
    """A finished block: tokens (B, C), padded after a row's stop token; `finished` (B,) marks rows that have ended."""

    block: int
    tokens: Tensor
    finished: Tensor
    steps: Tensor  # (B,) steps each row needed
    forwards: Tensor = None  # type: ignore[assignment]  # (B,) forwards each row needed; by default one per step

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.forwards is None:  # files of earlier runs have none
            object.__setattr__(self, "forwards", self.steps)


@dataclass(frozen=True, kw_only=True, repr=False)
class Output:
    """The result of a run: tokens (B, P + N), new_tokens (B, N), and the steps of every block (B, blocks)."""

    tokens: Tensor
    new_tokens: Tensor
    steps: Tensor
    tokens_per_forward: Tensor  # (B,): new tokens without padding, divided by forwards until the row finished
    cache: Cache

    def __repr__(self) -> str:
        tokens_per_forward = [round(value, 2) for value in self.tokens_per_forward.tolist()]
        return (
            f"{type(self).__name__}(new_tokens={tuple(self.new_tokens.shape)}, steps={self.steps.tolist()}, "
            f"{tokens_per_forward=})"
        )


class Moment(NamedTuple):
    """Everything that the next step needs: `step(model, moment.state, cache=moment.cache, knobs=moment.knobs)`."""

    state: DenoiseState
    cache: Cache
    knobs: Knobs


class Denoised(NamedTuple):
    """A finished canvas: drafts (B, C), the steps and forwards of each row (B,), and the knobs after the last step."""

    drafts: Tensor
    steps: Tensor
    forwards: Tensor
    knobs: Knobs


OnStep = Callable[[StepRecord], Changes]
Events = Generator[StepRecord | BlockCommit, Changes, Output]
RunEvent = TypeVar("RunEvent", StepRecord, StepRecord | BlockCommit)  # of a canvas, or of a run
Result = TypeVar("Result")


def shows_progress(on_step: OnStep | None) -> bool:
    """Return True for a callback that replaces the progress bar: its `shows_progress` is true, as in a live view."""
    return bool(getattr(on_step, "shows_progress", False))
