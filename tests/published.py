"""The published implementation beside ours: a pair of models with the same random weights."""

import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

import dgemma
from dgemma import DiffusionGemma, ModelConfig


def published_model(config: ModelConfig, seed: int = 0) -> DiffusionGemmaForBlockDiffusion:
    """transformers' model with random weights, every norm, scale and scalar away from 1 so that none goes unnoticed."""
    torch.manual_seed(seed)
    model = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**config.to_hf())).eval()
    model.set_experts_implementation("eager")  # its loop over experts: the plainest meaning, for any shape
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dim() == 1 and "vision" not in name and "rotary" not in name:
                tensor.uniform_(0.5, 1.5)
            elif tensor.dim() > 1 and "vision" not in name:
                tensor.mul_(1.5)  # logits of order one; much more and rounding grows chaotically through the layers
    return model


def pair(config: ModelConfig | None = None, seed: int = 0) -> tuple[DiffusionGemma, DiffusionGemmaForBlockDiffusion]:
    """Our model and transformers', weights copied name by name without the library's own checkpoint code."""
    config = config or dgemma.presets.tiny()
    theirs = published_model(config, seed)
    state = theirs.state_dict()
    ours = DiffusionGemma(config)
    copied = {
        name: state[f"model.encoder.language_model.{name.replace('causal_', '')}"]
        if "causal_" in name
        else state[f"model.decoder.{name}"]
        for name in ours.state_dict()
    }
    ours.load_state_dict(copied)
    return ours.eval(), theirs
