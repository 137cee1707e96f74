"""From router inputs to tiles of rows by expert: who computes what, decided on the device in three launches.

The norm, scale and root in front of the product are `norms.attention_residual`'s, which already has the statistic.
No atomics: the same input gives the same order, run after run. Reference twin: `reference`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.blocks import inside, wait_for_launches_before
from dgemma_kernels.configs import dependent_launch

# Of the product's depth a program: with all of it, one program reads all weights at a single multiprocessor's pace.
_SPLIT_DEPTH = 256


class ExpertTiles(NamedTuple):
    """The (token, k) pairs in order of their expert, cut into tiles of at most `rows_per_tile` rows of one expert.

    A pair is token * A + k. `pairs`: (M * A,) int32, stable within an expert. `tiles`: (max_tiles, 3) int32 of (expert,
    first row, rows) in order of the first row; as the host knows only a bound on their number, the last have no rows.
    `finished`: (max_tiles,) int32, zeros, for the experts to count in: a table serves them once.
    """

    pairs: Tensor
    tiles: Tensor
    finished: Tensor
    num_active: int
    rows_per_tile: int


def route(router_input: Tensor, proj: Tensor, per_expert_scale: Tensor, num_active: int) -> tuple[Tensor, Tensor]:
    """Each token's experts and their weights: product, float32 softmax, top `num_active`, renormalised, scaled.

    Scores round to the input's dtype before the softmax, as a linear layer's do; of equal scores the lower expert wins.
    router_input: (M, D), proj: (E, D), per_expert_scale: (E,) → weights (M, A) float32, index (M, A) int32, largest
    probability first.

    Example: `weights, index = route(router_in, router.proj.weight, router.per_expert_scale, 8)`.
    """
    num_tokens, width = router_input.shape
    num_experts = proj.shape[0]
    if proj.shape != (num_experts, width) or proj.dtype != router_input.dtype:
        raise ValueError(f"route.proj must be (E, {width}) {router_input.dtype}, got {tuple(proj.shape)} {proj.dtype}.")
    if per_expert_scale.shape != (num_experts,):
        raise ValueError(f"route.per_expert_scale must be ({num_experts},), got {tuple(per_expert_scale.shape)}.")
    if not 1 <= num_active <= num_experts <= 256:
        raise ValueError(f"route.num_active must be in 1..E with E <= 256, got {num_active} of {num_experts} experts.")
    if not (router_input.is_contiguous() and proj.is_contiguous() and per_expert_scale.is_contiguous()):
        raise ValueError("route must be given contiguous tensors. Call .contiguous() on them first.")
    splits = triton.cdiv(width, _SPLIT_DEPTH)
    rows = 16 if num_tokens <= 16 else 64
    partial = torch.empty(splits, num_tokens, num_experts, dtype=torch.float32, device=router_input.device)
    weights = torch.empty(num_tokens, num_active, dtype=torch.float32, device=router_input.device)
    index = torch.empty(num_tokens, num_active, dtype=torch.int32, device=router_input.device)
    experts = max(triton.next_power_of_2(num_experts), 16)
    _partial_scores_kernel[(triton.cdiv(num_tokens, rows), splits)](
        router_input,
        proj,
        partial,
        num_tokens,
        WIDTH=width,
        NUM_EXPERTS=num_experts,
        EXPERTS=experts,
        ROWS=rows,
        DEPTH=_SPLIT_DEPTH,
        num_warps=8,
        **dependent_launch(router_input.device),
    )
    _choose_experts_kernel[(num_tokens,)](
        partial,
        router_input,
        per_expert_scale,
        weights,
        index,
        num_tokens,
        SPLITS=splits,
        NUM_EXPERTS=num_experts,
        NUM_ACTIVE=num_active,
        EXPERTS=experts,
        ACTIVE=triton.next_power_of_2(num_active),
        num_warps=1,
        **dependent_launch(router_input.device),
    )
    return weights, index


def sort_by_expert(index: Tensor, num_experts: int, rows_per_tile: int) -> ExpertTiles:
    """The pairs sorted by expert and cut into tiles. index: (M, A) int32 → `ExpertTiles`.

    Example: `tiles = sort_by_expert(index, 128, expert_config(256, index.device).rows)`.
    """
    if index.ndim != 2 or index.dtype != torch.int32 or not index.is_contiguous():
        raise ValueError(
            f"sort_by_expert.index must be contiguous (M, A) int32, got {tuple(index.shape)} {index.dtype}."
        )
    num_pairs = index.numel()
    # Every expert with rows has at most one tile that is not full.
    max_tiles = num_pairs // rows_per_tile + min(num_experts, num_pairs)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=index.device)
    tiles = torch.empty(max_tiles, 3, dtype=torch.int32, device=index.device)
    finished = torch.empty(max_tiles, dtype=torch.int32, device=index.device)
    _sort_by_expert_kernel[(num_experts,)](
        index,
        pairs,
        tiles,
        finished,
        num_pairs,
        max_tiles,
        ROWS=rows_per_tile,
        EXPERTS=max(triton.next_power_of_2(num_experts), 2),
        BLOCK=min(max(triton.next_power_of_2(num_pairs), 128), 4096),
        num_warps=8,
        **dependent_launch(index.device),
    )
    return ExpertTiles(pairs, tiles, finished, index.shape[1], rows_per_tile)


@triton.jit(do_not_specialize=["num_tokens"])
def _partial_scores_kernel(
    router_input: tl.tensor,
    proj: tl.tensor,
    partial: tl.tensor,
    num_tokens: tl.tensor,
    WIDTH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """All experts' scores of ROWS tokens over one block of the depth, which is one load and one product."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, EXPERTS)
    depth = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    row_inside = (rows < num_tokens)[:, None]
    expert_inside = inside(experts, NUM_EXPERTS, NUM_EXPERTS == EXPERTS)
    left = inside(depth, WIDTH, WIDTH % DEPTH == 0)[None, :]
    w = tl.load(proj + experts[:, None] * WIDTH + depth[None, :], mask=expert_inside[:, None] & left, other=0.0)
    wait_for_launches_before(DEPENDENT)
    x = tl.load(router_input + rows[:, None].to(tl.int64) * WIDTH + depth[None, :], mask=row_inside & left, other=0.0)
    scores = tl.dot(w, x.T, input_precision="ieee").T
    at = (tl.program_id(1) * num_tokens + rows)[:, None].to(tl.int64) * NUM_EXPERTS + experts[None, :]
    tl.store(partial + at, scores, mask=row_inside & expert_inside[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _choose_experts_kernel(
    partial: tl.tensor,
    router_input: tl.tensor,
    per_expert_scale: tl.tensor,
    weights: tl.tensor,
    index: tl.tensor,
    num_tokens: tl.tensor,
    SPLITS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    EXPERTS: tl.constexpr,
    ACTIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """One warp a token, so that every reduction over the experts stays in registers."""
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    expert_inside = inside(experts, NUM_EXPERTS, NUM_EXPERTS == EXPERTS)
    wait_for_launches_before(DEPENDENT)
    scores = tl.zeros([EXPERTS], tl.float32)
    for split in tl.static_range(SPLITS):
        scores += tl.load(partial + (split * num_tokens + token) * NUM_EXPERTS + experts, mask=expert_inside, other=0.0)
    scores = scores.to(router_input.dtype.element_ty).to(tl.float32)
    scores = tl.where(expert_inside, scores, float("-inf"))
    probabilities = tl.exp(scores - tl.max(scores, 0))
    probabilities /= tl.sum(probabilities, 0)

    slots = tl.arange(0, ACTIVE)
    top = tl.zeros([ACTIVE], tl.float32)
    chosen = tl.zeros([ACTIVE], tl.int32)
    for k in tl.static_range(NUM_ACTIVE):
        largest, first = tl.max(probabilities, 0, return_indices=True)
        first = tl.minimum(first, NUM_EXPERTS - 1)  # where scores are NaN, any index comes first
        top = tl.where(slots == k, largest, top)
        chosen = tl.where(slots == k, first, chosen)
        probabilities = tl.where(experts == first, -1.0, probabilities)
    top /= tl.sum(top, 0)
    top *= tl.load(per_expert_scale + chosen).to(tl.float32)
    at = token * NUM_ACTIVE + slots
    tl.store(weights + at, top, mask=slots < NUM_ACTIVE)
    tl.store(index + at, chosen, mask=slots < NUM_ACTIVE)


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _sort_by_expert_kernel(
    index: tl.tensor,
    pairs: tl.tensor,
    tiles: tl.tensor,
    finished: tl.tensor,
    num_pairs: tl.tensor,
    max_tiles: tl.tensor,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """One program an expert. Each counts all experts for itself, which is cheaper than a launch to share the counts."""
    mine = tl.program_id(0)
    slots = tl.arange(0, BLOCK)
    experts = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], tl.int32)
    wait_for_launches_before(DEPENDENT)
    for start in range(0, num_pairs, BLOCK):
        mask = start + slots < num_pairs
        expert = tl.load(index + start + slots, mask=mask, other=0)
        counts += tl.histogram(expert, EXPERTS, mask=mask)
    tile_counts = (counts + ROWS - 1) // ROWS
    first_row = tl.sum(tl.where(experts < mine, counts, 0))
    first_tile = tl.sum(tl.where(experts < mine, tile_counts, 0))
    num_rows = tl.sum(tl.where(experts == mine, counts, 0))
    my_tiles = tl.sum(tl.where(experts == mine, tile_counts, 0))

    written = first_row
    for start in range(0, num_pairs, BLOCK):
        pair = start + slots
        hit = tl.load(index + pair, mask=pair < num_pairs, other=-1) == mine
        rank = tl.cumsum(hit.to(tl.int32), 0)
        tl.store(pairs + written + rank - 1, pair, mask=hit)
        written += tl.sum(hit.to(tl.int32))

    for start in range(0, my_tiles, 64):
        tile = start + tl.arange(0, 64)
        entry = tiles + (first_tile + tile) * 3
        tl.store(entry, tl.zeros([64], tl.int32) + mine, mask=tile < my_tiles)
        tl.store(entry + 1, first_row + tile * ROWS, mask=tile < my_tiles)
        tl.store(entry + 2, tl.minimum(num_rows - tile * ROWS, ROWS), mask=tile < my_tiles)
    if mine == 0:
        for start in range(0, max_tiles, 64):
            tile = start + tl.arange(0, 64)
            tl.store(finished + tile, tl.zeros([64], tl.int32), mask=tile < max_tiles)
        for start in range(tl.sum(tile_counts), max_tiles, 64):
            tile = start + tl.arange(0, 64)[:, None]
            field = tl.arange(0, 4)[None, :]
            nothing = tl.zeros([64, 4], tl.int32)
            tl.store(tiles + tile * 3 + field, nothing, mask=(tile < max_tiles) & (field < 3))
