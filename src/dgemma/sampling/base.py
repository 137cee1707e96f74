"""The sampler interface: a frozen value that turns a prediction into a decision.

A new sampler is one file: subclass `Sampler`, declare `valid_for`, write `__call__`. It may define `start`, for memory,
and `final`, the tokens to commit. With a `law`, its runs have log-probabilities; skip it on a first reading.

    a sampler declares          because                                              example
    redecides                   it decides all unfrozen positions at each step       EntropyBound, uniform noise
    revises                     a committed token may still change                   ReMDM
    edits                       it writes other tokens at closed positions           TokenEditing
    stops_when_certain=False    it corrects predictions that are already certain     LeaveOneOutGibbs
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from dgemma.diffusion.decision import Decision
from dgemma.diffusion.law import Law, law_of_rule
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState

__all__ = ["Decision", "DenoiseState", "FixedOrder", "Law", "Prediction", "Sampler"]  # every sampler's file needs them


class Sampler:
    """Base class: from a prediction, decides what to write to the canvas and what to return to noise.

    `state.open` marks the positions still to decide. Positions that are neither written nor renoised keep their token.
    A written position is closed permanently, unless the noise is in `redecides` or the sampler `revises`. `valid_for`
    names the noises it may run under: "mask", "uniform", "hybrid".

    Draw random numbers with `state.uniform("any name")`. A step reads its memory from `state.memory`, and returns the
    next in `Decision.memory`. Tensors in a memory must be batch-first.

    Write pure tensor code (no `.item()`, no `if` on a tensor, no boolean indexing): then a CUDA graph can capture it.

    Example:
        @dataclass(frozen=True, kw_only=True)
        class Everything(Sampler):
            def __call__(self, prediction, state):
                tokens = prediction.sample(state.uniform("token"))
                return Decision(tokens=tokens, write=state.open, renoise=torch.zeros_like(state.open))
    """

    valid_for: ClassVar[frozenset[str]] = frozenset({"mask", "uniform", "hybrid"})
    redecides: ClassVar[frozenset[str]] = frozenset()
    stops_when_certain: ClassVar[bool] = True  # if False, a run has no stop rule by default

    @property
    def revises(self) -> bool:
        """True if a committed token may still change. Otherwise a canvas with nothing open is done."""
        return False

    @property
    def has_fixed_order(self) -> bool:
        """True if positions follow from the predictions, never from a draw, and commits persist under mask noise.

        Such a sampler writes a text in one run only, so `evaluate` has the exact likelihood of the text.
        """
        return False

    @property
    def edits(self) -> bool:
        """True if the sampler may write another token at a closed position that is not frozen.

        A prediction under a constraint is then not conditioned on the tokens of such positions. Otherwise it is.
        """
        return False

    def start(self, state: DenoiseState) -> Any:
        """Return the memory of a new canvas."""
        return None

    def noise_level(self, state: DenoiseState) -> Tensor:
        """Return the noise level of the canvas, (B,), for the denoiser. Samplers with their own level override this.

        Example: `LeaveOneOutGibbs().noise_level(state)` is `state.memory`, the level at which it corrects the canvas.
        """
        return state.noise_level

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        raise NotImplementedError(f"{type(self).__name__} must define __call__(self, prediction, state) -> Decision.")

    def law(self, prediction: Prediction, state: DenoiseState, decision: Decision) -> Law:
        """Return the law of a decision that this sampler may have made: its probability, noise tokens aside.

        Tokens of the decision count only where it writes. A position that is open and neither written nor renoised has
        a proposed token, too, which is unknown. Differentiable in the prediction. `law_of_rule` has the probability of
        tokens, also under a constraint, where they are drawn together and not position by position.

        Example: `Threshold().law(prediction, state, decision).log_prob` is (B,).
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no law, so its runs have no log-probability. Define law(self, prediction, "
            "state, decision) -> Law, for example with law_of_rule."
        )

    def final(self, prediction: Prediction, state: DenoiseState) -> Tensor:
        """Return the tokens (B, C) to commit if the canvas ends now: the canvas, with the argmax at open positions.

        state: the state after the step.
        """
        return torch.where(state.open, prediction.argmax, state.canvas)


class FixedOrder(Sampler):
    """Base class of samplers whose positions follow from the prediction; tokens are drawn unless `greedy`.

    Example: `Threshold` is one. Its law is the probability of the drawn tokens.
    """

    greedy: bool  # a field of every subclass

    @property
    def has_fixed_order(self) -> bool:
        return True

    def law(self, prediction: Prediction, state: DenoiseState, decision: Decision) -> Law:
        return law_of_rule(self(prediction, state), prediction, state, decision, drawn=not self.greedy)
