"""Names of tensors: the published ones and ours."""

import re

VISION = re.compile(r"(?:model\.)?(?:encoder\.)?(?:vision_tower\.(?:encoder\.)?|embed_vision\.)")
AUDIO = re.compile(r"(?:model\.)?(?:encoder\.)?(?:audio_tower|embed_audio)\.")  # of Gemma 4; dgemma does not hear


def our_names(published: str) -> tuple[str, ...]:
    """Return the names in our model for a published tensor.

    | published                                              | ours                                                    |
    |--------------------------------------------------------|---------------------------------------------------------|
    | model.decoder.X                                        | X                                                       |
    | model.encoder.language_model.layers.i.layer_scalar     | layers.i.causal_layer_scalar                            |
    | model.encoder.language_model.X, lm_head.weight         | X, embed_tokens.weight: tied copies, usually absent     |
    | model.language_model.X or model.X (plain Gemma 4)      | X; its layer_scalar serves both modes                   |
    | model.encoder.vision_tower.encoder.X.linear.weight     | vision.X.weight                                         |
    | model.encoder.vision_tower.X, model.encoder.embed_vision.X | vision.X                                            |

    Example: `our_names("model.decoder.norm.weight")` is `("norm.weight",)`.
    """
    if VISION.match(published):
        return ("vision." + VISION.sub("", published, count=1).replace(".linear.weight", ".weight"),)
    name = published.removeprefix("model.")
    if name == "lm_head.weight":
        return ("embed_tokens.weight",)
    if name.startswith("decoder."):
        return (name.removeprefix("decoder."),)
    if name.startswith("encoder.language_model."):
        return (_causal(name.removeprefix("encoder.language_model.")),)
    name = name.removeprefix("language_model.")
    return tuple(dict.fromkeys((name, _causal(name))))


def published_name(ours: str) -> str:
    """Return the published name of one of our tensors: the table of `our_names`, from right to left.

    Example: `published_name("layers.0.causal_layer_scalar")` is "model.encoder.language_model.layers.0.layer_scalar".
    """
    if ours.startswith("vision."):
        name = ours.removeprefix("vision.")
        if name.startswith("layers."):
            name = "encoder." + name.replace("_proj.weight", "_proj.linear.weight")
        return f"model.encoder.{'embed_vision' if name.startswith('embedding_projection') else 'vision_tower'}.{name}"
    if ours.endswith(".causal_layer_scalar"):
        return "model.encoder.language_model." + ours.replace("causal_layer_scalar", "layer_scalar")
    return "model.decoder." + ours


def _causal(name: str) -> str:
    return re.sub(r"^(layers\.\d+\.)layer_scalar$", r"\1causal_layer_scalar", name)
