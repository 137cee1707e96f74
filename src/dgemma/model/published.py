"""The published form of a model's configuration: config.json, of DiffusionGemma or of an autoregressive Gemma 4."""

from collections.abc import Mapping
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any

from dgemma.checks import require
from dgemma.files import read_json

OWN_DEFAULTS = ("noise", "sampler")  # fields of GenerationDefaults that are stored in config.json
SLIDING = "sliding_attention"
FULL = "full_attention"
LARGEST_SIZE = 2**31 - 1  # larger sizes are certainly mistakes
# Published fields that dgemma implements for one value only; any other would change the result.
_FIXED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False, None),
    "attention_dropout": (0.0, None),
}
_FIXED_TEXT_FIELDS = {**_FIXED_FIELDS, "tie_word_embeddings": (True,), "use_bidirectional_attention": ("vision", None)}
# transformers always builds a vision tower, by default of 167M weights. The config of a model without one describes
# this tower, to keep it small there; `from_hf` reads it as no tower.
_NO_TOWER: Mapping[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "head_dim": 4,
    "global_head_dim": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "position_embedding_size": 4,
    "patch_size": 2,
}
GEMMA4_TYPES = ("gemma4", "gemma4_text")

_KEPT_FROM_GEMMA4 = ("vision_config", "boi_token_id", "eoi_token_id", "image_token_id", "eos_token_id", "dtype")
# field: (transformers' default, the only value dgemma runs)
_GEMMA4_SWITCHES: Mapping[str, tuple[Any, Any]] = {
    "enable_moe_block": (False, True),
    "attention_k_eq_v": (False, True),
    "hidden_size_per_layer_input": (256, 0),
    "num_kv_shared_layers": (0, 0),
    "use_double_wide_mlp": (False, False),
}
_GEMMA4_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": None,
}


def read_published(source: Mapping[str, Any] | str | Path, file_name: str) -> dict[str, Any]:
    """Return a dictionary unchanged, or read the JSON object in a file (or in `file_name` inside a folder)."""
    if isinstance(source, Mapping):
        return dict(source)
    require(isinstance(source, str | Path), file_name, "be a dictionary or a path", source)
    path = Path(source)
    path = path / file_name if path.is_dir() else path
    try:
        return read_json(path)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} does not exist or is not a file. Point at a checkpoint folder or its {file_name}."
        ) from None


def read_model(source: Mapping[str, Any] | str | Path, fields: tuple["Field[Any]", ...]) -> dict[str, Any]:
    """Return the `fields` of a `ModelConfig` from a published config."""
    published = read_published(source, "config.json")
    model_type = published.get("model_type")
    if model_type in GEMMA4_TYPES:
        published = config_from_gemma4(published)
        model_type = published["model_type"]
    is_known = model_type in ("diffusion_gemma", "diffusion_gemma_text")
    rule = "be 'diffusion_gemma', 'diffusion_gemma_text' or a Gemma 4 text model"
    require(is_known, "ModelConfig.model_type", rule, model_type, "Point at a DiffusionGemma checkpoint.")
    text = published.get("text_config", published)
    require(isinstance(text, Mapping), "ModelConfig.text_config", "be a dictionary", text)
    check_fixed("ModelConfig", text, _FIXED_TEXT_FIELDS)
    values = {f.name: text[f.name] for f in fields if text.get(f.name) is not None}
    values |= _full_layer_heads(text)
    if "final_logit_softcapping" in text:
        values["final_logit_softcapping"] = text["final_logit_softcapping"]  # null would mean no cap
    if values.get("layer_types") is None and is_id(values.get("num_hidden_layers")):
        values["layer_types"] = default_layer_types(values["num_hidden_layers"])
    # `eos_token_id` may be a list; the first is the end-of-text token that fills a canvas.
    if isinstance(values.get("eos_token_id"), list | tuple) and values["eos_token_id"]:
        values["eos_token_id"] = values["eos_token_id"][0]
    if "text_config" in published:
        own = {"text_config", "vision_config", "canvas_length", "noise", "sampler"}
        own |= {"quantization_config", "quantization"}  # they describe the files, not the model
        values["carried"] = {k: v for k, v in published.items() if k not in own}
        vision = published.get("vision_config")
        is_none = isinstance(vision, Mapping) and _NO_TOWER.items() <= vision.items()
        values["vision_config"] = None if is_none else vision
        if published.get("canvas_length") is not None:
            values["canvas_length"] = published["canvas_length"]
    required = {f.name for f in fields if f.default is MISSING and f.default_factory is MISSING}
    missing = sorted(required - values.keys())
    if missing:
        raise ValueError(f"ModelConfig.from_hf needs {', '.join(missing)}, absent from the config. Add the fields.")
    return values


def publish_model(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with the fields of a `ModelConfig`."""
    text = {k: v for k, v in values.items() if k not in ("vision_config", "carried", "canvas_length")}
    text["layer_types"] = list(values["layer_types"])
    if not values["noise_conditioning"]:
        del text["noise_conditioning"]  # not a published field
    text |= {name: accepted[0] for name, accepted in _FIXED_TEXT_FIELDS.items()}
    text["model_type"] = "diffusion_gemma_text"
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "initializer_range": values["initializer_range"],
        **values["carried"],
        "model_type": "diffusion_gemma",
        "canvas_length": values["canvas_length"],
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": dict(_NO_TOWER if values["vision_config"] is None else values["vision_config"]),
    }


def read_vision(vision_config: Mapping[str, Any], fields: tuple["Field[Any]", ...]) -> dict[str, Any]:
    """Return the `fields` of a `VisionConfig` from the vision part of a published config."""
    defaults = {f.name: f.default for f in fields}
    heads = vision_config.get("num_attention_heads", defaults["num_attention_heads"])
    own = {"use_clipped_linears": (False, None), "num_key_value_heads": (heads,)}
    check_fixed("vision_config", vision_config, {**_FIXED_FIELDS, **own})
    rope = vision_config.get("rope_parameters") or {}
    require(isinstance(rope, Mapping), "vision_config.rope_parameters", "be a dictionary", rope)
    found = {**rope, **vision_config}
    return {name: found[name] for name in defaults if name in found}


def read_generation(source: Mapping[str, Any] | str | Path, fields: tuple["Field[Any]", ...]) -> dict[str, Any]:
    """Return the `fields` of `GenerationDefaults` from a published generation_config.json."""
    found = read_published(source, "generation_config.json")
    values = {f.name: found[f.name] for f in fields if found.get(f.name) is not None}
    sampler = found.get("sampler_config") or {}
    require(isinstance(sampler, Mapping), "GenerationDefaults.sampler_config", "be a dictionary", sampler)
    if sampler.get("entropy_bound") is not None:
        values["entropy_bound"] = sampler["entropy_bound"]
    if "eos_token_id" in values:
        eos = values["eos_token_id"]
        values["eos_token_id"] = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    return values


def publish_generation(values: dict[str, Any]) -> dict[str, Any]:
    """Return a generation_config.json with the values of `GenerationDefaults`."""
    kept = {name: value for name, value in values.items() if name not in (*OWN_DEFAULTS, "entropy_bound")}
    kept["eos_token_id"] = list(values["eos_token_id"])
    bound = float(values["entropy_bound"])
    return {**kept, "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": bound}}


def default_layer_types(num_hidden_layers: int) -> tuple[str, ...]:
    """Return the published pattern: five sliding layers, then a full one; the last is always full."""
    pattern = [FULL if (layer + 1) % 6 == 0 else SLIDING for layer in range(num_hidden_layers)]
    return (*pattern[:-1], FULL)


def is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_SIZE


def config_from_gemma4(published: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plain Gemma 4 config in DiffusionGemma's form; raise for features that dgemma does not have.

    Absent fields have the defaults of transformers' Gemma4TextConfig, which saves only fields that differ.
    """
    text = published.get("text_config", published)
    require(isinstance(text, Mapping), "ModelConfig.text_config", "be a dictionary", text)
    text, fix = dict(text), "Choose a Gemma 4 with experts, such as the 26B-A4B."
    for name, (default, needed) in _GEMMA4_SWITCHES.items():
        value = text.pop(name, default)
        rule = f"be {needed!r} to start from a Gemma 4 checkpoint"
        require((value or None) == (needed or None), f"ModelConfig.{name}", rule, value, fix)
    text = {**_GEMMA4_DEFAULTS, **{name: value for name, value in text.items() if value is not None}}
    text["model_type"] = "diffusion_gemma_text"
    other = {name: published[name] for name in _KEPT_FROM_GEMMA4 if name in published and "text_config" in published}
    return {**other, "model_type": "diffusion_gemma", "text_config": text}


def _full_layer_heads(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the heads of full layers, from published fields or the per_layer_config of newer transformers."""
    name, per_layer, types = "ModelConfig.per_layer_config", text.get("per_layer_config"), text.get("layer_types")
    require(isinstance(per_layer, Mapping | None), name, "be a dictionary", per_layer)
    full: Mapping[str, Any] = {}
    if per_layer:
        full = next(iter(per_layer.values()))
        types = types if isinstance(types, list | tuple) else ()
        full_layers = {layer for layer, kind in enumerate(types) if kind == FULL}
        overridden = {int(layer) if str(layer).isdecimal() else layer for layer in per_layer}  # "5", and also "05"
        alike = isinstance(full, Mapping) and all(other == full for other in per_layer.values())
        rule = "override exactly the full-attention layers, with equal values"
        fits, fix = alike and overridden == full_layers, "dgemma has one head shape per layer type."
        require(fits, name, rule, sorted(map(str, per_layer)), fix)
    elif per_layer is None:
        head_dim = text.get("global_head_dim")
        full = {"head_dim": 512 if head_dim is None else head_dim}  # the default of transformers' class
        full["num_key_value_heads"] = text.get("num_global_key_value_heads")
    # transformers omits an override that equals the value of the sliding layers.
    heads = {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}
    return {name: text.get(key) if full.get(key) is None else full[key] for name, key in heads.items()}


def check_fixed(owner: str, published: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]]) -> None:
    for name, accepted in fixed.items():
        value = published.get(name, accepted[0])
        fix = "dgemma implements only that value."
        require(value in accepted, f"{owner}.{name}", f"be {accepted[0]!r}", value, fix)
