"""The Ψ sampler: part of each ancestral step forgets the canvas (arXiv:2602.21185)."""

from dataclasses import dataclass
from typing import ClassVar

from dgemma.checks import Probability
from dgemma.sampling.ancestral import Ancestral


@dataclass(frozen=True, kw_only=True)
class Psi(Ancestral):
    """Draw x0, then the next canvas from κ q(z_s | z_t, x0) + (1 - κ) q(z_s | x0).

    The second part noises x0 afresh. It corrects wrong tokens, which under uniform noise make themselves more likely.
    The canvas keeps its distribution at every noise level, so it is exact for an exact network with many steps.
    kappa=1 is `Ancestral`.

    Example: `Psi(kappa=0.9)`.
    """

    kappa: Probability = 0.9  # type: ignore[misc]
    valid_for: ClassVar[frozenset[str]] = frozenset({"uniform"})
