"""What `generate` needs of a model."""

from typing import Protocol

import torch
from torch import Tensor

from dgemma.diffusion.prediction import Prediction
from dgemma.model.cache import PrefixCache
from dgemma.model.config import GenerationDefaults, ModelConfig


class Denoiser(Protocol):
    """What `generate` needs of a model: the reference `DiffusionGemma`, the fused engine, or a fake in a test.

    A class may also have `step(state, *, cache, knobs)`, the same function as `step(model, state, ...)` made faster,
    `read_ahead(values)`, which is `values.tolist()` while the device begins the next step, `uniform`, which is
    `draws.uniform` made faster, and `takes_noise_level`: where it is True, `denoise` is told the canvas's `noise_level`
    (B,).
    """

    config: ModelConfig
    generation: GenerationDefaults

    @property
    def device(self) -> torch.device: ...
    def encode(
        self, tokens: Tensor, cache: PrefixCache | None = None, attention_mask: Tensor | None = None
    ) -> PrefixCache: ...
    def denoise(
        self, canvas: Tensor, cache: PrefixCache, self_cond: Prediction | Tensor | None = None
    ) -> Prediction: ...
