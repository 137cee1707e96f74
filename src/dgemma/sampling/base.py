"""The sampler seam: a frozen value that turns a prediction into a decision.

A new sampler is one file: subclass `Sampler`, declare `valid_for`, write `__call__`. It may keep memory (`start` gives
the first, the decision returns the next) and say what is committed at the end (`final`).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dgemma.prediction import Prediction
from dgemma.state import DenoiseState


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do with each position: next canvas = where(write, tokens, where(renoise, noise, canvas)); all (B, C)."""

    tokens: Tensor
    write: Tensor
    renoise: Tensor
    memory: Any = None


class Sampler:
    """Decides, from a prediction, what is written to the canvas and what returns to noise.

    Pure tensor code (no `.item()`, no `if` on a tensor, no boolean indexing), so that a CUDA graph can capture it.
    """

    valid_for: ClassVar[frozenset[str]] = frozenset({"mask", "uniform", "hybrid"})
    # Noise processes under which every unfrozen position is decided anew at every step; elsewhere commits persist.
    redecides: ClassVar[frozenset[str]] = frozenset()

    @property
    def revises(self) -> bool:
        """Whether a committed token may still change. If not, a canvas with nothing open is done."""
        return False

    def start(self, state: DenoiseState) -> Any:
        """The memory a fresh canvas begins with."""
        return None

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        raise NotImplementedError

    def final(self, prediction: Prediction, state: DenoiseState) -> Tensor:
        """What is committed if the canvas ends after this step: the canvas, and the argmax where it is still open.

        state is the one after the step. (B, C) int64.
        """
        return torch.where(state.open, prediction.argmax, state.canvas)
