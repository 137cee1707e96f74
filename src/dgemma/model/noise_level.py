"""An optional input for the noise level of the canvas, which the published model does not have.

Uniform noise leaves no trace, so the exact prediction depends on the level (arXiv:2605.22765). Mask noise shows it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_NUM_FREQUENCIES = 8
_LARGEST_LOG_SNR = 12.0  # beyond it not even thousands of tokens tell levels apart


class NoiseLevelEmbedding(nn.Module):
    """A vector for a noise level: waves of its log-SNR, log((1 - level) / level), through a small MLP."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(2 * _NUM_FREQUENCIES, hidden_size, bias=False)
        self.down_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, noise_level: Tensor) -> Tensor:
        """Embed noise_level (...) in [0, 1] → (..., D)."""
        log_snr = torch.logit(1 - noise_level.double()).clamp(-_LARGEST_LOG_SNR, _LARGEST_LOG_SNR)
        octaves = torch.exp2(torch.arange(_NUM_FREQUENCIES, device=noise_level.device, dtype=torch.float64))
        angles = math.pi / 2 / _LARGEST_LOG_SNR * log_snr[..., None] * octaves  # the slowest wave spans the range once
        waves = torch.cat([angles.sin(), angles.cos()], dim=-1).to(self.up_proj.weight.dtype)
        return self.down_proj(F.gelu(self.up_proj(waves), approximate="tanh"))
