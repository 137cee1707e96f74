"""The settings of adapters, and linear layers with adapters."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.checks import check_count, check_finite, require_field
from dgemma.doors import replaceable
from dgemma.model.config import GenerationDefaults
from dgemma.model.quantized import QuantizedLinear, Weight, linear, linear_layer

_TARGETS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "dense": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "experts": ("experts",),
    "router": ("router.proj",),
    "self_conditioning": ("self_conditioning.gate_proj", "self_conditioning.up_proj", "self_conditioning.down_proj"),
    "vision_projection": ("vision.embedding_projection",),
}


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """The settings of adapters: their rank, their strength and their targets. The update is alpha / rank · B A.

    Targets are groups of weights: attention, dense, experts, router, self_conditioning, and vision_projection. The
    vision tower itself is never adapted.

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
    if name.startswith("vision.layers."):
        return False
    return any(name == end or name.endswith("." + end) for target in targets for end in _TARGETS[target])


class AdaptedLinear(nn.Module):
    """A linear layer whose output gains scale · B A x."""

    weight: Weight
    base_generation: GenerationDefaults  # of the base model; training adapters may change the model's noise

    def __init__(self, base: nn.Linear | QuantizedLinear, lora: LoRA) -> None:
        super().__init__()
        self.weight, self.lora = base.weight, lora
        self.lora_a, self.lora_b = new_pair(base.weight, lora.rank)

    @replaceable
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight) + F.linear(
            self.lora.scale * F.linear(x, self.lora_a.to(x.dtype)), self.lora_b.to(x.dtype)
        )

    def updates(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of the base weight in this module, and the update of its adapter."""
        yield "weight", self.lora_b @ self.lora_a * self.lora.scale

    def base(self) -> nn.Linear | QuantizedLinear:
        """Return the layer without its adapter."""
        return linear_layer(self.weight)


def new_pair(weight: Weight, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A (…, rank, in) and B (…, out, rank), both zeros; `add_lora` then draws A.

    Both are in float32 or wider, because updates are small.
    """
    *experts, num_out, num_in = weight.shape
    dtype = torch.promote_types(weight.dtype, torch.float32) if isinstance(weight, Tensor) else torch.float32
    a, b = (
        torch.zeros(*experts, *shape, dtype=dtype, device=weight.device) for shape in ((rank, num_in), (num_out, rank))
    )
    return nn.Parameter(a), nn.Parameter(b)
