"""Routing on the device in three launches: from router inputs to tiles of rows by expert.

`norms.attention_residual` computes the router's input, because it already has the mean square that its norm needs. The
only atomics add integers, so the same input always gives the same order. Reference: `reference.py`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.blocks import MANY_ROWS, inside, wait_for_launches_before
from dgemma_kernels.ops.configs import dependent_launch

_SPLITS_OF_MANY = 4  # parts of the depth, from MANY_ROWS tokens on
# Rows of `counts` that a program of the sort loads together.
_COUNT_ROWS_PER_LOAD = 8


class ExpertTiles(NamedTuple):
    """The (token, k) pairs in the order of their experts, in tiles of at most `rows_per_tile` rows of one expert.

    A pair is token * A + k. `pairs`: (M * A,) int32, stable within an expert. `tiles`: (max_tiles, 3) int32 of (expert,
    first row, rows) in the order of the first row. The host knows only a bound on their number, so the last tiles
    may be empty. `finished`: (max_tiles,) int32 counters of the experts' kernels. `queue`: (2,) int32, the next block
    of `experts.hopper` or item of `experts.hopper_many`, and the number of tiles. Counters and next block start at
    zero, so use the tiles only once. (`experts.hopper_many` sets its next item to zero again.)
    """

    pairs: Tensor
    tiles: Tensor
    finished: Tensor
    queue: Tensor
    num_experts: int
    num_active: int
    rows_per_tile: int


def tokens_per_count(num_tokens: int) -> int:
    """Return the number of tokens per row of `counts`, a power of two that grows with the number of tokens.

    Example: `tokens_per_count(256)` is 64, so that the counts of one canvas have four rows.
    """
    few = max(min(triton.next_power_of_2(num_tokens), 64), 16)
    return min(max(triton.next_power_of_2(triton.cdiv(num_tokens, _COUNT_ROWS_PER_LOAD)), few), 512)


def route(
    router_input: Tensor, proj: Tensor, per_expert_scale: Tensor, num_active: int, *, one_order: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose each token's experts and weights: product, float32 softmax, top `num_active`, renormalised, scaled.

    Scores round to the input's dtype before the softmax, as in a linear layer. In a tie the lower expert wins.
    router_input: (M, D), proj: (E, D), per_expert_scale: (E,) → weights (M, A) float32; index (M, A) int32, largest
    probability first; counts (N, E) int32, pairs per expert for every `tokens_per_count(M)` tokens, for
    `sort_by_expert`. With `one_order` scores are added in the same order for any number of tokens.

    Example: `weights, index, counts = route(router_in, router.proj.weight, router.per_expert_scale, 8)`.
    """
    num_tokens, width = router_input.shape
    num_experts = proj.shape[0]
    assert proj.shape == (num_experts, width)
    assert router_input.is_contiguous()
    assert proj.is_contiguous()
    experts = max(triton.next_power_of_2(num_experts), 16)
    depth, steps = _split_depth(experts, proj.dtype), 1
    rows = 16 if num_tokens <= 16 else 32 if num_tokens <= 512 else 64
    many = num_tokens >= MANY_ROWS and proj.dtype.itemsize <= 2 and not one_order
    if many:  # with more parts, partial scores would be most of the bytes
        depth, steps = 64, triton.cdiv(width, 64 * _SPLITS_OF_MANY)
    splits = triton.cdiv(width, depth * steps)
    weights = torch.empty(num_tokens, num_active, dtype=torch.float32, device=router_input.device)
    index = torch.empty(num_tokens, num_active, dtype=torch.int32, device=router_input.device)
    chunk = tokens_per_count(num_tokens)
    counts = torch.empty(triton.cdiv(num_tokens, chunk), num_experts, dtype=torch.int32, device=router_input.device)
    partial = torch.empty(splits, num_tokens, num_experts, dtype=torch.float32, device=router_input.device)
    _partial_scores_kernel[(triton.cdiv(num_tokens, rows), splits)](
        router_input,
        proj,
        partial,
        counts,
        num_tokens,
        counts.numel(),
        WIDTH=width,
        NUM_EXPERTS=num_experts,
        EXPERTS=experts,
        ROWS=rows,
        DEPTH=depth,
        STEPS=steps,
        num_warps=4 if many else 8,
        num_stages=3,
        **dependent_launch(router_input.device),
    )
    _choose_experts_kernel[(num_tokens,)](
        partial,
        router_input,
        per_expert_scale,
        weights,
        index,
        counts,
        num_tokens,
        SPLITS=splits,
        NUM_EXPERTS=num_experts,
        NUM_ACTIVE=num_active,
        EXPERTS=experts,
        ACTIVE=triton.next_power_of_2(num_active),
        CHUNK=chunk,
        num_warps=1,
        **dependent_launch(router_input.device),
    )
    return weights, index, counts


def sort_by_expert(index: Tensor, counts: Tensor, rows_per_tile: int) -> ExpertTiles:
    """Sort the pairs by expert, in tiles. index: (M, A) int32, counts: (N, E) int32, both from `route`.

    The experts of one token must differ.

    Example: `tiles = sort_by_expert(index, counts, expert_config(256, index.device).rows)`.
    """
    num_tokens, num_active = index.shape
    num_pairs, chunk, num_experts = index.numel(), tokens_per_count(num_tokens), counts.shape[-1]
    num_chunks = triton.cdiv(num_tokens, chunk)
    assert index.is_contiguous()
    assert counts.shape[0] == num_chunks
    # Every expert with rows has at most one partly filled tile.
    max_tiles = num_pairs // rows_per_tile + min(num_experts, num_pairs)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=index.device)
    tiles = torch.empty(max_tiles, 3, dtype=torch.int32, device=index.device)
    finished = torch.empty(max_tiles, dtype=torch.int32, device=index.device)
    queue = torch.empty(2, dtype=torch.int32, device=index.device)
    _sort_by_expert_kernel[(num_experts, num_chunks)](
        index,
        counts,
        pairs,
        tiles,
        finished,
        queue,
        num_tokens,
        max_tiles,
        NUM_ACTIVE=num_active,
        ACTIVE=triton.next_power_of_2(num_active),
        ROWS=rows_per_tile,
        NUM_EXPERTS=num_experts,
        EXPERTS=max(triton.next_power_of_2(num_experts), 2),
        CHUNK=chunk,
        AT_ONCE=min(triton.next_power_of_2(num_chunks), _COUNT_ROWS_PER_LOAD),
        num_warps=1 if chunk <= 128 else 4,
        **dependent_launch(index.device),
    )
    return ExpertTiles(pairs, tiles, finished, queue, num_experts, num_active, rows_per_tile)


def _split_depth(experts: int, dtype: torch.dtype) -> int:
    # Depth per program. A program with the whole depth would read all weights at the rate of one multiprocessor. With
    # this depth, the block of all experts' weights is at most 64 KiB. float32 has no warpgroup instruction and spills
    # beyond 32.
    return min(256, 32768 // experts) if dtype.itemsize <= 2 else 32


@triton.jit(do_not_specialize=["num_tokens", "num_counts"])
def _partial_scores_kernel(
    router_input: tl.tensor,
    proj: tl.tensor,
    partial: tl.tensor,
    counts: tl.tensor,
    num_tokens: tl.tensor,
    num_counts: tl.tensor,
    WIDTH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    STEPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Compute all experts' scores of ROWS tokens over STEPS blocks of the depth; a single block is one load.

    One program sets the counts to zero. The next launch adds to them.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, EXPERTS)
    depth = tl.program_id(1) * (DEPTH * STEPS) + tl.arange(0, DEPTH)
    row_inside = (rows < num_tokens)[:, None]
    expert_inside = inside(experts, NUM_EXPERTS, NUM_EXPERTS == EXPERTS)
    weights = proj + experts[:, None] * WIDTH + depth[None, :]
    inputs = router_input + rows[:, None].to(tl.int64) * WIDTH + depth[None, :]
    EXACT: tl.constexpr = WIDTH % (DEPTH * STEPS) == 0
    if STEPS == 1:
        left = inside(depth, WIDTH, EXACT)[None, :]
        w = tl.load(weights, mask=expert_inside[:, None] & left, other=0.0)
        wait_for_launches_before(DEPENDENT)
        x = tl.load(inputs, mask=row_inside & left, other=0.0)
        scores = tl.dot(w, x.T, input_precision="ieee").T
    else:
        wait_for_launches_before(DEPENDENT)
        sums = tl.zeros([EXPERTS, ROWS], tl.float32)
        for step in range(STEPS):
            left = inside(depth + step * DEPTH, WIDTH, EXACT)[None, :]
            w = tl.load(weights + step * DEPTH, mask=expert_inside[:, None] & left, other=0.0)
            x = tl.load(inputs + step * DEPTH, mask=row_inside & left, other=0.0)
            sums = tl.dot(w, x.T, sums, input_precision="ieee")
        scores = sums.T
    at = (tl.program_id(1) * num_tokens + rows)[:, None].to(tl.int64) * NUM_EXPERTS + experts[None, :]
    tl.store(partial + at, scores, mask=row_inside & expert_inside[None, :])
    if tl.program_id(0) + tl.program_id(1) == 0:
        for start in range(0, num_counts, 1024):
            count = start + tl.arange(0, 1024)
            tl.store(counts + count, tl.zeros([1024], tl.int32), mask=count < num_counts)


@triton.jit
def choose_experts(
    scores: tl.tensor, scales: tl.tensor, expert_inside: tl.tensor, NUM_ACTIVE: tl.constexpr, ACTIVE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return weights and numbers of the experts with the largest scores, largest first: (ACTIVE,) each.

    Probabilities are not negative, so their bits as integers have the same order. A warp finds the largest integer in
    one instruction.
    """
    EXPERTS: tl.constexpr = scores.shape[0]
    TAKEN: tl.constexpr = -(2**31)
    experts = tl.arange(0, EXPERTS)
    scores = tl.where(expert_inside, scores, float("-inf"))
    probabilities = tl.exp(scores - tl.max(scores, 0))
    probabilities /= tl.sum(probabilities, 0)

    slots = tl.arange(0, ACTIVE)
    top = tl.zeros([ACTIVE], tl.float32)
    chosen = tl.zeros([ACTIVE], tl.int32)
    keys = tl.where(expert_inside, probabilities.to(tl.int32, bitcast=True), TAKEN)
    for k in tl.static_range(NUM_ACTIVE):
        largest = tl.max(keys, 0)
        first = tl.min(tl.where(keys == largest, experts, EXPERTS), 0)
        top = tl.where(slots == k, largest.to(tl.float32, bitcast=True), top)
        chosen = tl.where(slots == k, first, chosen)
        keys = tl.where(experts == first, TAKEN, keys)
    top /= tl.sum(top, 0)
    top *= tl.gather(scales, chosen, 0)  # a load here would wait for memory again
    return top, chosen


@triton.jit(do_not_specialize=["num_tokens"])
def _choose_experts_kernel(
    partial: tl.tensor,
    router_input: tl.tensor,
    per_expert_scale: tl.tensor,
    weights: tl.tensor,
    index: tl.tensor,
    counts: tl.tensor,
    num_tokens: tl.tensor,
    SPLITS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    EXPERTS: tl.constexpr,
    ACTIVE: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Choose the experts of a token in one warp, so that reductions over the experts stay in registers."""
    experts = tl.arange(0, EXPERTS)
    expert_inside = inside(experts, NUM_EXPERTS, NUM_EXPERTS == EXPERTS)
    scales = tl.load(per_expert_scale + experts, mask=expert_inside, other=0.0).to(tl.float32)
    wait_for_launches_before(DEPENDENT)
    slots = tl.arange(0, ACTIVE)
    token = tl.program_id(0).to(tl.int64)
    scores = tl.zeros([EXPERTS], tl.float32)
    for split in tl.static_range(SPLITS):
        at = partial + (split * num_tokens + token) * NUM_EXPERTS + experts
        scores += tl.load(at, mask=experts < NUM_EXPERTS, other=0.0)
    scores = scores.to(router_input.dtype.element_ty).to(tl.float32)
    top, chosen = choose_experts(scores, scales, expert_inside, NUM_ACTIVE, ACTIVE)
    pair = token * NUM_ACTIVE + slots
    slot_inside = slots < NUM_ACTIVE
    tl.store(weights + pair, top, mask=slot_inside)
    tl.store(index + pair, chosen, mask=slot_inside)
    tl.atomic_add(counts + token // CHUNK * NUM_EXPERTS + chosen, 1, mask=slot_inside, sem="relaxed")


@triton.jit(do_not_specialize=["num_tokens", "max_tiles"])
def _sort_by_expert_kernel(
    index: tl.tensor,
    counts: tl.tensor,
    pairs: tl.tensor,
    tiles: tl.tensor,
    finished: tl.tensor,
    queue: tl.tensor,
    num_tokens: tl.tensor,
    max_tiles: tl.tensor,
    NUM_ACTIVE: tl.constexpr,
    ACTIVE: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Write the pairs of an expert and CHUNK tokens. `counts` gives the number of pairs before them."""
    my_chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    experts = tl.arange(0, EXPERTS)
    token = my_chunk * CHUNK + tl.arange(0, CHUNK)
    slot = tl.arange(0, ACTIVE)[None, :]
    slot_inside = (token < num_tokens)[:, None] & inside(slot, NUM_ACTIVE, NUM_ACTIVE == ACTIVE)
    wait_for_launches_before(DEPENDENT)
    # Loaded here and used after the counts: one wait for both.
    expert = tl.load(index + token[:, None] * NUM_ACTIVE + slot, mask=slot_inside, other=-1)
    total = tl.zeros([EXPERTS], tl.int32)
    earlier = tl.zeros([EXPERTS], tl.int32)  # counts of the earlier chunks
    for start in range(0, num_chunks, AT_ONCE):
        for at in tl.static_range(AT_ONCE):
            chunk = start + at
            limit = tl.where(chunk < num_chunks, NUM_EXPERTS, 0)
            count = tl.load(counts + chunk * NUM_EXPERTS + experts, mask=experts < limit, other=0)
            total += count
            earlier += tl.where(chunk < my_chunk, count, 0)

    mine = tl.program_id(0)
    first_row = tl.sum(tl.where(experts < mine, total, 0))
    first = first_row + tl.sum(tl.where(experts == mine, earlier, 0))
    place = tl.sum(tl.where(expert == mine, slot + 1, 0), 1)  # k + 1 where the token chose this expert, else 0
    rank = tl.cumsum((place > 0).to(tl.int32), 0) - 1
    tl.store(pairs + first + rank, token * NUM_ACTIVE + place - 1, mask=place > 0)

    if my_chunk == 0:  # one program per expert writes its tiles
        tile_counts = (total + ROWS - 1) // ROWS
        first_tile = tl.sum(tl.where(experts < mine, tile_counts, 0))
        num_rows = tl.sum(tl.where(experts == mine, total, 0))
        for start in range(0, num_rows, 32 * ROWS):
            row = start + tl.arange(0, 32) * ROWS
            entry = tiles + (first_tile + row // ROWS) * 3
            tl.store(entry, tl.zeros([32], tl.int32) + mine, mask=row < num_rows)
            tl.store(entry + 1, first_row + row, mask=row < num_rows)
            tl.store(entry + 2, tl.minimum(num_rows - row, ROWS), mask=row < num_rows)
        num_tiles = tl.sum(tile_counts)
        field = tl.arange(0, 4)
        if mine == 0:
            tl.store(queue, 0)
            tl.store(queue + 1, num_tiles)
        for tile in range(mine, max_tiles, NUM_EXPERTS):
            tl.store(finished + tile, 0)
            tl.store(tiles + tile * 3 + field, tl.zeros([4], tl.int32), mask=field < tl.where(tile >= num_tiles, 3, 0))
