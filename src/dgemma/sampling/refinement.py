"""Block refinement for uniform noise, as in diffusers: positions committed by quota or confidence stay committed."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from dgemma.checks import Checked, Probability
from dgemma.diffusion.law import law_of_rule
from dgemma.sampling.base import Decision, DenoiseState, Law, Prediction, Sampler
from dgemma.sampling.ranking import best, propose


@dataclass(frozen=True, kw_only=True)
class BlockRefinement(Sampler, Checked):
    """Commit the most confident positions up to a growing quota, and every position with a confidence above `tau`.

    At step n of N, counted from 0, the quota is ⌈(n+1) L / N⌉ of the L unfrozen positions. The rest returns to noise.
    Uniform noise is not visible in the canvas, so `state.open` records which positions are committed. With `tau_edit`,
    the argmax replaces a committed token if its confidence exceeds `tau_edit`. While more positions are committed than
    the quota, nothing below `tau` is committed, as published.

    Example: `BlockRefinement(tau=0.95, greedy=True)`.
    """

    tau: Probability = 0.95
    tau_edit: Probability | None = None
    greedy: bool = False
    valid_for: ClassVar[frozenset[str]] = frozenset({"uniform"})

    @property
    def revises(self) -> bool:
        return self.tau_edit is not None

    @property
    def edits(self) -> bool:
        return self.revises

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        confidence = prediction.confidence
        num_unfrozen = (~state.frozen).sum(-1)
        target = ((state.step + 1) * num_unfrozen + state.num_steps - 1) // state.num_steps
        num_committed = num_unfrozen - state.open.sum(-1)
        commit = best(confidence, state.open, target - num_committed) | (state.open & (confidence > self.tau))

        tokens = torch.where(state.open, propose(prediction, state, greedy=self.greedy), prediction.argmax)
        write = commit
        if self.tau_edit is not None:
            edited = ~state.open & ~state.frozen & (tokens != state.canvas) & (confidence > self.tau_edit)
            write = commit | edited
        return Decision(tokens=tokens, write=write, renoise=state.open & ~commit)

    def law(self, prediction: Prediction, state: DenoiseState, decision: Decision) -> Law:
        return law_of_rule(self(prediction, state), prediction, state, decision, drawn=state.open & (not self.greedy))
