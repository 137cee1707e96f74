"""The sampler seam: a frozen value that turns a prediction into a decision.

A new sampler is one file: subclass `Sampler`, declare `valid_for`, write `__call__`. It may keep memory (`start` gives
the first, the decision returns the next) and say what is committed at the end (`final`).
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from dgemma.diffusion.decision import Decision
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState


class Sampler:
    """Decides, from a prediction, what is written to the canvas and what returns to noise.

    `state.open` marks the positions still to decide; what is neither written nor renoised stays as it is. What is
    written is settled for good, unless the process is among `redecides`, under which every unfrozen position is open
    again at each step (the published sampler under uniform noise), or the sampler `revises`. `valid_for` names the
    processes it may run under: "mask", "uniform", "hybrid". Draw by `state.uniform("any name")`. What is to be
    remembered goes into `Decision.memory`, comes back as `state.memory`, and begins as `start(state)`; its tensors have
    rows first.

    Write pure tensor code (no `.item()`, no `if` on a tensor, no boolean indexing): then a CUDA graph can capture it.

    Example:
        @dataclass(frozen=True, kw_only=True)
        class Everything(Sampler):
            def __call__(self, prediction, state):
                tokens = prediction.sample(state.uniform("token"))
                return Decision(tokens=tokens, write=state.open, renoise=torch.zeros_like(state.open))
    """

    valid_for: ClassVar[frozenset[str]] = frozenset({"mask", "uniform", "hybrid"})
    # Noise processes under which every unfrozen position is decided anew at every step; elsewhere commits persist.
    redecides: ClassVar[frozenset[str]] = frozenset()
    # Whether a checkpoint's stop rule, which waits for certain predictions, may end it; one that mends what the
    # prediction is certain of takes all its steps, unless a rule is given.
    stops_when_certain: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        unknown = sorted({*cls.valid_for, *cls.redecides} - {"mask", "uniform", "hybrid"})
        if unknown:
            raise ValueError(f'{cls.__name__}.valid_for must hold "mask", "uniform" or "hybrid", got {unknown}.')

    @property
    def revises(self) -> bool:
        """Whether a committed token may still change. If not, a canvas with nothing open is done."""
        return False

    def start(self, state: DenoiseState) -> Any:
        """The memory a fresh canvas begins with."""
        return None

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        raise NotImplementedError(f"{type(self).__name__} must define __call__(self, prediction, state) -> Decision.")

    def final(self, prediction: Prediction, state: DenoiseState) -> Tensor:
        """What is committed if the canvas ends after this step: the canvas, and the argmax where it is still open.

        state is the one after the step. (B, C) int64.
        """
        return torch.where(state.open, prediction.argmax, state.canvas)
