"""A sampler's decision about each position. `transition` makes the decision of the exact reverse step."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dgemma.checks import require, short_repr
from dgemma.diffusion.state import DenoiseState


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The sampler's decision: next canvas = where(write, tokens, where(renoise, noise, canvas)); all (B, C).

    `memory` is what the sampler remembers for the next step, in `state.memory`.

    Example: `Decision(tokens=prediction.argmax, write=state.open, renoise=torch.zeros_like(state.open))`.
    """

    tokens: Tensor
    write: Tensor
    renoise: Tensor
    memory: Any = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        fits = self.tokens.dtype == torch.int64 and self.write.dtype == self.renoise.dtype == torch.bool
        fits = fits and self.tokens.shape == self.write.shape == self.renoise.shape
        require(fits, "Decision", "hold int64 tokens and boolean write and renoise of one shape (B, C)", self)


def transition(x0: Tensor, state: DenoiseState, *, kappa: float = 1.0) -> Decision:
    """Draw from the exact kernel q(z_s | z_t, x0) for sampled x0 (B, C): write x0, keep z_t, or return to noise.

    If x0 is drawn from p(x0 | z_t), this is the exact reverse step of each position. One uniform chooses between
    writing, keeping and noise. `settle` draws the noise tokens with a second uniform. kappa: as in `routes`.
    """
    clean, stay = routes(x0, state, kappa)
    u = state.uniform("event")
    return Decision(tokens=x0, write=u < clean, renoise=u >= clean + stay)


def routes(x0: Tensor, state: DenoiseState, kappa: float) -> tuple[Tensor, Tensor]:
    """The probabilities (B, C) that a step from this state writes x0 (B, C), and that it keeps the token.

    kappa: the share of the exact reverse kernel. The rest noises x0 afresh to the next level.
    """
    next_level = state.next_noise_level
    clean, stay = state.noise.routes(x0, state.canvas, state.noise_level, next_level, allowed=state.allowed)
    if kappa == 1:
        return clean, stay
    return kappa * clean + (1 - kappa) * state.noise.clean_share(next_level)[:, None], kappa * stay
