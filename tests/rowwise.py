"""A denoiser for tests of the loop, whose rows are exactly independent of their batch."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

import dgemma
from dgemma import GenerationDefaults, Prediction
from dgemma.model.cache import PrefixCache


@dataclass
class RowwiseDenoiser(dgemma.Denoiser):
    """A fake whose prediction is an exact function of each row's canvas and prefix, for any batch."""

    config: dgemma.ModelConfig = field(
        default_factory=lambda: dgemma.presets.tiny().replace(vocab_size=64, canvas_length=16)
    )
    generation: GenerationDefaults = field(default_factory=lambda: GenerationDefaults(eos_token_id=(1,)))
    device = torch.device("cpu")

    def encode(
        self, tokens: Tensor, cache: PrefixCache | None = None, attention_mask: Tensor | None = None
    ) -> PrefixCache:
        cache = cache or PrefixCache(self.config, tokens.shape[0], device="cpu", dtype=torch.float32)
        sums = tokens.float()[:, None, :, None]
        new = [(sums.expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3]),) * 2 for layer in cache.layers]
        real = None if attention_mask is None else attention_mask[:, -tokens.shape[1] :].bool()
        cache.append(new, real)
        return cache

    def denoise(self, canvas: Tensor, cache: PrefixCache, self_cond: object = None) -> Prediction:
        keys = cache.layers[-1].view(cache.num_slots)[0][:, 0, :, 0]  # (B, S): the tokens themselves
        seen = torch.arange(keys.shape[1]) < cache.lengths[:, None]
        prefix = keys.long().masked_fill(~seen, 0).sum(-1)  # exact integers: no rounding depends on the batch
        position = torch.arange(canvas.shape[1])
        seed = (prefix[:, None] * 31 + canvas * 7 + position * 13) % 97
        vocab = torch.arange(self.config.vocab_size)
        return Prediction((((seed[..., None] + vocab) * 29) % 101).float() / 6)
