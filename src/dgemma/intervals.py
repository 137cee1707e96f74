"""Numbers with confidence intervals, by Student's t."""

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

_MANY = 1000  # degrees of freedom; above this, Student's t and the normal distribution differ by about 0.1 %


class Estimate(NamedTuple):
    """A number and the half-width of its confidence interval."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.error:.4f}"


def mean_of(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Return the mean of independent values with its interval, which is infinite for a single value."""
    if len(values) == 1:
        return Estimate(values[0], math.inf)
    return Estimate(fmean(values), half_width(confidence, len(values) - 1) * stdev(values) / math.sqrt(len(values)))


@cache
def half_width(confidence: float, degrees: int) -> float:
    """Return the half-width of an interval in standard errors, from Student's t with these degrees of freedom.

    Example: `half_width(0.95, 2)` is 4.303; three texts give two degrees of freedom.
    """
    if degrees > _MANY:
        return NormalDist().inv_cdf((1 + confidence) / 2)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _inside(angle: float, degrees: int) -> float:
    """Return P(|t| ≤ √degrees · tan(angle)) for Student's t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    is_odd = degrees % 2
    term, total = math.cos(angle) ** is_odd, 0.0
    for power in range(is_odd, degrees - 1, 2):
        if power > 1:
            term *= math.cos(angle) ** 2 * (power - 1) / power
        total += term
    return (angle + math.sin(angle) * total) * 2 / math.pi if is_odd else math.sin(angle) * total
