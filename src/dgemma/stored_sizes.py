"""Which fields of a config.json the tensors stored beside it contradict: what to look at where the two do not fit."""

import re
from collections.abc import Mapping

from dgemma.config import FULL, SLIDING, ModelConfig

_SIZES = {  # fields, and the tensors and dimensions of their size
    "vocab_size": ("embed_tokens.weight", 0),
    "hidden_size": ("embed_tokens.weight", 1),
    "intermediate_size": ("layers.0.mlp.gate_proj.weight", 0),
    "num_experts": ("layers.0.experts.down_proj", 0),
    "moe_intermediate_size": ("layers.0.experts.down_proj", 2),
}
_HEADS = {SLIDING: ("head_dim", "num_key_value_heads"), FULL: ("global_head_dim", "num_global_key_value_heads")}


def contradictions(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """A sentence for every field that is another size by the shapes of stored tensors, which have our names.

    Example: `contradictions(config, {"embed_tokens.weight": (512, 64)})` is [] where the config says 512 and 64.
    """

    def size(name: str, dim: int) -> int:
        """0 where nothing of the kind is stored."""
        return shapes[name][dim] if len(shapes.get(name, ())) > dim else 0

    sentences = []
    stored = {field: size(*where) for field, where in _SIZES.items()}
    stored["num_hidden_layers"] = sum(bool(re.fullmatch(r"layers\.\d+\.input_layernorm\.weight", n)) for n in shapes)
    attentions = {layer: f"layers.{layer}.self_attn" for layer in range(config.num_hidden_layers)}
    both = [layer for layer, name in attentions.items() if f"{name}.q_proj.weight" in shapes]
    said_full = [layer for layer in both if config.layer_types[layer] == FULL]
    full = [layer for layer in both if f"{attentions[layer]}.v_proj.weight" not in shapes]
    # With the heads of a sliding layer it is one whose v_proj got lost.
    full = [at for at in full if at in said_full or size(f"{attentions[at]}.q_norm.weight", 0) != config.head_dim]
    if full == said_full:
        for layer in both:
            head_dim, num_kv_heads = _HEADS[config.layer_types[layer]]
            head = stored[head_dim] = size(f"{attentions[layer]}.q_norm.weight", 0)
            for field, projection in (("num_attention_heads", "q_proj"), (num_kv_heads, "k_proj")):
                stored[field] = size(f"{attentions[layer]}.{projection}.weight", 0) // head if head else 0
    else:
        sentences.append(
            f"ModelConfig.layer_types must have {FULL!r} at {full}, stored without v_proj, got it at {said_full}."
        )
    for field, its_size in stored.items():
        if its_size and its_size != getattr(config, field):
            sentences.append(f"ModelConfig.{field} must be {its_size}, as stored, got {getattr(config, field)}.")
    return sentences
