"""The sizes of the vision tower, under their published names."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

# Published fields that the tower implements for one value only; any other would change the result.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False, None),
    "attention_dropout": (0.0, None),
    "use_clipped_linears": (False, None),
}


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Geometry of the vision tower.

    Example: `VisionConfig.from_hf(config.vision_config).num_hidden_layers` is 27 for the published model.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    patch_size: int = 16
    pooling_kernel_size: int = 3
    position_embedding_size: int = 10_240  # the most patches per side
    rms_norm_eps: float = 1e-6
    rope_theta: float = 100.0
    standardize: bool = False

    @classmethod
    def from_hf(cls, published: Mapping[str, Any]) -> Self:
        """Read the `vision_config` of a published config.json."""
        for name, values in _FIXED.items():
            if published.get(name, values[0]) not in values:
                raise ValueError(f"vision_config.{name} must be {values[0]!r}, got {published[name]!r}.")
        heads = published["num_attention_heads"]
        if published.get("num_key_value_heads", heads) != heads:
            raise ValueError(
                f"vision_config.num_key_value_heads must equal num_attention_heads {heads}, "
                f"got {published['num_key_value_heads']}."
            )
        own = {field.name for field in fields(cls)}
        rope = published.get("rope_parameters") or {}
        values = {name: value for name, value in published.items() if name in own}
        return cls(**values, **{name: value for name, value in rope.items() if name in own - values.keys()})

    @property
    def patch_dim(self) -> int:
        """The number of values of a patch."""
        return 3 * self.patch_size**2
