"""The grouped product in plain PyTorch, the reference for `kernel`."""

from itertools import pairwise

import torch
from torch import Tensor

from dgemma.model.layers import gated_gelu


def multiply_tokens(
    x: Tensor,
    weights: Tensor,
    narrow: Tensor,
    b: Tensor,
    order: Tensor,
    ends: Tensor,
    tiles: Tensor | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """Compute the product row by row."""
    tokens = order // (order.shape[0] // x.shape[0])
    out = multiply_rows(x[tokens], weights, ends, narrow, b)
    return gated_gelu(*out.chunk(2, dim=-1)) if gated else out


def multiply_rows(
    rows: Tensor,
    weights: Tensor,
    ends: Tensor,
    narrow: Tensor | None = None,
    b: Tensor | None = None,
    tiles: Tensor | None = None,
    *,
    scale: float = 1.0,
    by_row: Tensor | None = None,
) -> Tensor:
    """Compute the product row by row."""
    experts = torch.searchsorted(ends, torch.arange(rows.shape[0], device=ends.device), right=True).tolist()
    out = torch.stack([weights[expert] @ row for row, expert in zip(rows, experts, strict=True)])
    if narrow is not None and b is not None:
        out = out + torch.stack([b[expert] @ low for low, expert in zip(narrow, experts, strict=True)])
    return out * scale if by_row is None else out * (scale * by_row[:, None])


def contract_and_outer(
    rows: Tensor, narrow: Tensor, weights: Tensor, ends: Tensor, *, scale: float, by_row: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Multiply row by row, and expert by expert."""
    of_narrow = multiply_rows(rows, weights.mT, ends, scale=scale, by_row=by_row)
    starts = [0, *ends.tolist()]
    groups = [slice(start, end) for start, end in pairwise(starts)]
    return of_narrow, torch.stack([rows[group].T @ narrow[group] for group in groups])
