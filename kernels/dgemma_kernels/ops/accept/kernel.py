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

from dgemma.checks import require, require_tensor
from dgemma.diffusion import draws

MAX_CANVAS = 1024
_PAIRS = 8192  # comparisons per program: 32 positions of a canvas of 256
_NOISE = tl.constexpr(draws.purpose_word("noise") - (1 << 32) * (draws.purpose_word("noise") >> 31))  # as int32


class _Before(NamedTuple):
    """The tensors that a step reads, as one argument of the kernel; see `accept`."""

    entropy: Any
    tokens: Any
    argmax: Any
    canvas: Any
    open: Any
    frozen: Any
    draft: Any
    done: Any
    seeds: Any
    block: Any
    step: Any
    num_steps: Any
    recent: Any
    ended: Any


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


def accept(
    entropy: Tensor,
    tokens: Tensor,
    argmax: Tensor,
    canvas: Tensor,
    open: Tensor,
    frozen: Tensor,
    draft: Tensor,
    done: Tensor,
    seeds: Tensor,
    block: Tensor,
    step: Tensor,
    num_steps: Tensor,
    recent: Tensor | None = None,
    ended: Tensor | None = None,
    *,
    bound: float,
    vocab_size: int,
    commit_canvas: bool = False,
    confidence: float = 0.0,
    compare_canvas: bool = False,
) -> Accepted:
    """Accept the most certain open positions while the entropies before them sum to at most `bound`; renoise the rest.

    entropy: (B, C) float32. tokens (sampled), argmax, canvas, draft: (B, C) int64. open, frozen: (B, C) bool; a
    position that is not open keeps its token and adds no entropy. done: (B,) bool. seeds, block, step, num_steps: (B,)
    int64; noise is `draws.integers(draws.uniform(seeds, block, step, C, "noise"), vocab_size)`. The draft is the
    argmax, or the new canvas if `commit_canvas`.

    A row without unfrozen positions is done. `recent` has the last n argmaxes (B, n, C) int64, or canvases if
    `compare_canvas`. With it, a row is also done if its argmax equals all of them and its mean entropy is below
    `confidence`, both over unfrozen positions. In these tests, positions in `ended` (B, C) bool count as frozen. The
    verdict is that of `dgemma.run.step.judge`, with one difference: a proposed token outside the vocabulary is reported
    even if it was not accepted.

    Example: `accept(h, sampled, argmax, canvas, open, frozen, draft, done, seeds, block, step, num_steps, recent,
    bound=0.1, vocab_size=262144, confidence=0.005).canvas`.
    """
    batch, canvas_len = entropy.shape
    require(canvas_len <= MAX_CANVAS, "accept canvas", f"have at most {MAX_CANVAS} positions", canvas_len)
    before = _Before(
        entropy, tokens, argmax, canvas, open, frozen, draft, done, seeds, block, step, num_steps, recent, ended
    )
    _check(before)
    after = Accepted(
        canvas=torch.empty_like(canvas),
        open=torch.empty_like(open),
        draft=torch.empty_like(draft),
        done=torch.empty_like(done),
        recent=None if recent is None else torch.empty_like(recent),
        accepted=torch.empty_like(open),
        renoised=torch.empty_like(open),
        verdict=torch.empty(3, batch, dtype=torch.int64, device=done.device),
    )
    canvas_block = max(16, triton.next_power_of_2(canvas_len))
    part_len = min(canvas_block, max(16, _PAIRS // canvas_block))
    _accept_kernel[(batch, triton.cdiv(canvas_len, part_len) + 1)](
        before,
        after,
        bound,
        confidence,
        vocab_size,
        canvas_len,
        RECENT=0 if recent is None else recent.shape[1],
        COMMIT_CANVAS=commit_canvas,
        COMPARE_CANVAS=compare_canvas,
        CANVAS=canvas_block,
        POSITIONS=part_len,
        num_warps=4,
    )
    return after


def _check(before: _Before) -> None:
    batch, canvas_len = before.entropy.shape
    for name, tensor in before._asdict().items():
        if tensor is None:
            continue
        dtype = torch.bool if name in ("open", "frozen", "done", "ended") else torch.int64
        dtype = torch.float32 if name == "entropy" else dtype
        shape: tuple[int, ...] = (batch, canvas_len)
        if name in ("done", "seeds", "block", "step", "num_steps"):
            shape = (batch,)
        elif name == "recent":
            shape = (batch, tensor.shape[1], canvas_len)
        rule = f"be contiguous {dtype} {shape}"
        require_tensor(tensor, f"accept {name}", rule, shape=shape, dtypes=(dtype,), contiguous=True)


@triton.jit
def _accept_kernel(
    before: _Before,
    after: Accepted,
    bound: tl.tensor,
    confidence: tl.tensor,
    vocab_size: tl.tensor,
    canvas_len: tl.tensor,
    RECENT: tl.constexpr,
    COMMIT_CANVAS: tl.constexpr,
    COMPARE_CANVAS: tl.constexpr,
    CANVAS: tl.constexpr,
    POSITIONS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    part = tl.program_id(1)
    other = tl.arange(0, CANVAS)  # the whole canvas
    other_valid = other < canvas_len
    other_at = row * canvas_len + other
    other_open = tl.load(before.open + other_at, mask=other_valid, other=0) != 0
    other_entropy = tl.load(before.entropy + other_at, mask=other_valid, other=0.0)
    was_done = tl.load(before.done + row) != 0
    step = tl.load(before.step + row)

    if part < tl.num_programs(1) - 1:
        position = part * POSITIONS + tl.arange(0, POSITIONS)
        _settle_positions(
            before,
            after,
            (row, position, was_done, step),
            (other, other_open, other_entropy),
            bound,
            vocab_size,
            canvas_len,
            RECENT,
            COMMIT_CANVAS,
            COMPARE_CANVAS,
        )
    else:
        _settle_row(
            before,
            after,
            (row, was_done, step),
            (other, other_valid, other_at, other_open, other_entropy),
            confidence,
            vocab_size,
            canvas_len,
            RECENT,
        )


@triton.jit
def _settle_positions(
    before: _Before,
    after: Accepted,
    own: tl.tuple,
    others: tl.tuple,
    bound: tl.tensor,
    vocab_size: tl.tensor,
    canvas_len: tl.tensor,
    RECENT: tl.constexpr,
    COMMIT_CANVAS: tl.constexpr,
    COMPARE_CANVAS: tl.constexpr,
) -> None:
    """Accept or renoise some positions of a row. Each one is compared with all `others`."""
    row, position, was_done, step = own
    other, other_open, other_entropy = others
    valid = position < canvas_len
    at = row * canvas_len + position
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
    accepted = decided & (inclusive.to(tl.float32) - charge <= bound)

    zero = position * 0
    block = zero + tl.load(before.block + row).to(tl.int32)
    seed = tl.load(before.seeds + row)
    high, low, _, _ = tl.philox(seed, position, zero + step.to(tl.int32), block, zero + _NOISE)
    bits = ((high >> 5).to(tl.int64) << 26) | (low >> 6).to(tl.int64)
    noise = (bits.to(tl.float64) * 1.1102230246251565e-16 * vocab_size).to(tl.int64)
    noise = tl.minimum(noise, vocab_size - 1)

    next_canvas = tl.where(decided, tl.where(accepted, token, noise), canvas)
    final = next_canvas if COMMIT_CANVAS else tl.where(frozen, canvas, argmax)
    tl.store(after.canvas + at, next_canvas, mask=valid)
    tl.store(after.accepted + at, accepted, mask=valid)
    tl.store(after.renoised + at, decided & (accepted == 0), mask=valid)
    tl.store(after.open + at, tl.where(was_done, is_open, frozen == 0), mask=valid)
    tl.store(after.draft + at, tl.where(was_done, draft, final), mask=valid)
    newest = next_canvas if COMPARE_CANVAS else argmax
    for age in tl.static_range(RECENT):
        recent_at = (row * RECENT + age) * canvas_len + position
        if age < RECENT - 1:
            newer = tl.load(before.recent + recent_at + canvas_len, mask=valid, other=0)
            tl.store(after.recent + recent_at, newer, mask=valid)
        else:
            tl.store(after.recent + recent_at, newest, mask=valid)


@triton.jit
def _settle_row(
    before: _Before,
    after: Accepted,
    own: tl.tuple,
    positions: tl.tuple,
    confidence: tl.tensor,
    vocab_size: tl.tensor,
    canvas_len: tl.tensor,
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
            then = tl.load(before.recent + (row * RECENT + age) * canvas_len + position, mask=valid, other=0)
            changed |= watched & (then != argmax)
        entropies = tl.where(watched, entropy, 0.0).to(tl.float64)
        mean_entropy = (tl.sum(entropies, 0) / tl.maximum(num_watched, 1).to(tl.float64)).to(tl.float32)
        done |= (tl.sum(changed.to(tl.int32), 0) == 0) & (mean_entropy < confidence)
    tl.store(after.done + row, done)

    left = tl.maximum(tl.load(before.num_steps + row) - step - 1, 0)
    broken = tl.sum((entropy != entropy).to(tl.int32), 0) > 0
    shown = tl.where(is_open & unfrozen & (not was_done), token, canvas)
    stray = tl.sum((valid & ((shown < 0) | (shown >= vocab_size))).to(tl.int32), 0) > 0
    num_rows = tl.num_programs(0)
    tl.store(after.verdict + row, tl.where(done, 0, left))
    tl.store(after.verdict + num_rows + row, broken.to(tl.int64))
    tl.store(after.verdict + 2 * num_rows + row, stray.to(tl.int64))
