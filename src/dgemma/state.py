"""The state of a canvas being denoised: tensors only, so that a step is a pure function of it.

Researchers read it, change a field with `dataclasses.replace`, splice rows of one state into another, save it. What is
not a tensor (the noise process) is a frozen value that keys a CUDA graph and never changes inside a canvas.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dgemma import draws

if TYPE_CHECKING:
    from dgemma.noise import Noise
    from dgemma.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class DenoiseState:
    """One batch of canvases in the middle of denoising. B rows, C positions.

    `open` marks positions still to decide. With commits that persist it shrinks; a sampler that decides everything
    anew each step (the published one) has every position open that is not frozen. `frozen` positions never change.
    `noise_level` is 1 - α before the step, `next_noise_level` after it.
    """

    canvas: Tensor  # (B, C) int64
    open: Tensor  # (B, C) bool
    frozen: Tensor  # (B, C) bool
    draft: Tensor  # (B, C) int64: what would be committed if the canvas ended now
    done: Tensor  # (B,) bool
    block: Tensor  # (B,) int64
    step: Tensor  # (B,) int64, counted up from 0
    num_steps: Tensor  # (B,) int64, the cap
    noise_level: Tensor  # (B,) float64
    next_noise_level: Tensor  # (B,) float64
    temperature: Tensor  # (B,) float32
    seeds: Tensor  # (B,) int64
    noise: "Noise"
    allowed: Tensor | None = None  # bool, broadcastable to (B, C, V)
    self_cond: "Prediction | Tensor | None" = None  # what the next forward is conditioned on
    memory: Any = None  # the sampler's own
    stop_memory: Any = None  # the stop rule's own
    injected: Mapping[str, Tensor] = field(default_factory=dict)  # purpose → (B, C) uniforms that replace the counter's

    @property
    def batch_size(self) -> int:
        return self.canvas.shape[0]

    @property
    def canvas_len(self) -> int:
        return self.canvas.shape[1]

    @property
    def device(self) -> torch.device:
        return self.canvas.device

    def uniform(self, purpose: str) -> Tensor:
        """One uniform in [0, 1) per position, (B, C) float64: a function of (seed, block, step, position, purpose)."""
        if purpose in self.injected:
            return self.injected[purpose]
        return draws.uniform(self.seeds, self.block, self.step, self.canvas_len, purpose)

    def row_uniform(self, purpose: str) -> Tensor:
        """One uniform in [0, 1) per row, (B,) float64."""
        if purpose in self.injected:
            return self.injected[purpose]
        return draws.uniform(self.seeds, self.block, self.step, 1, purpose)[:, 0]
