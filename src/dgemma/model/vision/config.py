"""The sizes of the vision tower, under their published names."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from dgemma.checks import as_int, check_finite, check_types, require, require_field

_LARGEST_SIZE = 1 << 20  # larger sizes are certainly mistakes
# Published fields that the tower implements for one value only; any other would change the result.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False, None),
    "attention_dropout": (0.0, None),
    "use_clipped_linears": (False, None),
}


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Geometry of the vision tower. The defaults are transformers', whose files may omit a field that equals one.

    Example: `dgemma.presets.diffusiongemma_26b_a4b().vision.num_hidden_layers` is 27.
    """

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    head_dim: int = 64
    patch_size: int = 16
    pooling_kernel_size: int = 3
    position_embedding_size: int = 10_240  # the most patches per side
    rms_norm_eps: float = 1e-6
    rope_theta: float = 100.0
    standardize: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        for field in fields(self):
            if field.type is int:
                fits = 1 <= (as_int(getattr(self, field.name)) or 0) <= _LARGEST_SIZE
                require_field(fits, self, field.name, f"be an integer from 1 to {_LARGEST_SIZE}")
        for name in ("rms_norm_eps", "rope_theta"):
            check_finite(self, name, above=0)
        require_field(self.head_dim % 4 == 0, self, "head_dim", "be a multiple of 4, because rope rotates two halves")

    @classmethod
    def from_hf(cls, published: Mapping[str, Any]) -> Self:
        """Read the `vision_config` of a published config.json."""
        heads = published.get("num_attention_heads", cls.num_attention_heads)
        for name, values in {**_FIXED, "num_key_value_heads": (heads,)}.items():
            value = published.get(name, values[0])
            require(
                value in values, f"vision_config.{name}", f"be {values[0]!r}", value, "dgemma runs only that value."
            )
        rope = published.get("rope_parameters") or {}
        require(isinstance(rope, Mapping), "vision_config.rope_parameters", "be a dictionary", rope)
        own = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in {**rope, **published}.items() if name in own})

    @property
    def patch_dim(self) -> int:
        """The number of values of a patch."""
        return 3 * self.patch_size**2
