"""The grouped product in plain PyTorch, the reference for `kernel`."""

import torch
from torch import Tensor

from dgemma.model.layers import gated_gelu


def multiply_tokens(
    x: Tensor, weights: Tensor, narrow: Tensor, b: Tensor, order: Tensor, ends: Tensor, *, gated: bool = False
) -> Tensor:
    """Compute the product row by row."""
    top_k, num_experts = order.shape[0] // x.shape[0], weights.shape[0]
    experts = torch.searchsorted(ends, torch.arange(order.shape[0], device=ends.device), right=True)
    rows = []
    for choice, expert in zip(order.tolist(), experts.tolist(), strict=True):
        token, low = choice // top_k, narrow[choice // top_k].view(num_experts, -1)[expert]
        rows.append(weights[expert] @ x[token] + b[expert] @ low)
    out = torch.stack(rows)
    return gated_gelu(*out.chunk(2, dim=-1)) if gated else out


def multiply_rows(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Compute the product row by row."""
    experts = torch.searchsorted(ends, torch.arange(rows.shape[0], device=ends.device), right=True)
    return torch.stack([weights[expert] @ row for row, expert in zip(rows, experts.tolist(), strict=True)])
