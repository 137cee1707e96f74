"""The state of an autoregressive run between two tokens, and the rule that draws the next one."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dgemma.diffusion.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class CausalState:
    """The state of an autoregressive run between two tokens."""

    token: Tensor  # (B, 1) int64, the last token, which the model has not read
    number: Tensor  # (B,) int64, of the next token
    done: Tensor  # (B,) bool, rows that wrote a stop token
    broken: Tensor  # (B,) bool, rows whose last prediction was NaN
    seeds: Tensor  # (B,) int64


@dataclass(frozen=True, kw_only=True)
class CausalRule:
    """The rule by which every token of a run is drawn."""

    temperature: float
    top_k: int | None
    top_p: float | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int

    def draw(self, prediction: Prediction, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the next token (B, 1) of each row by uniforms (B, 1). Also return the entropies (B,)."""
        if self.top_k == 1:
            shaped = prediction.shaped(temperature=self.temperature)
            # Sampling gives the same token, but needs a sort. The entropy ignores `top_k`; it is only tested for NaN.
            return shaped.argmax, shaped.entropy[:, 0]
        shaped = prediction.shaped(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        return shaped.sample(uniform), shaped.entropy[:, 0]

    def choose(self, prediction: Prediction, state: CausalState, uniform: Tensor) -> CausalState:
        """Draw the next token from a prediction of one position, by uniforms (B, 1). Nothing waits for the device."""
        drawn, entropy = self.draw(prediction, uniform)
        token = torch.where(state.done[:, None], self.pad_token_id, drawn)
        broken, done = entropy.isnan() & ~state.done, state.done
        for stop in self.eos_token_ids:
            done = done | (token[:, 0] == stop)
        return replace(state, token=token, number=state.number + 1, done=done, broken=broken)
