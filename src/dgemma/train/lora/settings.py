"""The settings of adapters: rank, strength and targets."""

from collections.abc import Iterable
from dataclasses import dataclass

from dgemma.checks import check_count, check_finite, require_field

_TARGETS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "dense": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "experts": ("experts",),
    "router": ("router.proj",),
    "self_conditioning": ("self_conditioning.gate_proj", "self_conditioning.up_proj", "self_conditioning.down_proj"),
}


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """The settings of adapters: their rank, their strength and their targets. The update is alpha / rank · B A.

    Targets are groups of weights: attention, dense, experts, router, self_conditioning.

    Example: `LoRA(rank=16, alpha=32, targets=("attention", "dense"))` is the choice of several public recipes.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("attention", "dense", "experts", "router", "self_conditioning")

    def __post_init__(self) -> None:
        targets = self.targets
        named = isinstance(targets, list | tuple) and all(isinstance(target, str) for target in targets)
        require_field(named, self, "targets", "be a tuple of names", f"Choose from {', '.join(_TARGETS)}.")
        object.__setattr__(self, "targets", tuple(targets))
        check_count(self, "rank", fix="Use 8.")
        check_finite(self, "alpha", above=0, fix="Use twice the rank.")
        unknown = [target for target in self.targets if target not in _TARGETS]
        if unknown or not self.targets:
            raise ValueError(f"LoRA.targets must be among {', '.join(_TARGETS)}, got {self.targets}. Use one or more.")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def is_target(name: str, targets: Iterable[str]) -> bool:
    return any(name == end or name.endswith("." + end) for target in targets for end in _TARGETS[target])
