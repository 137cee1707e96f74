"""The grouped product in plain PyTorch, the reference for `kernel`."""

from itertools import pairwise

import torch
from torch import Tensor

from dgemma.model.layers import gated_gelu
from dgemma_kernels.ops.grouped.groups import MORE_ROWS, rows_per_tile


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


def group_choices(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort by a stable sort, and count. List tiles by a loop.

    A tile has more than the usual rows only where its group would otherwise need one more tile.
    """
    order = experts.flatten().sort(stable=True).indices
    back = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
    ends = experts.flatten().bincount(minlength=num_experts).cumsum(0).to(torch.int32)
    tile_rows, row, tiles = rows_per_tile(order.shape[0], num_experts), 0, []
    for expert, end in enumerate(ends.tolist()):
        while row < end:
            left, most = end - row, tile_rows + MORE_ROWS
            num_tiles = -(-left // most)
            fits_others = left - tile_rows <= (num_tiles - 2) * tile_rows + most  # without more rows in this one
            size = left if num_tiles == 1 else tile_rows if fits_others else most
            tiles.append((expert, row, size))
            row += size
    table = torch.tensor([(len(tiles), 0, 0), *tiles], dtype=torch.int32, device=order.device)
    return order, back.view_as(experts), ends, table
