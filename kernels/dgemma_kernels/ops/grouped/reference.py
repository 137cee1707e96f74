"""Grouped products and groups in plain PyTorch, the reference for `kernel` and `groups`."""

import torch
from torch import Tensor

from dgemma.model.layers import gated_gelu
from dgemma_kernels.ops.grouped.groups import MORE_ROWS, rows_per_tile


def multiply(
    x: Tensor,
    weights: Tensor,
    narrow: Tensor,
    b: Tensor,
    tiles: Tensor,
    order: Tensor | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """Compute the product tile by tile."""
    rows = x if order is None else x[order // (order.shape[0] // x.shape[0])]
    out = x.new_empty(rows.shape[0], weights.shape[1])
    for expert, first, num_rows in tiles[1 : 1 + int(tiles[0, 0])].tolist():
        own = slice(first, first + num_rows)
        out[own] = rows[own] @ weights[expert].T + narrow[own] @ b[expert].T
    return gated_gelu(*out.chunk(2, dim=-1)) if gated else out


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
