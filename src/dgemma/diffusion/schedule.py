"""Schedules: the share of the text that survives at time t (t = 0 clean, t = 1 noise), each named by its formula.

Papers use "cosine" for two curves: `OneMinusCosine` is the one of MD4 (arXiv:2406.04329) and Duo
(arXiv:2506.10892), `PlainCosine` the one in the code of MDLM and BD3 (arXiv:2503.09573).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.checks import require_field

LEAST_NOISE = 1 - 1e-6  # from this level on, a canvas has less than 1e-4 nats of information per token: pure noise


class Schedule:
    """α(t), which falls from 1 at t = 0 to 0 at t = 1, except where noted. Methods keep the shape of t."""

    def alpha(self, t: Tensor) -> Tensor:
        """1 minus the noise level at time t. It is the share of clean tokens, except under hybrid noise."""
        raise NotImplementedError

    def derivative(self, t: Tensor) -> Tensor:
        """dα/dt, never positive."""
        raise NotImplementedError

    def time(self, alpha: Tensor) -> Tensor:
        """The inverse of `alpha`: the t with this α, or the nearest end if no t has it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Linear(Schedule):
    """α = 1 - t; the "log-linear" of MDLM and SEDD is the same curve.

    Example: `Linear().alpha(torch.tensor(0.25))` is 0.75.
    """

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t

    def derivative(self, t: Tensor) -> Tensor:
        return -torch.ones_like(t)

    def time(self, alpha: Tensor) -> Tensor:
        return 1 - alpha


@dataclass(frozen=True)
class OneMinusCosine(Schedule):
    """α = 1 - cos(π(1 - t)/2): the cosine of MD4 and Duo, which spends more time near noise.

    Example: `OneMinusCosine().alpha(torch.tensor(0.5))` is 0.2929.
    """

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - torch.cos(math.pi / 2 * (1 - t))

    def derivative(self, t: Tensor) -> Tensor:
        return -math.pi / 2 * torch.sin(math.pi / 2 * (1 - t))

    def time(self, alpha: Tensor) -> Tensor:
        return 1 - torch.acos(1 - alpha) * 2 / math.pi


@dataclass(frozen=True)
class PlainCosine(Schedule):
    """α = cos(πt/2): the cosine of the MDLM and BD3 code, which spends more time near clean text.

    Example: `PlainCosine().alpha(torch.tensor(0.5))` is 0.7071.
    """

    def alpha(self, t: Tensor) -> Tensor:
        return torch.cos(math.pi / 2 * t)

    def derivative(self, t: Tensor) -> Tensor:
        return -math.pi / 2 * torch.sin(math.pi / 2 * t)

    def time(self, alpha: Tensor) -> Tensor:
        return torch.acos(alpha) * 2 / math.pi


@dataclass(frozen=True)
class ClippedLinear(Schedule):
    """1 - α = low + (high - low)·t: BD3's clipped noise levels.

    A training schedule: with t uniform the noise level is uniform on [low, high]. BD3 found [0, .5] best for blocks of
    128 tokens and [.3, .8] for blocks of 16.

    Example: `ClippedLinear(low=0.3, high=0.8).alpha(torch.tensor(0.0))` is 0.7.
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        require_field(0 <= self.low < self.high <= 1, self, "low", f"be a noise level below high, {self.high}")

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - self.low - (self.high - self.low) * t

    def derivative(self, t: Tensor) -> Tensor:
        return torch.full_like(t, self.low - self.high)

    def time(self, alpha: Tensor) -> Tensor:
        return ((1 - alpha - self.low) / (self.high - self.low)).clamp(0.0, 1.0)


@dataclass(frozen=True)
class InverseSmoothstep(Schedule):
    """t = 3s² - 2s³ for the noise level s = 1 - α, which spends more time between text and noise.

    A training schedule: with t uniform the noise level has the density 6s(1 - s), Beta(2, 2). dα/dt is infinite at
    both ends.

    Example: `InverseSmoothstep().time(torch.tensor(0.75))` is 0.15625.
    """

    def alpha(self, t: Tensor) -> Tensor:
        return 0.5 + torch.sin(torch.asin(1 - 2 * t) / 3)

    def derivative(self, t: Tensor) -> Tensor:
        alpha = self.alpha(t)
        return -1 / (6 * alpha * (1 - alpha))

    def time(self, alpha: Tensor) -> Tensor:
        level = 1 - alpha
        return level.square() * (3 - 2 * level)


@dataclass(frozen=True)
class Loop(Schedule):
    """ReMDM's loop (arXiv:2503.00307): as t falls, α rises to `plateau`, stays there in [stop, start], and rises to 1.

    On the plateau ReMDM masks and reveals at a constant level.

    Example: `Loop().alpha(torch.tensor([0.55, 0.3, 0.05]))` is 0.9 three times.
    """

    plateau: float = 0.9
    start: float = 0.55
    stop: float = 0.05

    def __post_init__(self) -> None:
        require_field(0 < self.plateau < 1, self, "plateau", "lie in (0, 1)", "It is the α at which the loop runs.")
        fits = 0 < self.stop < self.start < 1
        require_field(fits, self, "stop", f"be a time below start, {self.start}", "t falls from 1 to 0.")

    def alpha(self, t: Tensor) -> Tensor:
        before = self.plateau * (1 - t) / (1 - self.start)
        after = 1 - (1 - self.plateau) * t / self.stop
        return torch.where(t > self.start, before, torch.where(t > self.stop, torch.full_like(t, self.plateau), after))

    def derivative(self, t: Tensor) -> Tensor:
        before = torch.full_like(t, -self.plateau / (1 - self.start))
        after = torch.full_like(t, -(1 - self.plateau) / self.stop)
        return torch.where(t > self.start, before, torch.where(t > self.stop, torch.zeros_like(t), after))

    def time(self, alpha: Tensor) -> Tensor:
        """The inverse of `alpha`; on the plateau, the `start` of the loop."""
        before = 1 - alpha * (1 - self.start) / self.plateau
        after = (1 - alpha) * self.stop / (1 - self.plateau)
        # Converting α to a level and back rounds it. Values this close count as the plateau, where dα/dt is 0.
        rests = (alpha - self.plateau).abs() <= 4 * torch.finfo(torch.float32).eps
        return torch.where(rests, self.start, torch.where(alpha > self.plateau, after, before))
