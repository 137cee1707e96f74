"""Frames of one row of a recorded run, one after each step, for pages, pictures and plots."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dgemma.checkpoint.tokenizer import IMAGE_MARKER, Tokenizer
from dgemma.checks import as_int, require
from dgemma.printing import printable
from dgemma.run.recorded.steps import RecordedStep
from dgemma.run.recorded.trajectory import Trajectory
from dgemma.view.board import NUM_CELLS, Board
from dgemma.view.pieces import Pieces

Array = NDArray[Any]


_RECORDED = (
    *("draft", "accepted", "renoised", "open", "entropy", "confidence"),
    *("top_tokens", "top_probabilities", "temperature"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Frames:
    """F frames of one row: every block's noise, then the canvas after each of its steps. C positions, k candidates."""

    block: Array  # (F,)
    step: Array  # (F,); -1 is the noise at the start of a block
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
    final: Array  # (blocks, C) int64: committed tokens up to a stop token, then those of the last draft
    kept: list[int]  # tokens per block up to its stop token or the end of the text

    def __len__(self) -> int:
        return len(self.block)

    @property
    def num_blocks(self) -> int:
        return len(self.final)

    @property
    def undecided(self) -> Array:
        """Positions that are noise, (F, C) bool: renoised, or open and not accepted."""
        return (self.renoised | self.open) & ~self.accepted & ~self.frozen


def check_canvas(trajectory: Trajectory, tokenizer: object, *, owner: str) -> None:
    """Require one canvas of 81 tokens for a board."""
    shape = trajectory.plan.num_blocks, trajectory.plan.canvas_len
    fits, rule = not isinstance(tokenizer, Board) or shape == (1, NUM_CELLS), "have one canvas of 81 tokens for a Board"
    require(fits, f"{owner} trajectory", rule, shape, "Use a Tokenizer for texts.")


def read_prompt(trajectory: Trajectory, row: int, pieces: Pieces, *, num_tokens: int) -> str:
    """Return a row's prompt as text, shortened to its last `num_tokens` tokens. A picture is one token."""
    tokens, tokenizer = read_prompt_tokens(trajectory, row), pieces.tokenizer
    if isinstance(tokenizer, Tokenizer):
        image = tokenizer.token_id(IMAGE_MARKER)
        tokens = [new for new, old in zip(tokens, [None, *tokens], strict=False) if not new == old == image]
    last = tokens[-num_tokens:]
    text = " ".join(map(str, last)) if tokenizer is None else printable(tokenizer.decode(last))
    return ("… " if len(last) < len(tokens) else "") + text


def read_prompt_tokens(trajectory: Trajectory, row: int) -> list[int]:
    """Return the tokens of a row's prompt, without padding."""
    plan = trajectory.plan
    tokens = plan.prompt_tokens[row].cpu()
    if plan.attention_mask is not None:  # the mask may also cover tokens of a cache
        mask = plan.attention_mask[row].cpu().bool()
        tokens = tokens[mask[len(mask) - len(tokens) :]]
    found: list[int] = tokens.tolist()
    return found


def read_frames(trajectory: Trajectory, row: int, *, owner: str) -> Frames:
    """Return the frames of a row, without the steps after it was done."""
    require(len(trajectory) > 0, f"{owner} trajectory", "have at least one step", trajectory)
    fits = as_int(row) is not None and 0 <= row < trajectory.batch_size
    require(fits, f"{owner} row", f"be in [0, {trajectory.batch_size})", row)
    places: list[tuple[int, int]] = []
    frames: list[dict[str, Array]] = []
    for step in trajectory.steps:
        at = (step.rows == row).nonzero()[:, 0]
        if not len(at):
            continue
        after = {name: getattr(step, name)[at[0]].numpy() for name in _RECORDED}
        after |= {"canvas": step.next_canvas[at[0]].numpy(), "frozen": _frozen(trajectory, step, row)}
        if step.index == 0:
            noise = {"canvas": step.canvas[at[0]].numpy(), "draft": step.canvas[at[0]].numpy()}
            start = {"frozen": after["frozen"], "open": ~after["frozen"], "temperature": after["temperature"]}
            frames.append({name: np.zeros_like(value) for name, value in after.items()} | noise | start)
            places.append((step.block, -1))
        frames.append(after)
        places.append((step.block, step.index))

    arrays = {name: np.stack([frame[name] for frame in frames]) for name in frames[0]}
    arrays |= {name: arrays[name].astype(np.int64) for name in ("canvas", "draft", "top_tokens")}
    last_of_block = {block: i for i, (block, _) in enumerate(places)}
    ends = [_commit(trajectory, block, row, arrays["draft"][i]) for block, i in last_of_block.items()]
    block, number = (np.array(column) for column in zip(*places, strict=True))
    return Frames(
        **arrays, block=block, step=number, final=np.stack([end[0] for end in ends]), kept=[end[1] for end in ends]
    )


def settled(frames: Frames) -> Array:
    """Return the step from which each position had its final token, (blocks, C) int64; at most the last step.

    Example: `settled(frames).ravel().argsort()` is the order in which positions got their final tokens.
    """
    steps = np.zeros_like(frames.final)
    for line, final, block in zip(steps, frames.final, np.unique(frames.block), strict=True):
        number = frames.step[frames.block == block]
        differs = frames.canvas[frames.block == block] != final  # (F, C)
        line[:] = np.where(differs, number[:, None] + 1, 0).max(0).clip(0, number[-1])
    return steps


def _frozen(trajectory: Trajectory, step: RecordedStep, row: int) -> Array:
    """Return the positions frozen in a step, by the plan or by a callback before it."""
    plan = trajectory.plan
    frozen = plan.to(torch.device("cpu")).part(step.block, torch.tensor([row]))["frozen"]
    frozen = torch.zeros(plan.canvas_len, dtype=torch.bool) if frozen is None else frozen[0]
    for change in trajectory.changes:
        if change.block == step.block and change.index <= step.index and "frozen" in change.values:
            # The rows of a change are those of the step before it. A change before step 0 has the rows of step 0.
            rows = trajectory.at(block=step.block, step=max(change.index - 1, 0)).rows.tolist()
            frozen = change.values["frozen"][rows.index(row)]
    return frozen.numpy()


def _commit(trajectory: Trajectory, block: int, row: int, draft: Array) -> tuple[Array, int]:
    """Return the tokens of a finished block, and how many of them count."""
    plan = trajectory.plan.to(torch.device("cpu"))
    if plan.text_len is not None:
        return draft, int(plan.text_len[row])
    if block >= len(trajectory.commits):
        return draft, len(draft)
    tokens = trajectory.commits[block].tokens[row]
    is_text = plan.find_text(tokens[None], block, torch.tensor([row]))[0][0]
    return np.where(is_text, tokens, draft), int(is_text.sum())
