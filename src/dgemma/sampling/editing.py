"""Token editing (LLaDA2.1, arXiv:2602.08676): fill masks above a threshold, and rewrite committed tokens."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from dgemma.checks import Checked, Probability, at_least
from dgemma.diffusion.law import law_of_rule
from dgemma.sampling.base import Decision, DenoiseState, Law, Prediction, Sampler
from dgemma.sampling.ranking import best


@dataclass(frozen=True, kw_only=True)
class TokenEditing(Sampler, Checked):
    """Write the most probable token: on a mask if its confidence is > `tau_mask`, on a token if it is > `tau_edit`.

    The most confident mask is always filled. Edits need a network that was trained on wrong tokens. They can alternate
    between two tokens, so at most `max_edit_steps` steps edit after the last mask is filled. Combine it with the stop
    rule `Unchanged`, which ends a canvas when a step changes nothing.

    Example: `TokenEditing(tau_mask=0.7, tau_edit=0.5)`, quality; `TokenEditing(tau_mask=0.5, tau_edit=0.0)`, speed.
    """

    tau_mask: Probability = 0.7
    tau_edit: Probability = 0.5
    max_edit_steps: Annotated[int, at_least(0)] = 16
    valid_for: ClassVar[frozenset[str]] = frozenset({"mask"})

    @property
    def revises(self) -> bool:
        return True

    @property
    def edits(self) -> bool:
        return True

    def start(self, state: DenoiseState) -> Tensor:
        return torch.zeros_like(state.step)

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        confidence, tokens = prediction.confidence, prediction.argmax
        fill = (state.open & (confidence > self.tau_mask)) | best(confidence, state.open, 1)
        steps_since_filled = state.memory + ~state.open.any(-1)  # (B,)
        may_edit = steps_since_filled <= self.max_edit_steps
        edit = ~state.open & ~state.frozen & (tokens != state.canvas) & (confidence > self.tau_edit) & may_edit[:, None]
        write = fill | edit
        return Decision(tokens=tokens, write=write, renoise=torch.zeros_like(write), memory=steps_since_filled)

    def law(self, prediction: Prediction, state: DenoiseState, decision: Decision) -> Law:
        return law_of_rule(self(prediction, state), prediction, state, decision, drawn=False)
