"""An optional input for the noise level of the canvas, which the published model does not have.

Uniform noise is not visible in the canvas, so the exact prediction depends on the level (arXiv:2605.22765). Under mask
noise the canvas shows its level.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_NUM_FREQUENCIES = 8
_LARGEST_LOG_SNR = 12.0  # at 12, one token in 160,000 is noise; larger values look the same on a canvas


class NoiseLevelEmbedding(nn.Module):
    """Embedding of a noise level: sines and cosines of its log-SNR, log((1 - level) / level), through a small MLP."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(2 * _NUM_FREQUENCIES, hidden_size, bias=False)
        self.down_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, noise_level: Tensor) -> Tensor:
        """Embed noise_level (...) in [0, 1] → (..., D)."""
        log_snr = torch.logit(1 - noise_level.double()).clamp(-_LARGEST_LOG_SNR, _LARGEST_LOG_SNR)
        octaves = torch.exp2(torch.arange(_NUM_FREQUENCIES, device=noise_level.device, dtype=torch.float64))
        angles = math.pi / 2 / _LARGEST_LOG_SNR * log_snr[..., None] * octaves  # the slowest wave covers -π/2 to π/2
        waves = torch.cat([angles.sin(), angles.cos()], dim=-1).to(self.up_proj.weight.dtype)
        return self.down_proj(F.gelu(self.up_proj(waves), approximate="tanh"))
