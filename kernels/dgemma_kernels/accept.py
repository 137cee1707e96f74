"""Accept, renoise and stop in one launch: the published sampler (entropy bound, arXiv:2505.24857) on uniform noise with
its stop rule; the twin is `reference.accept`, the meaning `dgemma.EntropyBound` and `dgemma.StableAndConfident`.

A canvas is short, so instead of sorting, each position adds the entropies of all that precede it in sorted order; the
positions of one canvas are spread over several programs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma import draws

_MAX_CANVAS = 1024
_PAIRS = 8192  # comparisons of one program: 32 positions of a canvas of 256
_NOISE = tl.constexpr(draws.purpose_word("noise") - (1 << 32) * (draws.purpose_word("noise") >> 31))  # as int32


class Accepted(NamedTuple):
    """What a step leaves behind; rows that were done keep what they had."""

    canvas: Tensor  # (B, C) int64
    accept: Tensor  # (B, C) bool, positions that took their token
    argmax: Tensor  # (B, C) int64, the next step's `previous`
    done: Tensor  # (B,) bool


def accept(
    entropy: Tensor,
    tokens: Tensor,
    argmax: Tensor,
    canvas: Tensor,
    frozen: Tensor,
    previous: Tensor,
    done: Tensor,
    seeds: Tensor,
    block: Tensor,
    step: Tensor,
    *,
    bound: float,
    confidence: float,
    vocab_size: int,
) -> Accepted:
    """Accept the most certain positions while the entropies before them sum to at most `bound`; renoise the others.

    entropy: (B, C) float32. tokens (sampled), argmax, canvas, previous (the last step's argmax, -1 at first): (B, C)
    int64. frozen: (B, C) bool, left alone and free of charge. done: (B,) bool. seeds, block, step: (B,) int64; noise is
    `draws.integers(draws.uniform(seeds, block, step, C, "noise"), vocab_size)`. A row is done when its argmax equals
    `previous` and its mean entropy is below `confidence`, both over unfrozen positions.

    Example: `accept(h, sampled, argmax, canvas, frozen, previous, done, seeds, block, step, bound=0.1,
    confidence=0.005, vocab_size=262144).canvas`.
    """
    batch, canvas_len = entropy.shape
    if canvas_len > _MAX_CANVAS:
        raise ValueError(f"accept canvases must have at most {_MAX_CANVAS} positions, got {canvas_len}.")
    wanted = {
        "entropy": (entropy, torch.float32, (batch, canvas_len)),
        "tokens": (tokens, torch.int64, (batch, canvas_len)),
        "argmax": (argmax, torch.int64, (batch, canvas_len)),
        "canvas": (canvas, torch.int64, (batch, canvas_len)),
        "frozen": (frozen, torch.bool, (batch, canvas_len)),
        "previous": (previous, torch.int64, (batch, canvas_len)),
        "done": (done, torch.bool, (batch,)),
        "seeds": (seeds, torch.int64, (batch,)),
        "block": (block, torch.int64, (batch,)),
        "step": (step, torch.int64, (batch,)),
    }
    for name, (tensor, dtype, shape) in wanted.items():
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"accept {name} must be contiguous {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}."
            )
    next_canvas, next_argmax = torch.empty_like(canvas), torch.empty_like(argmax)
    accepted, next_done = torch.empty_like(frozen), torch.empty_like(done)
    canvas_block = max(16, triton.next_power_of_2(canvas_len))
    positions = min(canvas_block, max(16, _PAIRS // canvas_block))
    _accept_kernel[(batch, triton.cdiv(canvas_len, positions))](
        *(tensor for tensor, _, _ in wanted.values()),
        next_canvas,
        accepted,
        next_argmax,
        next_done,
        bound,
        confidence,
        vocab_size,
        canvas_len,
        CANVAS=canvas_block,
        POSITIONS=positions,
        num_warps=4,
    )
    return Accepted(next_canvas, accepted, next_argmax, next_done)


@triton.jit
def _accept_kernel(
    entropy_ptr: tl.tensor,
    token_ptr: tl.tensor,
    argmax_ptr: tl.tensor,
    canvas_ptr: tl.tensor,
    frozen_ptr: tl.tensor,
    previous_ptr: tl.tensor,
    done_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    block_ptr: tl.tensor,
    step_ptr: tl.tensor,
    next_canvas_ptr: tl.tensor,
    accept_ptr: tl.tensor,
    next_argmax_ptr: tl.tensor,
    next_done_ptr: tl.tensor,
    bound: tl.tensor,
    confidence: tl.tensor,
    vocab_size: tl.tensor,
    canvas_len: tl.tensor,
    CANVAS: tl.constexpr,
    POSITIONS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    other = tl.arange(0, CANVAS)  # the whole canvas
    other_valid = other < canvas_len
    other_at = row * canvas_len + other
    other_open = (tl.load(frozen_ptr + other_at, mask=other_valid, other=1) == 0) & other_valid
    other_entropy = tl.where(other_open, tl.load(entropy_ptr + other_at, mask=other_valid, other=0.0), 0.0)
    position = tl.program_id(1) * POSITIONS + tl.arange(0, POSITIONS)  # this program's part of it
    valid = position < canvas_len
    at = row * canvas_len + position
    is_open = (tl.load(frozen_ptr + at, mask=valid, other=1) == 0) & valid
    entropy = tl.where(is_open, tl.load(entropy_ptr + at, mask=valid, other=0.0), 0.0)
    canvas = tl.load(canvas_ptr + at, mask=valid, other=0)
    token = tl.load(token_ptr + at, mask=valid, other=0)
    argmax = tl.load(argmax_ptr + at, mask=valid, other=0)
    previous = tl.load(previous_ptr + at, mask=valid, other=0)
    was_done = tl.load(done_ptr + row) != 0

    # Entropies up to and including each position, in ascending order, equal ones by position. Summed in float64 and
    # rounded once: what a sequential float32 sum with a wide accumulator gives.
    precedes = (other_entropy[:, None] < entropy[None, :]) | (
        (other_entropy[:, None] == entropy[None, :]) & (other[:, None] <= position[None, :])
    )
    inclusive = tl.sum(tl.where(precedes, other_entropy.to(tl.float64)[:, None], 0.0), 0)
    accept = is_open & (inclusive.to(tl.float32) - entropy <= bound)

    seed = tl.load(seed_ptr + row)
    zero = position * 0
    step = zero + tl.load(step_ptr + row).to(tl.int32)
    block = zero + tl.load(block_ptr + row).to(tl.int32)
    high, low, _, _ = tl.philox(seed, position, step, block, zero + _NOISE)
    bits = ((high >> 5).to(tl.int64) << 26) | (low >> 6).to(tl.int64)
    noise = (bits.to(tl.float64) * 1.1102230246251565e-16 * vocab_size).to(tl.int64)
    noise = tl.minimum(noise, vocab_size - 1)

    next_canvas = tl.where(is_open & (not was_done), tl.where(accept, token, noise), canvas)
    tl.store(next_canvas_ptr + at, next_canvas, mask=valid)
    tl.store(accept_ptr + at, accept & (not was_done), mask=valid)
    tl.store(next_argmax_ptr + at, tl.where(was_done, previous, argmax), mask=valid)

    if tl.program_id(1) == 0:
        changed = tl.load(argmax_ptr + other_at, mask=other_open, other=0) != tl.load(
            previous_ptr + other_at, mask=other_open, other=0
        )
        num_open = tl.maximum(tl.sum(other_open.to(tl.int32), 0), 1)
        mean_entropy = tl.sum(other_entropy.to(tl.float64), 0).to(tl.float32) / num_open.to(tl.float32)
        stop = (tl.sum(changed.to(tl.int32), 0) == 0) & (mean_entropy < confidence)
        tl.store(next_done_ptr + row, was_done | stop)
