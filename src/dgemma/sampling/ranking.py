"""Rankings of positions: scores, the k best of a row, the current sub-block, and proposed tokens.

All are masks or sorts over (B, C), so rows may select different numbers of positions without host synchronisation.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dgemma.diffusion.law import finite, log_sum
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState

_SPACING = 1 / 16  # of the points of `log_gumbel_choice`; its error is below 1e-12

Order = Literal["confidence", "log_confidence", "margin", "entropy"]


def certainty(prediction: Prediction, order: Order) -> Tensor:
    """Return a score per position (B, C), higher for more certain; it depends on the distribution, not on a sample.

    Ranking by the probability of a *sampled* token would bias the result even at one token per step.

    Example: `certainty(prediction, "entropy")` is `-prediction.entropy`.
    """
    if order == "confidence":
        return prediction.confidence
    if order == "log_confidence":
        return prediction.confidence.log()
    if order == "margin":
        return prediction.margin
    return -prediction.entropy


def best(score: Tensor, among: Tensor, count: Tensor | int) -> Tensor:
    """Return the `count` best positions of each row, leftmost on ties, (B, C) bool.

    score: (B, C) float. among: (B, C) bool, the candidates. count: (B,) or a number; it may exceed the candidates.

    Example: `best(prediction.confidence, state.open, 1)` marks the most confident open position.
    """
    order = score.masked_fill(~among, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(dim=-1)  # the inverse permutation
    count = count[:, None] if isinstance(count, Tensor) else count
    return among & (rank < count)


def is_choice(chosen: Tensor, among: Tensor, count: Tensor | int) -> Tensor:
    """Return True in rows whose chosen positions are `count` candidates, or all if there are fewer; (B,) bool."""
    num_chosen = torch.minimum(among.sum(-1), torch.as_tensor(count, device=among.device)).clamp(min=0)
    return (among | ~chosen).all(-1) & (chosen.sum(-1) == num_chosen)


def log_random_choice(chosen: Tensor, among: Tensor) -> Tensor:
    """The log-probability of choosing these positions if each choice of as many is equally likely, (B,) float64."""
    num_among, num_chosen = among.sum(-1).double(), chosen.sum(-1).double()
    ways = [(number + 1).lgamma() for number in (num_among, num_chosen, num_among - num_chosen)]
    return ways[1] + ways[2] - ways[0]


def log_gumbel_choice(score: Tensor, chosen: Tensor, among: Tensor) -> Tensor:
    """The log-probability that these positions are the best by score + Gumbel noise, (B,) float64.

    It is Plackett-Luce's law of the set, whatever the order. With w = exp(score) and W the sum over candidates that are
    not chosen, it is ∫ exp(-t) Π (1 - exp(-t w / W)) dt over the chosen positions. With x = log t, the sum over equal
    steps of x converges exponentially.
    """
    score = score.double()
    rest = log_sum(score.masked_fill(chosen | ~among, -torch.inf))  # log W, (B,)
    ratio = torch.where(chosen, score - finite(rest)[:, None], 0.0)
    x = torch.arange(-40.0, 8.0, _SPACING, dtype=torch.float64, device=score.device)
    log_rate = (x[:, None] + ratio[:, None]).clamp(max=30.0)  # (B, points, C)
    factors = (-torch.expm1(-log_rate.clamp(min=-40.0).exp())).log()
    factors = torch.where(log_rate < -40.0, log_rate, factors)  # a small rate is its own factor, and may underflow
    factors = torch.where(chosen[:, None], factors, 0.0).sum(-1)
    total = log_sum(factors + x - x.exp()) + math.log(_SPACING)
    return torch.where((rest == -torch.inf) | ~chosen.any(-1), 0.0, total)


def propose(prediction: Prediction, state: DenoiseState, *, greedy: bool) -> Tensor:
    """Return the token proposed for each position, (B, C): the argmax if `greedy`, otherwise a sample."""
    return prediction.argmax if greedy else prediction.sample(state.uniform("token"))


class SubBlock(NamedTuple):
    """The sub-block to decide now, (B, C) bool, and its steps [first_step, end_step), (B,) each."""

    span: Tensor
    first_step: Tensor
    end_step: Tensor


def choose_sub_block(state: DenoiseState, block_len: int | None) -> SubBlock:
    """Return the leftmost sub-block of `block_len` positions that has an open position; None means the whole canvas.

    Steps are divided in proportion to positions. With fewer steps than sub-blocks, several sub-blocks are decided in
    the same step, so the canvas is always full at the end.

    Example: 8 positions, 8 steps, `block_len=4`: positions 0-3 have steps [0, 4), positions 4-7 steps [4, 8).
    """
    if block_len is None:
        return SubBlock(torch.ones_like(state.open), torch.zeros_like(state.step), state.num_steps)
    canvas_len = state.canvas_len
    position = torch.arange(canvas_len, device=state.device)
    start = torch.where(state.open, position, canvas_len).amin(-1) // block_len * block_len  # (B,)
    due = (state.step + 1) * canvas_len // state.num_steps
    due = torch.where(due < canvas_len, due // block_len * block_len, due)
    end = torch.maximum(start + block_len, due).clamp(max=canvas_len)
    span = (position >= start[:, None]) & (position < end[:, None])
    return SubBlock(span, start * state.num_steps // canvas_len, end * state.num_steps // canvas_len)


def even_share(sub_block: SubBlock, state: DenoiseState) -> Tensor:
    """Return LLaDA's quota (B,): open positions of the sub-block divided by its remaining steps, rounded up.

    Example: 10 open positions and 4 steps left are decided 3, 3, 2, 2.
    """
    num_open = (state.open & sub_block.span).sum(-1)
    steps_left = (sub_block.end_step - state.step).clamp(min=1)
    return (num_open + steps_left - 1) // steps_left
