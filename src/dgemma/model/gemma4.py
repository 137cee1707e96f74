"""Config of an autoregressive Gemma 4 mixture-of-experts checkpoint, converted to start a DiffusionGemma from it."""

from collections.abc import Mapping
from typing import Any

from dgemma.checks import require

GEMMA4_TYPES = ("gemma4", "gemma4_text")

_KEPT = ("vision_config", "boi_token_id", "eoi_token_id", "image_token_id", "eos_token_id", "dtype")
# field: (transformers' default, the only value dgemma runs)
_SWITCHES: Mapping[str, tuple[Any, Any]] = {
    "enable_moe_block": (False, True),
    "attention_k_eq_v": (False, True),
    "hidden_size_per_layer_input": (256, 0),
    "num_kv_shared_layers": (0, 0),
    "use_double_wide_mlp": (False, False),
}
_DEFAULTS: Mapping[str, Any] = {
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


def config_from_gemma4(published: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plain Gemma 4 config in DiffusionGemma's form; raise for features that dgemma does not have.

    Absent fields have the defaults of transformers' Gemma4TextConfig, which saves only fields that differ.

    Example: `config_from_gemma4({"model_type": "gemma4_text", "enable_moe_block": True, ...})["model_type"]`.
    """
    text = published.get("text_config", published)
    require(isinstance(text, Mapping), "ModelConfig.text_config", "be a dictionary", text)
    text, fix = dict(text), "Choose a Gemma 4 with experts, such as the 26B-A4B."
    for name, (default, needed) in _SWITCHES.items():
        value = text.pop(name, default)
        rule = f"be {needed!r} to start from a Gemma 4 checkpoint"
        require((value or None) == (needed or None), f"ModelConfig.{name}", rule, value, fix)
    text = {**_DEFAULTS, **{name: value for name, value in text.items() if value is not None}}
    text["model_type"] = "diffusion_gemma_text"
    other = {name: published[name] for name in _KEPT if name in published and "text_config" in published}
    return {**other, "model_type": "diffusion_gemma", "text_config": text}
