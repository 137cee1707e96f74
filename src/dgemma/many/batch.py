"""Continuous batching: rows of different prompts are denoised together, each at its own canvas and step.

A row that finishes a canvas leaves the batch, and a waiting row takes its place. Every draw is a function of the row's
own seed, block and step, so a row's tokens depend on its neighbours only through rounding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dgemma.many.prefixes import SharedPrefixes, encode_texts
from dgemma.model.cache import Cache
from dgemma.model.denoiser import Denoiser
from dgemma.run.denoising import Denoising
from dgemma.run.plan import Plan
from dgemma.run.records import StepRecord
from dgemma.run.rows import Rows

_Element = TypeVar("_Element")


class Scores(NamedTuple):
    """Candidates of every position, in the prediction that decided it: the written token, then the k best ones."""

    tokens: Tensor  # (..., C, 1 + k) int64
    log_probs: Tensor  # (..., C, 1 + k) float32


class BatchRow(Rows):
    """A row of a `Batch`: a plan of batch size 1, and what the batch does with it.

    index: the number of the row in records. num_top: score this many alternatives of each token; None: score nothing.
    """

    def __init__(self, plan: Plan, *, index: int = 0, num_top: int | None = None) -> None:
        super().__init__(plan)
        self.index, self.num_top = index, num_top
        self.scores: list[Scores] = []  # of each block


@dataclass
class _Place:
    """A row in the batch, and what its present canvas has taken so far."""

    row: BatchRow
    steps: int = 0
    forwards: int = 0
    scores: Scores | None = None


@dataclass
class _Group:
    """Rows that are denoised together. A row that has left is None until another one takes its place."""

    places: list[_Place | None]
    denoising: Denoising

    @property
    def present(self) -> dict[int, _Place]:
        return {at: place for at, place in enumerate(self.places) if place is not None}

    def select(self, places: list[int]) -> "_Group":
        return _Group([self.places[at] for at in places], self.denoising.select(places))


class Batch:
    """Rows with the same knobs, noise and constraint, denoised together.

    `add` rows at any time; each `step` takes one step.

    A row takes the first step of each canvas outside the batch, after its new tokens are encoded: a first step has no
    self-conditioning, and `splice` joins only states with the same fields. It joins the others for its second step.

    Example: `batch = Batch(model); batch.add(BatchRow(plan)); finished = batch.step()`.
    """

    def __init__(self, model: Denoiser, prefixes: SharedPrefixes | None = None) -> None:
        self._model = model
        self._prefixes = SharedPrefixes() if prefixes is None else prefixes
        self._waiting: list[BatchRow] = []  # not yet encoded
        # Rows between two blocks. Their cache lacks the last block.
        self._between: list[tuple[list[BatchRow], Cache]] = []
        self._running: _Group | None = None

    def __len__(self) -> int:
        between = [row for rows, _ in self._between for row in rows if not row.ended]
        return len(self._waiting) + len(between) + (0 if self._running is None else len(self._running.present))

    def add(self, row: BatchRow) -> None:
        """Add a row. It starts at the next `step`."""
        self._waiting.append(row)

    def remove(self, row: BatchRow) -> None:
        """Drop a row that nobody needs any more. Its place becomes free."""
        row.ended = True
        self._waiting = [other for other in self._waiting if other is not row]
        if self._running is not None:
            places = self._running.places
            self._running.places = [None if place is None or place.row is row else place for place in places]

    def drafts(self) -> Iterator[tuple[BatchRow, int, Tensor]]:
        """Yield each running row with its steps and its draft (C,): what it would write if its canvas ended now."""
        if self._running is not None:
            drafts = self._running.denoising.state.draft.cpu()
            for at, place in self._running.present.items():
                yield place.row, place.steps, drafts[at]

    @torch.no_grad()
    def step(self) -> list[BatchRow]:
        """Take one step of every row (two if it starts a canvas), and return the rows that finished a block."""
        finished = []
        for group in self._begin():
            finished += self._advance(group)
            self._join(group)
        if self._running is not None:
            stay = list(self._running.present)
            if len(stay) < len(self._running.places):  # close the gaps
                self._running = self._running.select(stay) if stay else None
        if self._running is not None:
            finished += self._advance(self._running)
        return finished

    def _begin(self) -> Iterator[_Group]:
        """Start the next canvas of rows between two blocks, then the first canvas of new rows."""
        between, self._between = self._between, []
        waiting, self._waiting = self._waiting, []
        for rows, cache in between:
            stay = [at for at, row in enumerate(rows) if not row.ended]  # the others were removed
            if len(stay) < len(rows):
                cache = cache.select(torch.tensor(stay, dtype=torch.int64, device=self._model.device))
            if stay:
                yield self._start([rows[at] for at in stay], cache)
        for rows in _parts(waiting):
            yield self._start(rows, None)

    def _start(self, rows: Sequence[BatchRow], cache: Cache | None) -> _Group:
        """Encode the new tokens of the rows, and start their next canvases."""
        model = self._model
        texts = [row.uncached[0] for row in rows]
        if cache is None:
            images = [None if row.uncached_images is None else row.uncached_images[0] for row in rows]
            cache = self._prefixes.encode(model, texts, images)
        else:
            cache = encode_texts(model, cache, texts)
        states = [row.start(model, row.plan.knobs) for row in rows]
        first = torch.zeros(1, dtype=torch.int64, device=model.device)
        state = states[0].select(first.expand(len(rows)))
        for at, other in enumerate(states[1:], start=1):
            state = state.splice(first + at, other)
        state = replace(state, rows=torch.tensor([row.index for row in rows]).to(first))
        return _Group([_Place(row) for row in rows], Denoising(model, state, cache, rows[0].plan.knobs))

    def _advance(self, group: _Group) -> list[BatchRow]:
        """Take one step of a group. Rows that finish their canvas leave it."""
        record = group.denoising.take_step()
        steps_left = group.denoising.finish_step()
        for place in group.present.values():
            place.steps, place.forwards = place.steps + 1, place.forwards + record.num_forwards
        finished = {at: place for at, place in group.present.items() if not steps_left[at]}
        redecides = record.state.noise.kind in record.knobs.sampler.redecides  # then only the last step counts
        _score(record, finished if redecides else group.present)
        if not finished:
            return []
        drafts = group.denoising.state.draft.cpu()
        for at, place in finished.items():
            place.row.commit(drafts[at : at + 1], torch.tensor([place.steps]), torch.tensor([place.forwards]))
            if place.scores is not None:
                place.row.scores.append(Scores(*(values.cpu() for values in place.scores)))
            group.places[at] = None
        for places in _parts([at for at, place in finished.items() if not place.row.ended]):
            cache = group.denoising.cache.select(group.denoising.index(places))
            self._between.append(([finished[at].row for at in places], cache))
        return [place.row for place in finished.values()]

    def _join(self, group: _Group) -> None:
        """Move the rows of a group into the running batch, first into free places."""
        stay = list(group.present)
        if not stay:
            return
        if len(stay) < len(group.places):
            group = group.select(stay)
        if self._running is None:
            self._running = group
            return
        running = self._running
        free = [at for at, place in enumerate(running.places) if place is None][: len(stay)]
        size, missing = len(running.places), len(stay) - len(free)
        if missing:
            running = running.select([*range(size), *[0] * missing])  # copies of row 0, which are overwritten
            free += range(size, size + missing)
        running.denoising.splice(free, group.denoising)
        for at, place in zip(free, group.places, strict=True):
            running.places[at] = place
        indices = torch.tensor([-1 if place is None else place.row.index for place in running.places])
        state = running.denoising.state
        running.denoising.state = replace(state, rows=indices.to(state.rows))
        self._running = running


def _score(record: StepRecord, places: dict[int, _Place]) -> None:
    """Score the tokens that a step decided, in the rows that want it."""
    wanted = {at: (place, place.row.num_top) for at, place in places.items() if place.row.num_top is not None}
    if not wanted:
        return
    most, tokens = max(num_top for _, num_top in wanted.values()), record.state.draft[..., None]
    if most:
        tokens = torch.cat((tokens, record.prediction.top(most).tokens), dim=-1)
    scores, decided = (tokens, record.prediction.log_prob(tokens)), record.before.open | record.accepted
    for at, (place, num_top) in wanted.items():
        new = [values[at, :, : 1 + num_top] for values in scores]
        if place.scores is not None:  # positions that this step did not decide keep their scores
            new = [torch.where(decided[at, :, None], *pair) for pair in zip(new, place.scores, strict=True)]
        place.scores = Scores(*new)


def _parts(items: list[_Element]) -> Iterator[list[_Element]]:
    """Split a list into parts whose sizes are powers of two, so that an engine captures graphs for few batch sizes."""
    while items:
        size = 1 << (len(items).bit_length() - 1)
        yield items[:size]
        items = items[size:]
