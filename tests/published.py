"""The model of transformers and ours with the same random weights."""

import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

import dgemma
from dgemma import DiffusionGemma, ModelConfig


def published_model(config: ModelConfig, seed: int = 0) -> DiffusionGemmaForBlockDiffusion:
    """The model of transformers with random weights. Norms and scales differ from 1, so that each has an effect."""
    torch.manual_seed(seed)
    model = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**config.to_hf())).eval()
    model.set_experts_implementation("eager")  # a loop over experts, which works for any shape
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dim() == 1 and "vision" not in name and "rotary" not in name:
                tensor.uniform_(0.5, 1.5)
            elif tensor.dim() > 1 and "vision" not in name:
                tensor.mul_(1.5)  # logits of order one; larger weights amplify rounding from layer to layer
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "vision" in name and "rotary" not in name:  # every position of an image differs
                tensor.uniform_(0.5, 1.5) if tensor.dim() == 1 else tensor.normal_(std=0.2)
    return model


def pair(config: ModelConfig | None = None, seed: int = 0) -> tuple[DiffusionGemma, DiffusionGemmaForBlockDiffusion]:
    """Our model and the one of transformers. Weights are copied by name, without the checkpoint code of the library."""
    config = config or dgemma.presets.tiny()
    theirs = published_model(config, seed)
    state = theirs.state_dict()
    ours = DiffusionGemma(config)
    ours.load_state_dict({name: state[_their_name(name)] for name in ours.state_dict()})
    return ours.eval(), theirs


def _their_name(ours: str) -> str:
    if ours.startswith("vision.layers."):
        name = ours.removeprefix("vision.").replace("_proj.weight", "_proj.linear.weight")
        return f"model.encoder.vision_tower.encoder.{name}"
    if ours.startswith("vision.embedding_projection"):
        return ours.replace("vision.", "model.encoder.embed_vision.")
    if ours.startswith("vision."):
        return ours.replace("vision.", "model.encoder.vision_tower.")
    if "causal_" in ours:
        return f"model.encoder.language_model.{ours.replace('causal_', '')}"
    return f"model.decoder.{ours}"
