"""Weights to begin a training with."""

import torch

from dgemma.model.attention import Attention
from dgemma.model.diffusion import DiffusionGemma


@torch.no_grad()
def soften_attention(model: DiffusionGemma) -> None:
    """Let random weights begin with attention that is spread out: each query norm becomes head_dim^-1/2.

    Queries and keys are normed and their product is not scaled, so with unit norms the scores of a fresh model have a
    standard deviation of sqrt(head_dim), and its attention is almost one-hot and slow to learn from.

    Example: `model = DiffusionGemma(config); soften_attention(model)`.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            module.q_norm.weight.fill_(module.head_dim**-0.5)
