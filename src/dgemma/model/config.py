"""The model's configuration: the published field names, frozen, validated in one place.

`from_hf` reads a published file, and `to_hf` writes one that transformers accepts, with functions of `published.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from dgemma.checks import FINITE, Checked, ValueRule, above, at_least, check_types, require, require_field
from dgemma.model import published
from dgemma.model.published import FULL, LARGEST_SIZE, SLIDING, is_id

_INTEGER = f"be an integer from {{}} to {LARGEST_SIZE}"
Dimension = Annotated[int, ValueRule(_INTEGER.format(1), lambda value: 1 <= value <= LARGEST_SIZE)]
Number = Annotated[int, ValueRule(_INTEGER.format(0), lambda value: 0 <= value <= LARGEST_SIZE)]
Positive = Annotated[float, above(0), FINITE]
NotNegative = Annotated[float, at_least(0), FINITE]
_DEFAULT_ROPE: Mapping[str, Mapping[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The sizes that differ between sliding-window and full-attention layers."""

    kind: str
    num_key_value_heads: int
    head_dim: int
    window: int | None  # keys a query sees, itself included; None: all
    rope_theta: float
    rotary_pairs: int  # pairs that rotate, of head_dim / 2

    @property
    def is_sliding(self) -> bool:
        return self.kind == SLIDING


@dataclass(frozen=True, kw_only=True)
class DenoiserConfig:
    """The sizes that a run reads from any denoiser; `ModelConfig` adds the geometry of DiffusionGemma.

    `vocab_size` bounds the token ids, `canvas_length` is the number of positions that are denoised together, and
    `max_position_embeddings` limits the prefix and the canvas together.

    Example: `DenoiserConfig(vocab_size=512, canvas_length=32, max_position_embeddings=1024)`.
    """

    vocab_size: Dimension
    canvas_length: Dimension = 256
    max_position_embeddings: Dimension = 262_144

    def __post_init__(self) -> None:
        check_types(self)
        most = self.max_position_embeddings
        require_field(self.canvas_length <= most, self, "canvas_length", f"be at most max_position_embeddings, {most}")


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Geometry of the vision tower. The defaults are transformers', whose files may omit a field that equals one.

    Example: `dgemma.presets.diffusiongemma_26b_a4b().vision.num_hidden_layers` is 27.
    """

    hidden_size: Dimension = 768
    intermediate_size: Dimension = 3072
    num_hidden_layers: Dimension = 16
    num_attention_heads: Dimension = 12
    head_dim: Dimension = 64
    patch_size: Dimension = 16
    pooling_kernel_size: Dimension = 3
    position_embedding_size: Dimension = 10_240  # the most patches per side
    rms_norm_eps: Positive = 1e-6
    rope_theta: Positive = 100.0
    standardize: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        require_field(self.head_dim % 4 == 0, self, "head_dim", "be a multiple of 4, because rope rotates two halves")

    @classmethod
    def from_hf(cls, vision_config: Mapping[str, Any]) -> Self:
        """Read the vision part of a published config.json."""
        return cls(**published.read_vision(vision_config, fields(cls)))

    @property
    def patch_dim(self) -> int:
        """The number of values of a patch."""
        return 3 * self.patch_size**2


@dataclass(frozen=True, kw_only=True)
class ModelConfig(DenoiserConfig):
    """Geometry of a DiffusionGemma model.

    Example: `ModelConfig.from_hf("path/to/config.json").layer_shape(0).head_dim`.
    """

    hidden_size: Dimension
    intermediate_size: Dimension  # of the dense MLP next to the experts
    num_hidden_layers: Dimension
    num_attention_heads: Dimension
    num_key_value_heads: Dimension  # sliding layers
    head_dim: Dimension  # sliding layers
    num_global_key_value_heads: Dimension  # full layers
    global_head_dim: Dimension  # full layers
    num_experts: Dimension
    top_k_experts: Dimension
    moe_intermediate_size: Dimension
    sliding_window: Dimension
    layer_types: tuple[str, ...]
    rope_parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: dict(_DEFAULT_ROPE), hash=False)
    rms_norm_eps: Positive = 1e-6
    final_logit_softcapping: Positive = 30.0
    initializer_range: Positive = 0.02
    pad_token_id: int = 0
    bos_token_id: int = 2
    eos_token_id: int = 1
    noise_conditioning: bool = False  # an input for the noise level; the published model has none
    vision_config: Mapping[str, Any] | None = field(default=None, hash=False)  # as published; None: no images
    carried: Mapping[str, Any] = field(default_factory=dict, hash=False)  # other published top-level fields

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", *(("image_token_id",) if self.vision else ())):
            fits = is_id(getattr(self, name)) and getattr(self, name) < self.vocab_size
            require_field(fits, self, name, "be a token id below vocab_size")
        require_field(len(self.layer_types) == self.num_hidden_layers, self, "layer_types", "name one type per layer")
        known = all(kind in (SLIDING, FULL) for kind in self.layer_types)
        require_field(known, self, "layer_types", f"hold only {SLIDING!r} or {FULL!r}")
        require_field(self.layer_types[-1] == FULL, self, "layer_types", f"end with {FULL!r}")
        require_field(self.top_k_experts <= self.num_experts, self, "top_k_experts", "be at most num_experts")
        require_field(self.sliding_window >= 2, self, "sliding_window", "be at least 2 (a query and one key before it)")
        for kv, head in (("num_key_value_heads", "head_dim"), ("num_global_key_value_heads", "global_head_dim")):
            require_field(self.num_attention_heads % getattr(self, kv) == 0, self, kv, "divide num_attention_heads")
            require_field(getattr(self, head) % 2 == 0, self, head, "be even, because rope rotates pairs")
        for kind in dict.fromkeys((*self.layer_types, *self.rope_parameters)):
            _check_rope(self.rope_parameters, kind)

    @property
    def vision(self) -> VisionConfig | None:
        """The sizes of the vision tower; None for a model that reads only text."""
        return None if self.vision_config is None else VisionConfig.from_hf(self.vision_config)

    @property
    def image_token_id(self) -> int:
        """The token that stands for each vector of an image in a prompt."""
        return self.carried.get("image_token_id", 258_880)

    def layer_shape(self, layer: int) -> LayerShape:
        """Return heads, window and rope of one layer.

        Example: `dgemma.presets.diffusiongemma_26b_a4b().layer_shape(5).head_dim` is 512.
        """
        kind = self.layer_types[layer]
        sliding = kind == SLIDING
        head_dim = self.head_dim if sliding else self.global_head_dim
        rope = self.rope_parameters[kind]
        return LayerShape(
            kind=kind,
            num_key_value_heads=self.num_key_value_heads if sliding else self.num_global_key_value_heads,
            head_dim=head_dim,
            window=self.sliding_window if sliding else None,
            rope_theta=float(rope["rope_theta"]),
            rotary_pairs=int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2),
        )

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> Self:
        """Read a published config: a dictionary, a config.json, or a folder that holds one.

        The text part may be nested under "text_config".

        Example: `ModelConfig.from_hf({"model_type": "diffusion_gemma", "text_config": {...}, "canvas_length": 256})`.
        """
        return cls(**published.read_model(source, fields(cls)))

    def to_hf(self) -> dict[str, Any]:
        """Return a config.json in the published form, which transformers' DiffusionGemmaConfig accepts."""
        return published.publish_model(asdict(self))

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with some fields changed.

        Example: `dgemma.presets.tiny().replace(canvas_length=17)`.
        """
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Conventions(Checked):
    """Choices on which the public implementations of the model disagree; the defaults are transformers'.

    sliding_prefix: prefix tokens a canvas sees in sliding layers, `"window - 1"` (transformers) or `"window"` (Google's
    JAX code). self_cond_logits: `"rounded"` to the weights' dtype before the softmax (transformers) or `"float32"`
    (vLLM).

    Example: `DiffusionGemma(config, conventions=Conventions(self_cond_logits="float32"))`.
    """

    sliding_prefix: Literal["window - 1", "window"] = "window - 1"
    self_cond_logits: Literal["rounded", "float32"] = "rounded"


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """A checkpoint's defaults for `generate`. The values here are the published ones.

    Example: `replace(model.generation, max_denoising_steps=16)`.
    """

    max_new_tokens: Dimension = 256
    max_denoising_steps: Dimension = 48
    entropy_bound: NotNegative = 0.1
    t_max: Positive = 0.8  # the temperature of the first step; it falls towards t_min
    t_min: Positive = 0.4
    stability_threshold: Number = 1
    confidence_threshold: NotNegative = 0.005  # 0 turns the stop rule off
    eos_token_id: tuple[int, ...] = (1, 106, 50)
    pad_token_id: Number = 0
    # The noise of training, from `describe_noise`; None is uniform. It is stored in config.json, because transformers
    # refuses unknown fields in generation_config.json.
    noise: Mapping[str, Any] | None = field(default=None, hash=False)
    # The sampler, from `describe_sampler`; None is the published one with `entropy_bound`. Also stored in config.json.
    sampler: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        check_types(self)
        require_field(self.t_min <= self.t_max, self, "t_min", "be at most t_max")
        require_field(all(map(is_id, self.eos_token_id)), self, "eos_token_id", "be a tuple of token ids")
        for name, key, example in (("noise", "kind", "uniform"), ("sampler", "name", "ancestral")):
            entry = getattr(self, name)
            named = entry is None or isinstance(entry.get(key), str)
            require_field(named, self, name, f'be a dictionary with a "{key}", such as {{"{key}": "{example}"}}')

    def after_learning(self, noise: Mapping[str, Any]) -> Self:
        """Return these defaults after training under `noise`.

        If this is another kind of noise than before, `entropy_bound` and `sampler` get their default values.

        Example: `model.generation.after_learning(describe_noise(MaskNoise(512, mask_token_id=4)))`.
        """
        learnt = replace(self, noise=noise)  # also checks `noise`
        if (self.noise or {"kind": "uniform"})["kind"] == noise["kind"]:
            return learnt
        return replace(learnt, entropy_bound=type(self)().entropy_bound, sampler=None)

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> Self:
        """Read a published generation_config.json; null or absent fields mean the published defaults.

        Example: `GenerationDefaults.from_hf({"t_max": 0.9}).t_min` is 0.4.
        """
        return cls(**published.read_generation(source, fields(cls)))

    def to_hf(self) -> dict[str, Any]:
        """Return a generation_config.json in the published form."""
        return published.publish_generation(asdict(self))


def _check_rope(rope_parameters: Mapping[str, Mapping[str, Any]], kind: str) -> None:
    name, rope = f"ModelConfig.rope_parameters[{kind!r}]", rope_parameters.get(kind)
    is_known = isinstance(rope, Mapping) and rope.get("rope_type") in ("default", "proportional")
    require(is_known, name, "have rope_type 'default' or 'proportional'", rope)
    assert rope is not None
    theta, share = rope.get("rope_theta"), rope.get("partial_rotary_factor", 1.0)
    require(_is_positive(theta), f"{name}.rope_theta", "be above 0", theta)
    fits = _is_positive(share) and (share == 1 or (share < 1 and rope["rope_type"] == "proportional"))
    require(fits, f"{name}.partial_rotary_factor", "be 1, or in (0, 1) with rope_type 'proportional'", share)
    unknown = sorted(set(rope) - {"rope_type", "rope_theta", "partial_rotary_factor"})
    require(not unknown, name, "have no fields that dgemma does not implement", unknown)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0
