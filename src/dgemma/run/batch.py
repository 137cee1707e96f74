"""Continuous batching: rows of different prompts are denoised together, each at its own canvas and step.

A row that finishes a canvas leaves the batch, and a waiting row takes its place. Every draw is a function of the row's
own seed, block and step, so a row's tokens depend on its neighbours only through rounding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from dgemma.diffusion.state import DenoiseState
from dgemma.model.cache import Cache
from dgemma.model.denoiser import Denoiser
from dgemma.run.loop import refuse_step, start_block
from dgemma.run.plan import Plan
from dgemma.run.step import judge, take_step

_Element = TypeVar("_Element")


class Row:
    """One prompt in progress: its plan, which has batch size 1, and the blocks that are already written.

    Example: `row = Row(0, read_plan(model, prompt[None], seed=[7]))`.
    """

    def __init__(self, index: int, plan: Plan) -> None:
        self.index, self.plan = index, plan
        self.blocks: list[Tensor] = []  # (C,) each, on the host
        self.steps: list[int] = []  # forwards of each finished block
        self.num_forwards = 0  # of the current canvas
        self.ended = False
        self.state = None if plan.language is None else plan.language.start  # (1,) state of the constraint

    @property
    def new_tokens(self) -> Tensor:
        """The tokens of all finished blocks, (N,), padded after the stop token, like a row of `generate`."""
        return torch.cat(self.blocks)

    @property
    def tokens_per_forward(self) -> float:
        """New tokens without padding, divided by forwards."""
        return int((self.new_tokens != self.plan.pad_token_id).sum()) / sum(self.steps)

    def finish_block(self, tokens: Tensor) -> None:
        """Write a finished canvas (C,). The row ends at a stop token or after its last block."""
        block = len(self.blocks)
        if self.plan.language is not None and self.state is not None:
            self.state = self.plan.language.advance(self.state, tokens[None].to(self.state.device))
        padded, _, (stopped,) = self.plan.end_rows(tokens[None], block, torch.zeros(1, dtype=torch.int64))
        self.blocks.append(padded[0])
        self.steps.append(self.num_forwards)
        self.num_forwards = 0
        self.ended = stopped or block + 1 == self.plan.num_blocks


@dataclass
class _Group:
    """Rows that are denoised together. A row that has left is None until another one takes its place."""

    rows: list[Row | None]
    state: DenoiseState
    cache: Cache

    def select(self, places: Sequence[int]) -> "_Group":
        at = self._index(places)
        return _Group([self.rows[place] for place in places], self.state.select(at), self.cache.select(at))

    def splice(self, places: Sequence[int], donor: "_Group") -> None:
        at = self._index(places)
        for place, row in zip(places, donor.rows, strict=True):
            self.rows[place] = row
        self.state = self.state.splice(at, donor.state)
        self.cache.splice(at, donor.cache)

    def _index(self, places: Sequence[int]) -> Tensor:
        return torch.tensor(places, dtype=torch.int64, device=self.state.device)


class Batch:
    """Rows with the same knobs and noise, denoised together. `add` rows at any time; each `step` takes one step.

    A row takes the first step of each canvas outside the batch, after its prompt or its previous block is encoded. It
    joins the others for its second step.

    Example: `batch = Batch(model); batch.add(row); finished = batch.step()`.
    """

    def __init__(self, model: Denoiser) -> None:
        self._model = model
        self._waiting: list[Row] = []  # not yet read
        # Rows between two blocks, the tokens of the finished block (R, C), and the cache without that block.
        self._between: list[tuple[list[Row], Tensor, Cache]] = []
        self._running: _Group | None = None

    def __len__(self) -> int:
        between = [row for rows, _, _ in self._between for row in rows if not row.ended]
        return len(self._waiting) + len(between) + len(_present(self._running))

    def add(self, row: Row) -> None:
        """Add a row. It starts at the next `step`."""
        self._waiting.append(row)

    def remove(self, row: Row) -> None:
        """Drop a row that nobody needs any more. Its place becomes free."""
        row.ended = True
        self._waiting = [other for other in self._waiting if other is not row]
        if self._running is not None:
            self._running.rows = [None if other is row else other for other in self._running.rows]

    def drafts(self) -> Iterator[tuple[Row, Tensor]]:
        """Yield each running row with its draft (C,): the tokens that it would write if its canvas ended now."""
        if self._running is not None:
            for row, draft in zip(self._running.rows, self._running.state.draft.cpu(), strict=True):
                if row is not None:
                    yield row, draft

    @torch.no_grad()
    def step(self) -> list[Row]:
        """Take one step of every row, and return the rows that finished a block. A row that starts a canvas takes two.

        Example: `texts = [row.new_tokens for row in batch.step() if row.ended]`.
        """
        finished = []
        for group in self._begin():
            finished += self._advance(group)
            self._join(group)
        self._close_gaps()
        if self._running is not None:
            finished += self._advance(self._running)
        return finished

    def _begin(self) -> Iterator[_Group]:
        """Start the next canvas of rows between two blocks, then the first canvas of new rows."""
        between, self._between = self._between, []
        waiting, self._waiting = self._waiting, []
        for rows, tokens, cache in between:
            stay = [at for at, row in enumerate(rows) if not row.ended]  # the others were removed
            if len(stay) < len(rows):
                at = torch.tensor(stay, dtype=torch.int64, device=tokens.device)
                rows, tokens, cache = [rows[place] for place in stay], tokens[at], cache.select(at)
            if rows:
                yield self._start(rows, self._model.encode(tokens, cache))
        for rows in _parts(waiting):
            yield self._start(rows, self._model.encode(*_pad_left([row.plan for row in rows])))

    def _start(self, rows: Sequence[Row], cache: Cache) -> _Group:
        first = torch.zeros(1, dtype=torch.int64, device=self._model.device)
        states = [start_block(self._model, row.plan, len(row.blocks), first, row.plan.knobs, row.state) for row in rows]
        state = states[0].select(first.expand(len(rows)))
        for at, other in enumerate(states[1:], start=1):
            state = state.splice(first + at, other)
        return _Group(list(rows), replace(state, rows=torch.tensor([row.index for row in rows]).to(first)), cache)

    def _advance(self, group: _Group) -> list[Row]:
        """Take one step of a group. Rows that finish their canvas leave it."""
        knobs = _present(group)[0].plan.knobs
        group.state, record = take_step(self._model, group.state, cache=group.cache, knobs=knobs)
        verdict = judge(record.prediction, group.state) if record.verdict is None else record.verdict
        left, broken, stray = self._model.read_ahead(verdict)  # the host waits for the device here
        if any(broken) or any(stray):
            refuse_step(record, broken, stray)
        for row in _present(group):
            row.num_forwards += 1
        finished = {place: row for place, row in enumerate(group.rows) if row is not None and not left[place]}
        if not finished:
            return []
        drafts = group.state.draft.cpu()
        for place, row in finished.items():
            row.finish_block(drafts[place])
            group.rows[place] = None
        for places in _parts([place for place, row in finished.items() if not row.ended]):
            at = group._index(places)
            tokens, cache = group.state.draft.index_select(0, at), group.cache.select(at)
            self._between.append(([finished[place] for place in places], tokens, cache))
        return list(finished.values())

    def _join(self, group: _Group) -> None:
        """Move the rows of a group into the running batch, first into free places."""
        stay = [at for at, row in enumerate(group.rows) if row is not None]
        if not stay:
            return
        if len(stay) < len(group.rows):
            group = group.select(stay)
        if self._running is None:
            self._running = group
            return
        running = self._running
        places = [at for at, row in enumerate(running.rows) if row is None][: len(stay)]
        size, missing = len(running.rows), len(stay) - len(places)
        if missing:
            running = running.select([*range(size), *[0] * missing])  # copies of row 0, which are overwritten
            places += range(size, size + missing)
        running.splice(places, group)
        indices = torch.tensor([-1 if row is None else row.index for row in running.rows])
        running.state = replace(running.state, rows=indices.to(running.state.rows))
        self._running = running

    def _close_gaps(self) -> None:
        if self._running is not None:
            stay = [at for at, row in enumerate(self._running.rows) if row is not None]
            if not stay:
                self._running = None
            elif len(stay) < len(self._running.rows):
                self._running = self._running.select(stay)


def _present(group: _Group | None) -> list[Row]:
    return [] if group is None else [row for row in group.rows if row is not None]


def _parts(items: list[_Element]) -> Iterator[list[_Element]]:
    """Split a list into parts whose sizes are powers of two, so that an engine captures graphs for few batch sizes."""
    while items:
        size = 1 << (len(items).bit_length() - 1)
        yield items[:size]
        items = items[size:]


def _pad_left(plans: Sequence[Plan]) -> tuple[Tensor, None, Tensor | None]:
    """The arguments of `encode` for several prompts: tokens (B, P), no cache, and a mask if their lengths differ."""
    prompts = [plan.prompt_tokens[0] for plan in plans]
    longest = max(map(len, prompts))
    tokens = torch.stack([torch.nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    if all(len(prompt) == longest for prompt in prompts):
        return tokens, None, None
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=tokens.device)
    return tokens, None, torch.arange(longest, device=tokens.device) >= longest - lengths[:, None]
