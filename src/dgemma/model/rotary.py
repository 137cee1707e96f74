"""Rotary position embedding (arXiv:2104.09864), whole-head ("default") and partial ("proportional")."""

import torch
from torch import Tensor

from dgemma.model.config import LayerShape


def rotary_table(shape: LayerShape, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin: positions (B, T) → two (B, T, 1, H), which multiply (B, T, heads, H).

    Proportional rope rotates the first `rotary_pairs` pairs with the frequencies of the whole head.
    """
    pair = torch.arange(shape.head_dim // 2, device=positions.device, dtype=torch.float32)
    frequencies = shape.rope_theta ** (-2.0 * pair / shape.head_dim)
    frequencies = torch.where(pair < shape.rotary_pairs, frequencies, 0.0)
    angles = positions[..., None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, :, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pair i = (x[i], x[i + H/2]) of each head by its angle. x: (B, T, heads, H)."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)  # under autocast the tables are float32
