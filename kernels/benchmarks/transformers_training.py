"""The published fine-tuning loss written with transformers, for comparison; run by `training.py`."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma.configuration_diffusion_gemma import DiffusionGemmaConfig

import dgemma


def build(config: dgemma.ModelConfig, device: str, dtype: torch.dtype) -> DiffusionGemmaForBlockDiffusion:
    """Make random weights of this geometry."""
    published = {name: value for name, value in config.to_hf().items() if name != "architectures"}
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # float32 weights of the largest preset would not fit
    try:
        with torch.device(device):
            return DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**published)).to(dtype)
    finally:
        torch.set_default_dtype(before)


def add_lora(model: Any, rank: int) -> list[nn.Parameter]:
    """Add PEFT's adapters to attention and dense MLP, as public recipes do, and return them.

    PEFT cannot adapt the experts without computing their updated weights, which are as large as the experts.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = r".*(language_model|decoder)\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
    model.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets), model)
    return [weight for weight in model.parameters() if weight.requires_grad]


def fine_tuning_loss(
    model: Any, tokens: Tensor, prompt_len: int, *, noise: float = 1.0, self_cond: float = 0.5
) -> Tensor:
    """Return the cross-entropy of every next token and of every canvas position, for rows (B, T) of prompt and canvas.

    noise: the highest level; self_cond: the share of canvases that see the prediction of a first pass.
    """
    batch_size, length = tokens.shape
    clean, vocab_size = tokens[:, prompt_len:], model.config.text_config.vocab_size
    level = noise * torch.rand(batch_size, 1, device=tokens.device)
    replaced = torch.rand(clean.shape, device=tokens.device) < level
    canvas = torch.where(replaced, torch.randint_like(clean, vocab_size), clean)

    read = model.model.encoder(input_ids=tokens)
    cap = model.final_logit_softcapping
    causal = (model.lm_head(read.last_hidden_state[:, :-1]).float() / cap).tanh() * cap
    loss = F.cross_entropy(causal.flatten(0, 1), tokens[:, 1:].flatten())
    del causal

    # The canvas sees the prompt and itself, not the cached text of the canvas.
    seen = torch.ones(batch_size, length + clean.shape[1], dtype=torch.long, device=tokens.device)
    seen[:, prompt_len:length] = 0
    denoise = partial(
        model,
        decoder_input_ids=canvas,
        past_key_values=read.past_key_values,
        decoder_attention_mask=seen,
        decoder_position_ids=torch.arange(prompt_len, length, device=tokens.device)[None],
    )
    with torch.no_grad():
        first = denoise().logits
    on = torch.rand(batch_size, device=tokens.device) < self_cond
    logits = denoise(self_conditioning_logits=first, self_conditioning_mask=on).logits
    return loss + F.cross_entropy(logits.flatten(0, 1), clean.flatten())
