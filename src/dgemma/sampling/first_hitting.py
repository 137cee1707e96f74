"""First-hitting sampling: masked diffusion in continuous time, one token per step (arXiv:2409.02908)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dgemma.diffusion.law import log_written
from dgemma.sampling.base import Decision, DenoiseState, Law, Prediction, Sampler
from dgemma.sampling.ranking import is_choice, log_random_choice


@dataclass(frozen=True, kw_only=True)
class FirstHitting(Sampler):
    """Reveal one masked position per step, chosen uniformly. Exact for an exact network, at one forward per token.

    With m masks left, the next one is revealed at the previous noise level times u^(1/m), for every schedule. The
    memory is that level (B,), so `schedule.time(1 - memory)` is the time of the reverse process. Use at least as many
    steps as there are masks: positions that are still open at the end become the argmax.

    Example: `generate(model, tokens, noise=MaskNoise(vocab_size), sampler=FirstHitting(), steps=256)`.
    """

    valid_for: ClassVar[frozenset[str]] = frozenset({"mask"})

    def start(self, state: DenoiseState) -> Tensor:
        return state.noise_level

    def noise_level(self, state: DenoiseState) -> Tensor:
        return state.memory

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        rank = state.open.cumsum(-1)  # (B, C), from 1 at the first open position
        num_open = rank[:, -1]
        chosen = (state.row_uniform("position") * num_open).long() + 1  # (B,)
        level = state.memory * state.row_uniform("clock") ** (1 / num_open.clamp(min=1).double())
        return Decision(
            tokens=prediction.sample(state.uniform("token")),
            write=state.open & (rank == chosen[:, None]),
            renoise=torch.zeros_like(state.open),
            memory=torch.where(num_open > 0, level, state.memory),
        )

    def law(self, prediction: Prediction, state: DenoiseState, decision: Decision) -> Law:
        agrees = is_choice(decision.write, state.open, 1) & ~decision.renoise.any(-1)
        drawn = log_written(prediction, decision.tokens, decision.write) + log_random_choice(decision.write, state.open)
        return Law(drawn, agrees, self(prediction, state).memory)
