"""Routing in plain PyTorch, the reference for `kernel`."""

import torch
from torch import Tensor

from dgemma_kernels.ops.router.kernel import ExpertTiles, tokens_per_count


def route(
    router_input: Tensor, proj: Tensor, per_expert_scale: Tensor, num_active: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts, largest first. (M, D), (E, D), (E,) → weights (M, A), index (M, A) int32, counts (N, E)."""
    scores = router_input @ proj.T
    probabilities = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    # Unlike topk, a stable sort guarantees that the lower expert wins a tie.
    top, index = probabilities.sort(dim=-1, descending=True, stable=True)
    top, index = top[:, :num_active], index[:, :num_active]
    weights = top / top.sum(-1, keepdim=True) * per_expert_scale[index]
    return weights.to(probabilities.dtype), index.int(), count_pairs(index, proj.shape[0])


def count_pairs(index: Tensor, num_experts: int) -> Tensor:
    """Count the pairs of each expert for every `tokens_per_count` tokens. index: (M, A) → (N, E) int32."""
    chunks = index.long().split(tokens_per_count(index.shape[0]))
    return torch.stack([chunk.flatten().bincount(minlength=num_experts) for chunk in chunks]).int()


def sort_by_expert(index: Tensor, counts: Tensor, rows_per_tile: int) -> ExpertTiles:
    """Sort the (token, k) pairs by expert, in tiles. index: (M, A) int32, counts: (N, E) int32."""
    pairs = index.flatten().argsort(stable=True).int()
    num_experts = counts.shape[1]
    tiles, first = [], 0
    for expert, count in enumerate(counts.sum(0).tolist()):
        tiles += [(expert, first + at, min(count - at, rows_per_tile)) for at in range(0, count, rows_per_tile)]
        first += count
    max_tiles = index.numel() // rows_per_tile + min(num_experts, index.numel())
    queue = torch.tensor([0, len(tiles)], dtype=torch.int32, device=index.device)
    tiles += [(0, 0, 0)] * (max_tiles - len(tiles))
    table = torch.tensor(tiles, dtype=torch.int32, device=index.device)
    finished = torch.zeros(max_tiles, dtype=torch.int32, device=index.device)
    return ExpertTiles(pairs, table, finished, queue, num_experts, index.shape[1], rows_per_tile)
