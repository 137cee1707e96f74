"""From router inputs to tiles of rows by expert: who computes what, decided on the device in two launches.

The norm, scale and root in front of the product are `norms.attention_residual`'s, which already has the statistic.
No atomics: the same input gives the same order, run after run. Reference twin: `reference`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.blocks import inside


class ExpertTiles(NamedTuple):
    """The (token, k) pairs in order of their expert, cut into tiles of at most `rows_per_tile` rows of one expert.

    A pair is token * A + k. `pairs`: (M * A,) int32, stable within an expert. `tiles`: (max_tiles, 3) int32 of (expert,
    first row, rows) in order of the first row; as the host knows only a bound on their number, the last have no rows.
    """

    pairs: Tensor
    tiles: Tensor
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
    weights = torch.empty(num_tokens, num_active, dtype=torch.float32, device=router_input.device)
    index = torch.empty(num_tokens, num_active, dtype=torch.int32, device=router_input.device)
    # Few rows a program: at one canvas the time is that of reading the weights out of L2 once per multiprocessor.
    rows = 16 if num_tokens <= 1024 else 32
    _route_kernel[(triton.cdiv(num_tokens, rows),)](
        router_input,
        proj,
        per_expert_scale,
        weights,
        index,
        num_tokens,
        WIDTH=width,
        NUM_EXPERTS=num_experts,
        NUM_ACTIVE=num_active,
        EXPERTS=max(triton.next_power_of_2(num_experts), 16),
        ACTIVE=triton.next_power_of_2(num_active),
        ROWS=rows,
        DEPTH=64,
        num_warps=4,
        num_stages=4,
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
    _sort_by_expert_kernel[(num_experts,)](
        index,
        pairs,
        tiles,
        num_pairs,
        max_tiles,
        ROWS=rows_per_tile,
        EXPERTS=max(triton.next_power_of_2(num_experts), 2),
        BLOCK=min(max(triton.next_power_of_2(num_pairs), 128), 2048),
        num_warps=4,
    )
    return ExpertTiles(pairs, tiles, index.shape[1], rows_per_tile)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    router_input: tl.tensor,
    proj: tl.tensor,
    per_expert_scale: tl.tensor,
    weights: tl.tensor,
    index: tl.tensor,
    num_tokens: tl.tensor,
    WIDTH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    EXPERTS: tl.constexpr,
    ACTIVE: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, EXPERTS)
    depth = tl.arange(0, DEPTH)
    row_inside = rows < num_tokens
    expert_inside = inside(experts, NUM_EXPERTS, NUM_EXPERTS == EXPERTS)[:, None]
    inputs = router_input + rows[:, None].to(tl.int64) * WIDTH + depth[None, :]
    kernels = proj + experts[:, None] * WIDTH + depth[None, :]
    scores = tl.zeros([EXPERTS, ROWS], tl.float32)
    for start in range(0, WIDTH, DEPTH):
        left = inside(depth, WIDTH - start, WIDTH % DEPTH == 0)[None, :]
        w = tl.load(kernels + start, mask=expert_inside & left, other=0.0)
        x = tl.load(inputs + start, mask=row_inside[:, None] & left, other=0.0)
        scores = tl.dot(w, x.T, scores, input_precision="ieee")
    scores = scores.to(router_input.dtype.element_ty).to(tl.float32)
    scores = tl.where(expert_inside, scores, float("-inf"))
    probabilities = tl.exp(scores - tl.max(scores, 0)[None, :])
    probabilities /= tl.sum(probabilities, 0)[None, :]

    slots = tl.arange(0, ACTIVE)
    top = tl.zeros([ACTIVE, ROWS], tl.float32)
    chosen = tl.zeros([ACTIVE, ROWS], tl.int32)
    for k in tl.static_range(NUM_ACTIVE):
        largest = tl.max(probabilities, 0)
        first = tl.min(tl.where(probabilities == largest[None, :], experts[:, None], NUM_EXPERTS - 1), 0)
        top = tl.where(slots[:, None] == k, largest[None, :], top)
        chosen = tl.where(slots[:, None] == k, first[None, :], chosen)
        probabilities = tl.where(experts[:, None] == first[None, :], -1.0, probabilities)
    top /= tl.sum(top, 0)[None, :]
    top *= tl.load(per_expert_scale + chosen).to(tl.float32)
    at = rows[None, :] * NUM_ACTIVE + slots[:, None]
    mask = row_inside[None, :] & (slots[:, None] < NUM_ACTIVE)
    tl.store(weights + at, top, mask=mask)
    tl.store(index + at, chosen, mask=mask)


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _sort_by_expert_kernel(
    index: tl.tensor,
    pairs: tl.tensor,
    tiles: tl.tensor,
    num_pairs: tl.tensor,
    max_tiles: tl.tensor,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program an expert. Each counts all experts for itself, which is cheaper than a launch to share the counts."""
    mine = tl.program_id(0)
    slots = tl.arange(0, BLOCK)
    experts = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], tl.int32)
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
        for start in range(tl.sum(tile_counts), max_tiles, 64):
            tile = start + tl.arange(0, 64)[:, None]
            field = tl.arange(0, 4)[None, :]
            nothing = tl.zeros([64, 4], tl.int32)
            tl.store(tiles + tile * 3 + field, nothing, mask=(tile < max_tiles) & (field < 3))
