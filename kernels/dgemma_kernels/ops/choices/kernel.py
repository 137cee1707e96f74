"""Routing in training: chosen experts, the weights of the choices with their gradient, and choices grouped by expert.

A program that chooses or weighs has a few tokens, with all their logits. Groups are made by a counting
sort in two launches. Reference: `reference.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.ops.grouped.tiles import MORE_ROWS, list_tiles, rows_per_tile

_ROWS = 8  # tokens of a program
_MOST_EXPERTS = 512
_CHOICES = 256  # per program in the sort
_BLOCKS = 64  # blocks of choices whose counts are added at once
_TILES = 4  # listed at once


def fits(num_experts: int) -> bool:
    """Return True if these kernels support `num_experts` experts: 2, 4, 8, ... up to 512.

    Example: `fits(128)` is True.
    """
    return 2 <= num_experts <= _MOST_EXPERTS and num_experts & (num_experts - 1) == 0


def choose_experts(logits: Tensor, scales: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities (M, E), and weights and ids (M, A) of the A most likely experts, the most likely first.

    Weights are the chosen probabilities divided by their sum, times the expert's scale (E,). Of equally likely experts,
    the first is chosen. logits: (M, E).

    Example: `probabilities, weights, experts = choose_experts(logits, router.per_expert_scale, 8)`.
    """
    _check("choose_experts", logits, scales)
    num_tokens, num_experts = logits.shape
    probabilities, weights = _new_results(logits, top_k)
    experts = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    _choose_experts_kernel[(triton.cdiv(num_tokens, _ROWS),)](
        logits, scales, probabilities, weights, experts, num_tokens, E=num_experts, A=top_k, ROWS=_ROWS
    )
    return probabilities, weights, experts


def weigh_choices(logits: Tensor, experts: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities (M, E) and weights (M, A) as `choose_experts`, for experts (M, A) that are chosen already.

    Example: `probabilities, weights = weigh_choices(logits, experts, router.per_expert_scale)`.
    """
    _check("weigh_choices", logits, scales, experts)
    probabilities, weights = _new_results(logits, experts.shape[1])
    _weigh_choices_kernel[(triton.cdiv(logits.shape[0], _ROWS),)](
        logits,
        scales,
        experts,
        probabilities,
        weights,
        logits.shape[0],
        E=logits.shape[1],
        A=experts.shape[1],
        ROWS=_ROWS,
    )
    return probabilities, weights


def weigh_choices_gradient(
    grad: Tensor, of_probabilities: Tensor | None, logits: Tensor, experts: Tensor, scales: Tensor
) -> Tensor:
    """Return the gradient of the logits (M, E) from those of the weights (M, A) and the probabilities (M, E).

    of_probabilities: None if they have no gradient.

    Example: `weigh_choices_gradient(grad, None, logits, experts, router.per_expert_scale)`.
    """
    _check("weigh_choices_gradient", logits, scales, experts)
    out = torch.empty_like(logits)
    _weigh_choices_gradient_kernel[(triton.cdiv(logits.shape[0], _ROWS),)](
        grad.contiguous(),
        None if of_probabilities is None else of_probabilities.contiguous(),
        logits,
        scales,
        experts,
        out,
        logits.shape[0],
        E=logits.shape[1],
        A=experts.shape[1],
        ROWS=_ROWS,
    )
    return out


def group_choices(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort choices (M, A) by expert: return the choice of each row (R,), the row of each choice (M, A), ends and tiles.

    The choices of an expert keep their order. ends: (E,) int32, where the rows of each expert end. tiles: (1 + T, 3)
    int32, for `grouped`. The first row begins with the number of tiles and a zero. Every other row is (expert, first
    row, rows) of a tile. T is at least the number of tiles, which the host does not know.

    Example: `order, back, ends, tiles = group_choices(experts, 128)`.
    """
    if not experts.is_contiguous() or not fits(num_experts):
        raise ValueError(
            f"group_choices must get contiguous choices among at most {_MOST_EXPERTS} experts, a power of two, got "
            f"{num_experts}."
        )
    count = experts.numel()
    num_blocks = triton.cdiv(count, _CHOICES)
    counts = torch.empty(num_blocks, num_experts, dtype=torch.int32, device=experts.device)
    order, back = torch.empty(count, dtype=torch.int64, device=experts.device), torch.empty_like(experts)
    ends = counts.new_empty(num_experts)
    tile_rows = rows_per_tile(count, num_experts)
    num_tiles = count // (tile_rows + MORE_ROWS) + num_experts
    tiles = counts.new_empty(1 + num_tiles, 3)
    sizes = {"E": num_experts, "CHOICES": _CHOICES}
    _count_choices_kernel[(num_blocks,)](experts, counts, count, **sizes, num_warps=8)
    _place_choices_kernel[(num_blocks,)](
        experts,
        counts,
        order,
        back,
        ends,
        tiles,
        count,
        num_blocks,
        num_tiles,
        tile_rows,
        **sizes,
        BLOCKS=_BLOCKS,
        TILES=_TILES,
        MORE_ROWS=MORE_ROWS,
        num_warps=8,
    )
    return order, back, ends, tiles


def _new_results(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    probabilities = torch.empty_like(logits, dtype=torch.float32)
    return probabilities, probabilities.new_empty(logits.shape[0], top_k)


def _check(owner: str, logits: Tensor, scales: Tensor, experts: Tensor | None = None) -> None:
    if not fits(logits.shape[1]) or scales.shape != logits.shape[1:]:
        raise ValueError(
            f"{owner} must get logits of at most {_MOST_EXPERTS} experts, a power of two, and a scale for each, got "
            f"{tuple(logits.shape)} and {tuple(scales.shape)}."
        )
    if not all(x is None or x.is_contiguous() for x in (logits, scales, experts)):
        raise ValueError(f"{owner} must get contiguous tensors.")


@triton.jit
def _load_probabilities(logits: tl.tensor, row: tl.tensor, is_row: tl.tensor, E: tl.constexpr) -> tl.tensor:
    """Return the softmax (ROWS, E) of some rows of the logits."""
    expert = tl.arange(0, E)
    scores = tl.load(logits + row[:, None] * E + expert[None, :], is_row[:, None], 0.0).to(tl.float32)
    exact = tl.exp(scores - tl.max(scores, 1)[:, None])
    return exact / tl.sum(exact, 1)[:, None]


@triton.jit(do_not_specialize=["num_tokens"])
def _choose_experts_kernel(
    logits: tl.tensor,
    scales: tl.tensor,
    probabilities: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    num_tokens: tl.tensor,
    E: tl.constexpr,
    A: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row, expert = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, E)
    is_row = row < num_tokens
    likely = _load_probabilities(logits, row, is_row, E)
    tl.store(probabilities + row[:, None] * E + expert[None, :], likely, is_row[:, None])
    # NaN equals nothing, so in a row of NaN no expert would be found. With zeros instead, the row gets the first
    # experts, and 0 / 0 makes their weights NaN.
    left, total = tl.where(likely == likely, likely, 0.0), tl.zeros((ROWS,), tl.float32)
    found = ()
    for choice in tl.static_range(A):
        largest = tl.max(left, 1)
        chosen = tl.min(tl.where(left == largest[:, None], expert[None, :], E), 1)
        left = tl.where(expert[None, :] == chosen[:, None], -1.0, left)
        total += largest
        found += (largest * tl.load(scales + chosen).to(tl.float32),)  # type: ignore[assignment]
        tl.store(experts + row * A + choice, chosen.to(tl.int64), is_row)
    for choice in tl.static_range(A):
        tl.store(weights + row * A + choice, found[choice] / total, is_row)


@triton.jit(do_not_specialize=["num_tokens"])
def _weigh_choices_kernel(
    logits: tl.tensor,
    scales: tl.tensor,
    experts: tl.tensor,
    probabilities: tl.tensor,
    weights: tl.tensor,
    num_tokens: tl.tensor,
    E: tl.constexpr,
    A: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row, expert = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, E)
    is_row = row < num_tokens
    likely = _load_probabilities(logits, row, is_row, E)
    tl.store(probabilities + row[:, None] * E + expert[None, :], likely, is_row[:, None])
    total = tl.zeros((ROWS,), tl.float32)
    found = ()
    for choice in tl.static_range(A):
        chosen = tl.load(experts + row * A + choice, is_row, 0).to(tl.int32)
        value = tl.sum(tl.where(expert[None, :] == chosen[:, None], likely, 0.0), 1)
        total += value
        found += (value * tl.load(scales + chosen).to(tl.float32),)  # type: ignore[assignment]
    for choice in tl.static_range(A):
        tl.store(weights + row * A + choice, found[choice] / total, is_row)


@triton.jit(do_not_specialize=["num_tokens"])
def _weigh_choices_gradient_kernel(
    grad: tl.tensor,
    of_probabilities: tl.tensor,
    logits: tl.tensor,
    scales: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    E: tl.constexpr,
    A: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row, expert = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, E)
    is_row = row < num_tokens
    at = row[:, None] * E + expert[None, :]
    likely = _load_probabilities(logits, row, is_row, E)
    # A weight is p scale / total, so the gradient of p is (grad scale - Σ grad weight) / total.
    total, mean, direct = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, E), tl.float32)
    is_chosen = tl.zeros((ROWS, E), tl.float32)
    for choice in tl.static_range(A):
        chosen = tl.load(experts + row * A + choice, is_row, 0).to(tl.int32)
        of_weight = tl.load(grad + row * A + choice, is_row, 0.0).to(tl.float32) * tl.load(scales + chosen).to(
            tl.float32
        )
        here = expert[None, :] == chosen[:, None]
        value = tl.sum(tl.where(here, likely, 0.0), 1)
        total += value
        mean += of_weight * value
        direct = tl.where(here, of_weight[:, None], direct)
        is_chosen = tl.where(here, 1.0, is_chosen)
    of_likely = (direct - (mean / total)[:, None] * is_chosen) / total[:, None]
    if of_probabilities is not None:
        of_likely += tl.load(of_probabilities + at, is_row[:, None], 0.0).to(tl.float32)
    of_logits = likely * (of_likely - tl.sum(likely * of_likely, 1)[:, None])
    tl.store(out + at, of_logits.to(out.dtype.element_ty), is_row[:, None])


@triton.jit
def _load_chosen(
    experts: tl.tensor, count: tl.tensor, E: tl.constexpr, CHOICES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the experts of this program's choices, (CHOICES,), and their one-hot code: (CHOICES, E).

    After the last choice, the expert is E.
    """
    choice = tl.program_id(0) * CHOICES + tl.arange(0, CHOICES)
    chosen = tl.load(experts + choice, choice < count, E).to(tl.int32)
    return chosen, (chosen[:, None] == tl.arange(0, E)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["count"])
def _count_choices_kernel(
    experts: tl.tensor, counts: tl.tensor, count: tl.tensor, E: tl.constexpr, CHOICES: tl.constexpr
) -> None:
    """Count the choices of each expert in this program's block of choices."""
    _, is_chosen = _load_chosen(experts, count, E, CHOICES)
    tl.store(counts + tl.program_id(0) * E + tl.arange(0, E), tl.sum(is_chosen, 0))


@triton.jit(do_not_specialize=["count", "num_blocks", "num_tiles", "tile_rows"])
def _place_choices_kernel(
    experts: tl.tensor,
    counts: tl.tensor,
    order: tl.tensor,
    back: tl.tensor,
    ends: tl.tensor,
    tiles: tl.tensor,
    count: tl.tensor,
    num_blocks: tl.tensor,
    num_tiles: tl.tensor,
    tile_rows: tl.tensor,
    E: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    MORE_ROWS: tl.constexpr,
) -> None:
    """Find the row of each choice in this program's block: after all choices of earlier experts, and earlier choices of
    the same expert. List this program's share of the tiles."""
    block, expert, number = tl.program_id(0), tl.arange(0, E), tl.arange(0, CHOICES)
    chosen, is_chosen = _load_chosen(experts, count, E, CHOICES)
    total, before = tl.zeros((E,), tl.int32), tl.zeros((E,), tl.int32)
    for begin in range(0, num_blocks, BLOCKS):
        others = begin + tl.arange(0, BLOCKS)
        found = tl.load(counts + others[:, None] * E + expert[None, :], (others < num_blocks)[:, None], 0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where((others < block)[:, None], found, 0), 0)
    until = tl.cumsum(total, 0)
    if block == 0:
        tl.store(ends + expert, until)
    for begin in range(block * TILES, num_tiles, num_blocks * TILES):
        list_tiles(tiles, begin, num_tiles, total, until, tile_rows, E, TILES, MORE_ROWS)
    # Comparing each choice with the earlier ones is cheaper than a running count over a column per expert.
    is_earlier = (chosen[None, :] == chosen[:, None]) & (number[None, :] < number[:, None])
    free = until - total + before
    row = tl.sum(is_chosen * free[None, :], 1) + tl.sum(is_earlier.to(tl.int32), 1)
    choice = block * CHOICES + number
    tl.store(back + choice, row.to(tl.int64), choice < count)
    tl.store(order + row, choice.to(tl.int64), choice < count)
