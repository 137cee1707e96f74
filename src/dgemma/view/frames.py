"""A recorded run as frames, one row at a time: what there is to see after each step, for pages, pictures and plots."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dgemma.run.trajectory import RecordedStep, Trajectory
from dgemma.view.board import NUM_CELLS, Board
from dgemma.view.pieces import Pieces, printable

Array = NDArray[Any]


_RECORDED = (
    *("draft", "accepted", "renoised", "open", "entropy", "confidence"),
    *("top_tokens", "top_probabilities", "temperature"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Frames:
    """F frames of one row: every block's noise, then the canvas after each of its steps. C positions, k candidates."""

    block: Array  # (F,)
    step: Array  # (F,); -1: the noise a block begins with, which has no certainty yet
    temperature: Array  # (F,) float32
    canvas: Array  # (F, C) int64
    draft: Array  # (F, C) int64
    accepted: Array  # (F, C) bool
    renoised: Array  # (F, C) bool
    open: Array  # (F, C) bool, after the step
    frozen: Array  # (F, C) bool
    entropy: Array  # (F, C) float32, nats
    confidence: Array  # (F, C) float32
    top_tokens: Array  # (F, C, k) int64
    top_probabilities: Array  # (F, C, k) float32
    final: Array  # (blocks, C) int64: what was committed, and the last draft where a stop token cut it off
    kept: list[int]  # tokens of each block up to its stop token, or to the end of the text that a canvas was laid over

    def __len__(self) -> int:
        return len(self.block)

    @property
    def num_blocks(self) -> int:
        return len(self.final)

    @property
    def undecided(self) -> Array:
        """Where the canvas is noise, (F, C) bool: returned to it, or open and not accepted."""
        return (self.renoised | self.open) & ~self.accepted & ~self.frozen


def check_row(trajectory: Trajectory, row: object, *, owner: str) -> None:
    """A trajectory that has steps, and a row it has."""
    if not len(trajectory):
        raise ValueError(f"{owner} needs a trajectory with at least one step, got {trajectory!r}.")
    if not isinstance(row, int) or not 0 <= row < trajectory.batch_size:
        raise ValueError(f"{owner} row must be in [0, {trajectory.batch_size}), got {row!r}.")


def check_canvas(trajectory: Trajectory, tokenizer: object, *, owner: str) -> None:
    """A board has as many cells as its canvas has positions."""
    plan = trajectory.plan
    if isinstance(tokenizer, Board) and (plan.canvas_len, plan.num_blocks) != (NUM_CELLS, 1):
        raise ValueError(
            f"{owner} must be given a run of one canvas of {NUM_CELLS} tokens for a Board, got {plan.num_blocks} of "
            f"{plan.canvas_len}. Use a Tokenizer for texts."
        )


def read_prompt(trajectory: Trajectory, row: int, pieces: Pieces, *, num_tokens: int) -> str:
    """A row's prompt as text, of a longer one its last tokens, which are what a canvas answers to.

    Example: `read_prompt(trajectory, 0, Pieces(tokenizer), num_tokens=100)`.
    """
    plan = trajectory.plan
    tokens = plan.prompt_tokens[row].cpu()
    if plan.attention_mask is not None:  # of the cache's tokens too, if the run went on from one
        tokens = tokens[plan.attention_mask[row, -len(tokens) :].cpu().bool()]
    shown = tokens[-num_tokens:].tolist()
    text = " ".join(map(str, shown)) if pieces.tokenizer is None else printable(pieces.tokenizer.decode(shown))
    return ("… " if len(shown) < len(tokens) else "") + text


def read_frames(trajectory: Trajectory, row: int) -> Frames:
    """The frames of a row. Steps in which it was already done are not its own and are left out.

    Example: `read_frames(out.trajectory, 0).entropy.mean(1)`.
    """
    places: list[tuple[int, int]] = []
    seen: list[dict[str, Array]] = []
    for step in trajectory.steps:
        at = (step.rows == row).nonzero()[:, 0]
        if not len(at):
            continue
        after = {name: getattr(step, name)[at[0]].numpy() for name in _RECORDED}
        after |= {"canvas": step.next_canvas[at[0]].numpy(), "frozen": _frozen(trajectory, step, row)}
        if step.index == 0:
            noise = {"canvas": step.canvas[at[0]].numpy(), "draft": step.canvas[at[0]].numpy()}
            start = {"frozen": after["frozen"], "open": ~after["frozen"], "temperature": after["temperature"]}
            seen.append({name: np.zeros_like(value) for name, value in after.items()} | noise | start)
            places.append((step.block, -1))
        seen.append(after)
        places.append((step.block, step.index))

    arrays = {name: np.stack([frame[name] for frame in seen]) for name in seen[0]}
    arrays |= {name: arrays[name].astype(np.int64) for name in ("canvas", "draft", "top_tokens")}
    last_of_block = {block: i for i, (block, _) in enumerate(places)}
    ends = [_commit(trajectory, block, row, arrays["draft"][i]) for block, i in last_of_block.items()]
    block, number = (np.array(column) for column in zip(*places, strict=True))
    return Frames(
        **arrays, block=block, step=number, final=np.stack([end[0] for end in ends]), kept=[end[1] for end in ends]
    )


def settled(frames: Frames) -> Array:
    """The step from which on the canvas held what was committed, (blocks, C) int64; the last one if it never did.

    Example: `settled(frames).ravel().argsort()` is the order in which a text was found.
    """
    steps = np.zeros_like(frames.final)
    for line, final, block in zip(steps, frames.final, np.unique(frames.block), strict=True):
        number = frames.step[frames.block == block]
        differs = frames.canvas[frames.block == block] != final  # (F, C)
        line[:] = np.where(differs, number[:, None] + 1, 0).max(0).clip(0, number[-1])
    return steps


def _frozen(trajectory: Trajectory, step: RecordedStep, row: int) -> Array:
    """What was frozen in a step: by the plan, or by a callback before it."""
    plan = trajectory.plan
    frozen = plan.to(torch.device("cpu")).block(step.block, torch.tensor([row]))["frozen"]
    frozen = torch.zeros(plan.canvas_len, dtype=torch.bool) if frozen is None else frozen[0]
    for change in trajectory.changes:
        if change.block == step.block and change.index <= step.index and "frozen" in change.values:
            # A change speaks of the rows of the step before it; the first one, of those the block began with.
            rows = trajectory.at(block=step.block, step=max(change.index - 1, 0)).rows.tolist()
            frozen = change.values["frozen"][rows.index(row)]
    return frozen.numpy()


def _commit(trajectory: Trajectory, block: int, row: int, draft: Array) -> tuple[Array, int]:
    """A block as it was left, and how many of its tokens count."""
    plan = trajectory.plan.to(torch.device("cpu"))
    if plan.text_len is not None:
        return draft, int(plan.text_len[row])
    if block >= len(trajectory.commits):
        return draft, len(draft)
    tokens = trajectory.commits[block].tokens[row]
    may_end = plan.span.past_frozen(block, plan.canvas_len, torch.tensor([row]))[0]
    ends = (torch.isin(tokens, torch.tensor(plan.eos_token_ids, dtype=torch.int64)) & may_end).nonzero()[:, 0]
    kept = int(ends[0]) + 1 if len(ends) else len(draft)
    return np.where(np.arange(len(draft)) < kept, tokens.numpy(), draft), kept
