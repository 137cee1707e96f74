"""Random texts of three tokens, their exact networks by enumeration, and a model that returns their predictions.

Everything here is computed from the definition of the noise, independently of `dgemma`.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import dgemma
from dgemma import Noise, Prediction
from toy import SEQUENCES, likelihood

NUM_POSITIONS = 3


def random_joint(seed: int, sharpness: float = 3.0) -> Tensor:
    """A distribution over the 27 `SEQUENCES` with strongly dependent positions, (27,)."""
    weight = torch.rand(27, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** sharpness
    return weight / weight.sum()


@dataclass(frozen=True)
class Network:
    """The exact network of a joint: log p(x at l | canvas), or without position l ("loo"), by enumeration.

    `noise` is the noise over the three real tokens, `vocab_size` the width of the logits. `level` is (R,), or (R, 3)
    for one level per position.
    """

    joint: Tensor
    noise: Noise
    vocab_size: int
    parametrisation: str = "mean"
    level: Tensor | None = None

    def at(self, level: Tensor) -> "Network":
        return replace(self, level=level.double())

    def probabilities(self, canvas: Tensor) -> Tensor:
        """canvas (R, 3) → (R, 3, V)."""
        level = torch.full((1, 1), 0.5, dtype=torch.float64) if self.level is None else self.level
        level = (level[:, None] if level.dim() == 1 else level).expand(canvas.shape)
        table = likelihood(self.noise, level.reshape(-1)).unflatten(0, canvas.shape)  # (R, 3, x, z)
        of_token = table.gather(-1, canvas[..., None, None].expand(-1, -1, 3, 1))[..., 0]  # (R, 3, x)
        columns = torch.arange(NUM_POSITIONS)
        factors = of_token[:, columns, SEQUENCES]  # (R, 27, 3)
        found = torch.zeros(*canvas.shape, self.vocab_size, dtype=torch.float64)
        for position in range(NUM_POSITIONS):
            others = [at for at in range(NUM_POSITIONS) if self.parametrisation == "mean" or at != position]
            weight = self.joint * factors[..., others].prod(-1)  # (R, 27)
            found[:, position].index_add_(1, SEQUENCES[:, position], weight)
        return found / found.sum(-1, keepdim=True)

    def denoise(self, canvas: Tensor, cache: Any = None, self_cond: Any = None) -> Prediction:
        return Prediction(self.probabilities(canvas).log())


class ExactModel(dgemma.DiffusionGemma):
    """A model for `evaluate` whose logits for a canvas of three tokens are those of an exact network."""

    def __init__(self, network: Network) -> None:
        vocab_size = network.vocab_size
        config = dgemma.presets.tiny().replace(
            vocab_size=vocab_size,
            canvas_length=NUM_POSITIONS,
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
