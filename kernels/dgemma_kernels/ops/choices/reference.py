"""The router's choices, their weights and groups in plain PyTorch, the reference for `kernel`."""

import torch
from torch import Tensor

from dgemma_kernels.ops.grouped.tiles import MORE_ROWS, rows_per_tile


def choose_experts(logits: Tensor, scales: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities, and the weights and ids of the most likely experts."""
    experts = logits.softmax(-1).topk(top_k, dim=-1).indices
    return *weigh_choices(logits, experts, scales), experts


def weigh_choices(logits: Tensor, experts: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities, and the weights of given experts."""
    probabilities = logits.softmax(-1)
    chosen = probabilities.gather(-1, experts)
    return probabilities, chosen / chosen.sum(-1, keepdim=True) * scales[experts]


def weigh_choices_gradient(
    grad: Tensor, of_probabilities: Tensor | None, logits: Tensor, experts: Tensor, scales: Tensor
) -> Tensor:
    """Differentiate `weigh_choices`."""
    results, pull_back = torch.func.vjp(lambda logits: weigh_choices(logits, experts, scales), logits)  # type: ignore[misc]
    zeros = torch.zeros_like(results[0]) if of_probabilities is None else of_probabilities
    of_logits: Tensor = pull_back((zeros, grad))[0]
    return of_logits


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
