"""Rankings of positions: scores, the k best of a row, the current sub-block, and proposed tokens.

All are masks or sorts over (B, C), so rows may select different numbers of positions without host synchronisation.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState

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


def propose(prediction: Prediction, state: DenoiseState, *, greedy: bool) -> Tensor:
    """Return the token proposed for each position, (B, C): the argmax if `greedy`, otherwise a sample.

    Example: `propose(prediction, state, greedy=self.greedy)`.
    """
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
