"""All that training draws: which canvas of a row, its noise level, its noise, and whether it sees a first prediction.

Every draw is a function of the row's seed and of the canvas alone, so it is the same for a canvas among others.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dgemma.diffusion import draws
from dgemma.diffusion.noise import Noise
from dgemma.train.canvases import Canvases
from dgemma.train.fused import fused

_CANVAS, _TIME, _EVENT, _TOKEN, _SELF_COND = map(
    draws.purpose_word, ("training canvas", "training time", "training event", "training token", "training self_cond")
)


class Noised(NamedTuple):
    """Canvases with noise on them."""

    z: Tensor  # (B, K, C)
    replaced: Tensor  # (B, K, C) bool; a replaced token may have drawn itself
    level: Tensor  # (B, K)
    self_cond: Tensor  # (B, K) bool


def draw_choice(seeds: Tensor) -> Tensor:
    """A uniform for each row's seed (B,), by which one of its canvases is chosen: (B,)."""
    zeros = torch.zeros_like(seeds)
    return fused(draws.uniform_of_word, seeds.device)(seeds, zeros, zeros, 1, _CANVAS)[:, 0]


def noise_canvases(
    noise: Noise,
    cut: Canvases,
    seeds: Tensor,
    *,
    t_range: tuple[float, float],
    self_cond_prob: float,
    allowed: Tensor | None = None,
) -> Noised:
    """Put noise on a batch's canvases, each at a time of its own, uniform on `t_range`; pinned tokens stay.

    seeds (B,); allowed (V,) bool: what random noise draws from, None for all.

    Example: `noise_canvases(noise, cut, seeds, t_range=(0.0, 1.0), self_cond_prob=0.5).z`.
    """
    u = fused(_draw, seeds.device)(seeds, cut.index, cut.x.shape[-1])
    low, high = t_range
    level = 1 - noise.schedule.alpha(low + (high - low) * u.time)  # (B, K, 1) float64
    z = noise.corrupt(cut.x, level, u.event, u.token, allowed=allowed)
    replaced = (u.event >= noise.clean_share(level)) & ~cut.pinned
    self_cond = u.self_cond < self_cond_prob
    return Noised(torch.where(cut.pinned, cut.x, z), replaced, level[..., 0], self_cond[..., 0])


class _Draws(NamedTuple):
    time: Tensor  # (B, K, 1)
    event: Tensor  # (B, K, C)
    token: Tensor  # (B, K, C)
    self_cond: Tensor  # (B, K, 1)


def _draw(seeds: Tensor, index: Tensor, canvas_len: int) -> _Draws:
    """The uniforms of canvases `index` (B, K)."""
    rows, canvas = seeds[:, None].expand_as(index).flatten(), index.flatten()

    def uniform(num_positions: int, word: int) -> Tensor:
        u = draws.uniform_of_word(rows, canvas, torch.zeros_like(canvas), num_positions, word)
        return u.unflatten(0, index.shape)

    return _Draws(uniform(1, _TIME), uniform(canvas_len, _EVENT), uniform(canvas_len, _TOKEN), uniform(1, _SELF_COND))
