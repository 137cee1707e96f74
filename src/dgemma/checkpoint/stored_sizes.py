"""Fields of a config.json that contradict the shapes of the stored tensors, for error messages."""

import re
from collections.abc import Mapping

from dgemma.model.config import FULL, SLIDING, ModelConfig

_SIZES = {  # field → the tensor and the dimension that have its size
    "vocab_size": ("embed_tokens.weight", 0),
    "hidden_size": ("embed_tokens.weight", 1),
    "intermediate_size": ("layers.0.mlp.gate_proj.weight", 0),
    "num_experts": ("layers.0.experts.down_proj", 0),
    "moe_intermediate_size": ("layers.0.experts.down_proj", 2),
}
_HEADS = {SLIDING: ("head_dim", "num_key_value_heads"), FULL: ("global_head_dim", "num_global_key_value_heads")}


def contradictions(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return a sentence for every field that contradicts `shapes`, the stored shapes by our tensor names."""

    def size(name: str, dim: int) -> int:
        """Return a stored size, 0 if there is none."""
        return shapes[name][dim] if len(shapes.get(name, ())) > dim else 0

    stored: dict[str, set[int]] = {field: {size(*where)} for field, where in _SIZES.items()}
    found = [re.fullmatch(r"layers\.(\d+)\.input_layernorm\.weight", name) for name in shapes]
    numbers = {int(match[1]) for match in found if match}
    stored["num_hidden_layers"] = {
        len(numbers) if numbers == set(range(len(numbers))) else 0
    }  # 0 if some layers are missing
    attentions = {layer: f"layers.{layer}.self_attn" for layer in range(config.num_hidden_layers)}
    layers = [layer for layer, name in attentions.items() if f"{name}.q_proj.weight" in shapes]
    heads = {layer: size(f"{attentions[layer]}.q_norm.weight", 0) for layer in layers}
    types, kinds = config.layer_types, {}
    for layer in layers:
        kinds[layer] = SLIDING if f"{attentions[layer]}.v_proj.weight" in shapes else FULL
        if heads[layer] == getattr(config, _HEADS[types[layer]][0]):
            # The head size agrees with the config. So if v_proj does not, v_proj is the mistake, not the layer's type.
            kinds[layer] = types[layer]
    full, config_full = ([layer for layer in layers if kind[layer] == FULL] for kind in (kinds, types))
    sentences = []
    if full == config_full:
        for layer in layers:
            head_dim, num_kv_heads = _HEADS[types[layer]]
            stored.setdefault(head_dim, set()).add(heads[layer])
            for field, projection in (("num_attention_heads", "q_proj"), (num_kv_heads, "k_proj")):
                rows = size(f"{attentions[layer]}.{projection}.weight", 0)
                stored.setdefault(field, set()).add(rows // heads[layer] if heads[layer] else 0)
    else:
        sentences.append(
            f"ModelConfig.layer_types must have {FULL!r} at {full} (stored without v_proj), got it at {config_full}."
        )
    for field, sizes in stored.items():
        sizes.discard(0)
        if len(sizes) == 1 and sizes != {
            getattr(config, field)
        }:  # several sizes mean a wrong tensor, not a wrong config
            sentences.append(f"ModelConfig.{field} must be {sizes.pop()}, as stored, got {getattr(config, field)}.")
    return sentences
