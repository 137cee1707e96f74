"""The published sampler (entropy bound, arXiv:2505.24857) on uniform noise, with its stop rule, in one launch.

It computes the rest of a step after the sample: `dgemma.step` with `EntropyBound`, `UniformNoise` and
`StableAndConfident`. A canvas is short, so the kernel does not sort. Each position adds the entropies of all positions
that precede it in sorted order. Several programs share the positions of a row, and one more program handles the row as
a whole. Reference: `reference.py`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma.diffusion import draws

MAX_CANVAS = 1024
_PAIRS = 8192  # comparisons per program: 32 positions of a canvas of 256
_NOISE = tl.constexpr(draws.purpose_word("noise") - (1 << 32) * (draws.purpose_word("noise") >> 31))  # as int32


class Before(NamedTuple):
    """The tensors that a step reads, contiguous."""

    entropy: Any  # (B, C) float32
    tokens: Any  # (B, C) int64, sampled
    argmax: Any  # (B, C) int64
    canvas: Any  # (B, C) int64
    open: Any  # (B, C) bool; a position that is not open keeps its token and adds no entropy
    frozen: Any  # (B, C) bool
    draft: Any  # (B, C) int64
    done: Any  # (B,) bool
    seeds: Any  # (B,) int64
    block: Any  # (B,) int64
    step: Any  # (B,) int64
    num_steps: Any  # (B,) int64
    recent: Any = None  # (B, n, C) int64: the last n argmaxes, or canvases if `compare_canvas`
    ended: Any = None  # (B, C) bool: positions that count as frozen in the tests of the stop rule


class Accepted(NamedTuple):
    """The state after a step. Rows that were done keep their fields, except `recent`, as in `dgemma.step`."""

    canvas: Tensor  # (B, C) int64
    open: Tensor  # (B, C) bool
    draft: Tensor  # (B, C) int64
    done: Tensor  # (B,) bool
    recent: Tensor | None  # (B, n, C) int64
    accepted: Tensor  # (B, C) bool, positions that now have their sampled token
    renoised: Tensor  # (B, C) bool
    verdict: Tensor  # (3, B) int64, of `dgemma.run.step.judge`


class _Limits(NamedTuple):
    """The numbers of a step."""

    bound: Any
    confidence: Any
    vocab_size: Any
    canvas_len: Any


def accept(
    before: Before,
    *,
    bound: float,
    vocab_size: int,
    commit_canvas: bool = False,
    confidence: float = 0.0,
    compare_canvas: bool = False,
) -> Accepted:
    """Accept the most certain open positions while the entropies before them sum to at most `bound`; renoise the rest.

    Noise is `draws.integers(draws.uniform(seeds, block, step, C, "noise"), vocab_size)`. The draft is the argmax, or
    the new canvas if `commit_canvas`.

    A row without unfrozen positions is done. With `recent`, a row is also done if its argmax equals all of them and its
    mean entropy is below `confidence`, both over unfrozen positions. The verdict is that of `dgemma.run.step.judge`,
    with one difference: a proposed token outside the vocabulary is reported even if it was not accepted.

    Example: `accept(before, bound=0.1, vocab_size=262144, confidence=0.005).canvas`.
    """
    (batch, canvas_len), recent = before.entropy.shape, before.recent
    assert canvas_len <= MAX_CANVAS
    assert all(tensor is None or tensor.is_contiguous() for tensor in before)
    after = Accepted(
        canvas=torch.empty_like(before.canvas),
        open=torch.empty_like(before.open),
        draft=torch.empty_like(before.draft),
        done=torch.empty_like(before.done),
        recent=None if recent is None else torch.empty_like(recent),
        accepted=torch.empty_like(before.open),
        renoised=torch.empty_like(before.open),
        verdict=torch.empty(3, batch, dtype=torch.int64, device=before.done.device),
    )
    canvas_block = max(16, triton.next_power_of_2(canvas_len))
    part_len = min(canvas_block, max(16, _PAIRS // canvas_block))
    _accept_kernel[(batch, triton.cdiv(canvas_len, part_len) + 1)](
        before,
        after,
        _Limits(float(bound), confidence, vocab_size, canvas_len),
        RECENT=0 if recent is None else recent.shape[1],
        COMMIT_CANVAS=commit_canvas,
        COMPARE_CANVAS=compare_canvas,
        CANVAS=canvas_block,
        POSITIONS=part_len,
        num_warps=4,
    )
    return after


@triton.jit
def _accept_kernel(
    before: Before,
    after: Accepted,
    limits: _Limits,
    RECENT: tl.constexpr,
    COMMIT_CANVAS: tl.constexpr,
    COMPARE_CANVAS: tl.constexpr,
    CANVAS: tl.constexpr,
    POSITIONS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    part = tl.program_id(1)
    other = tl.arange(0, CANVAS)  # the whole canvas
    other_valid = other < limits.canvas_len
    other_at = row * limits.canvas_len + other
    other_open = tl.load(before.open + other_at, mask=other_valid, other=0) != 0
    other_entropy = tl.load(before.entropy + other_at, mask=other_valid, other=0.0)
    was_done = tl.load(before.done + row) != 0
    step = tl.load(before.step + row)

    if part < tl.num_programs(1) - 1:
        position = part * POSITIONS + tl.arange(0, POSITIONS)
        own, others = (row, position, was_done, step), (other, other_open, other_entropy)
        _settle_positions(before, after, own, others, limits, RECENT, COMMIT_CANVAS, COMPARE_CANVAS)
    else:
        positions = (other, other_valid, other_at, other_open, other_entropy)
        _settle_row(before, after, (row, was_done, step), positions, limits, RECENT)


@triton.jit
def _settle_positions(
    before: Before,
    after: Accepted,
    own: tl.tuple,
    others: tl.tuple,
    limits: _Limits,
    RECENT: tl.constexpr,
    COMMIT_CANVAS: tl.constexpr,
    COMPARE_CANVAS: tl.constexpr,
) -> None:
    """Accept or renoise some positions of a row. Each one is compared with all `others`."""
    row, position, was_done, step = own
    other, other_open, other_entropy = others
    valid = position < limits.canvas_len
    at = row * limits.canvas_len + position
    is_open = tl.load(before.open + at, mask=valid, other=0) != 0
    frozen = tl.load(before.frozen + at, mask=valid, other=1) != 0
    entropy = tl.load(before.entropy + at, mask=valid, other=0.0)
    canvas = tl.load(before.canvas + at, mask=valid, other=0)
    token = tl.load(before.tokens + at, mask=valid, other=0)
    argmax = tl.load(before.argmax + at, mask=valid, other=0)
    draft = tl.load(before.draft + at, mask=valid, other=0)

    # `inclusive` is the sum of entropies up to and including each position, in ascending order, ties by position.
    # It is computed in float64 and rounded once to float32, as PyTorch's `cumsum` does on a CPU.
    charge = tl.where(is_open, entropy, 0.0)
    other_charge = tl.where(other_open, other_entropy, 0.0)
    precedes = (other_charge[:, None] < charge[None, :]) | (
        (other_charge[:, None] == charge[None, :]) & (other[:, None] <= position[None, :])
    )
    inclusive = tl.sum(tl.where(precedes, other_charge.to(tl.float64)[:, None], 0.0), 0)
    decided = is_open & (frozen == 0) & (not was_done)
    accepted = decided & (inclusive.to(tl.float32) - charge <= limits.bound)

    zero = position * 0
    block = zero + tl.load(before.block + row).to(tl.int32)
    seed = tl.load(before.seeds + row)
    high, low, _, _ = tl.philox(seed, position, zero + step.to(tl.int32), block, zero + _NOISE)
    bits = ((high >> 5).to(tl.int64) << 26) | (low >> 6).to(tl.int64)
    noise = (bits.to(tl.float64) * 1.1102230246251565e-16 * limits.vocab_size).to(tl.int64)
    noise = tl.minimum(noise, limits.vocab_size - 1)

    next_canvas = tl.where(decided, tl.where(accepted, token, noise), canvas)
    final = next_canvas if COMMIT_CANVAS else tl.where(frozen, canvas, argmax)
    tl.store(after.canvas + at, next_canvas, mask=valid)
    tl.store(after.accepted + at, accepted, mask=valid)
    tl.store(after.renoised + at, decided & (accepted == 0), mask=valid)
    tl.store(after.open + at, tl.where(was_done, is_open, frozen == 0), mask=valid)
    tl.store(after.draft + at, tl.where(was_done, draft, final), mask=valid)
    newest = next_canvas if COMPARE_CANVAS else argmax
    for age in tl.static_range(RECENT):
        recent_at = (row * RECENT + age) * limits.canvas_len + position
        if age < RECENT - 1:
            newer = tl.load(before.recent + recent_at + limits.canvas_len, mask=valid, other=0)
            tl.store(after.recent + recent_at, newer, mask=valid)
        else:
            tl.store(after.recent + recent_at, newest, mask=valid)


@triton.jit
def _settle_row(
    before: Before,
    after: Accepted,
    own: tl.tuple,
    positions: tl.tuple,
    limits: _Limits,
    RECENT: tl.constexpr,
) -> None:
    """Apply the stop rule to a row, and write its verdict."""
    row, was_done, step = own
    position, valid, at, is_open, entropy = positions
    unfrozen = tl.load(before.frozen + at, mask=valid, other=1) == 0
    token = tl.load(before.tokens + at, mask=valid, other=0)
    canvas = tl.load(before.canvas + at, mask=valid, other=0)
    watched = unfrozen
    if before.ended is not None:
        watched &= tl.load(before.ended + at, mask=valid, other=1) == 0
    num_watched = tl.sum(watched.to(tl.int32), 0)
    done = was_done | (num_watched == 0)
    if before.recent is not None:
        argmax = tl.load(before.argmax + at, mask=valid, other=0)
        changed = position < 0
        for age in tl.static_range(RECENT):
            then = tl.load(before.recent + (row * RECENT + age) * limits.canvas_len + position, mask=valid, other=0)
            changed |= watched & (then != argmax)
        entropies = tl.where(watched, entropy, 0.0).to(tl.float64)
        mean_entropy = (tl.sum(entropies, 0) / tl.maximum(num_watched, 1).to(tl.float64)).to(tl.float32)
        done |= (tl.sum(changed.to(tl.int32), 0) == 0) & (mean_entropy < limits.confidence)
    tl.store(after.done + row, done)

    left = tl.maximum(tl.load(before.num_steps + row) - step - 1, 0)
    broken = tl.sum((entropy != entropy).to(tl.int32), 0) > 0
    shown = tl.where(is_open & unfrozen & (not was_done), token, canvas)
    stray = tl.sum((valid & ((shown < 0) | (shown >= limits.vocab_size))).to(tl.int32), 0) > 0
    num_rows = tl.num_programs(0)
    tl.store(after.verdict + row, tl.where(done, 0, left))
    tl.store(after.verdict + num_rows + row, broken.to(tl.int64))
    tl.store(after.verdict + 2 * num_rows + row, stray.to(tl.int64))
