"""Random texts of three tokens, and a model that returns the predictions of an exact network."""

from typing import Any

import torch
from torch import Tensor

import dgemma
from toy import LENGTH, Network


def random_joint(seed: int, sharpness: float = 3.0) -> Tensor:
    """A distribution over the 27 `SEQUENCES` with strongly dependent positions, (27,)."""
    weight = torch.rand(27, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** sharpness
    return weight / weight.sum()


class ExactModel(dgemma.DiffusionGemma):
    """A model for `evaluate` whose logits for a canvas of three tokens are those of an exact network."""

    def __init__(self, network: Network) -> None:
        vocab_size = network.vocab_size
        config = dgemma.presets.tiny().replace(
            vocab_size=vocab_size,
            canvas_length=LENGTH,
            final_logit_softcapping=1e8,
            bos_token_id=0,
            eos_token_id=2,
            pad_token_id=0,
            num_hidden_layers=2,
            layer_types=("sliding_attention", "full_attention"),
        )
        super().__init__(config)
        self.double()
        self.network, self.takes_noise_level = network, True
        with torch.no_grad():
            self.embed_tokens.weight.copy_(torch.eye(vocab_size, config.hidden_size))

    def embed_canvas(self, canvas: Tensor, signal: Tensor | None = None, noise_level: Tensor | None = None) -> Tensor:
        assert noise_level is not None
        self._canvas = canvas, noise_level
        return self.embed(canvas)

    def run(self, x: Tensor, *args: Any, causal: bool, **options: Any) -> Any:
        if causal:
            return super().run(x, *args, causal=causal, **options)
        canvas, level = self._canvas
        log_probs = self.network.at(level).probabilities(canvas).clamp(min=1e-300).log()
        return torch.nn.functional.pad(log_probs, (0, x.shape[-1] - log_probs.shape[-1])), []
