"""The operations for a single token in plain PyTorch, the reference for `kernel`."""

import torch
from torch import Tensor

from dgemma_kernels.formats.float8 import Quantized, quantize
from dgemma_kernels.ops.norms.kernel import ResidualNorms
from dgemma_kernels.ops.norms.reference import attention_residual
from dgemma_kernels.ops.router.kernel import ExpertTiles
from dgemma_kernels.ops.router.reference import route


def score_token(
    attention: Tensor,
    residual: Tensor,
    norms: ResidualNorms,
    proj: Tensor,
    eps: float,
    *,
    float8: bool = False,
) -> tuple[Tensor, Tensor, Tensor | Quantized, Tensor]:
    """Return (x, dense input, expert input), (1, D) each, and the scores (E,)."""
    x, dense, expert, router = attention_residual(attention, residual, norms, eps)
    assert isinstance(dense, Tensor)
    assert isinstance(expert, Tensor)
    return x, dense, quantize(expert) if float8 else expert, (router @ proj.T)[0]


def choose_token(
    scores: Tensor, per_expert_scale: Tensor, num_active: int, rows_per_tile: int
) -> tuple[Tensor, ExpertTiles]:
    """Return the weights (1, A), and a tile of one row for each chosen expert, largest score first."""
    num_experts = len(scores)
    weights, index, _ = route(scores[None], torch.eye(num_experts).to(scores), per_expert_scale, num_active)
    slots = torch.arange(num_active, dtype=torch.int32, device=scores.device)
    tiles = torch.stack([index[0], slots, torch.ones_like(slots)], dim=1)
    queue = torch.tensor([0, num_active], dtype=torch.int32, device=scores.device)
    return weights, ExpertTiles(slots, tiles, torch.zeros_like(slots), queue, num_experts, num_active, rows_per_tile)
