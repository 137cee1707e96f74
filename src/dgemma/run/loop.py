"""The loop over canvases: start a canvas from noise, step it until its rows are done, commit it.

`run_plan` is the loop as a generator of events. `drain` runs it to its end, with a callback.
"""

import itertools
from collections.abc import Callable, Generator, Sequence

import torch
from tqdm import tqdm

from dgemma.diffusion.state import DenoiseState
from dgemma.model.cache import Cache
from dgemma.model.denoiser import Denoiser
from dgemma.run.changes import Changes, apply_changes
from dgemma.run.denoising import Denoising
from dgemma.run.knobs import Knobs
from dgemma.run.plan import Plan
from dgemma.run.records import BlockCommit, Denoised, Events, Moment, OnStep, Result, RunEvent, StepRecord
from dgemma.run.rows import Rows


@torch.no_grad()
def run_plan(
    model: Denoiser,
    plan: Plan,
    cache: Cache | None = None,
    *,
    past: Sequence[BlockCommit] = (),
    on_start: Callable[[Moment], Changes] | None = None,
) -> Events:
    """Run a plan and yield its events, like `stream`.

    Blocks in `past` are already written, and are not yielded. `on_start` gets every new canvas and may change it.

    Example: `run_plan(model, plan, past=trajectory.commits[:2])` begins with the third block.
    """
    rows, knobs = Rows(plan), plan.knobs
    for commit in past:
        cache = rows.encode(model, cache)
        rows.repeat(commit)
    while not rows.ended:
        cache = rows.encode(model, cache)
        state = rows.start(model, knobs)
        if on_start is not None:
            state, knobs = apply_changes(on_start(Moment(state, cache, knobs)), state, knobs)
        drafts, steps, forwards, knobs = yield from denoise_canvas(model, state, cache, knobs)
        yield rows.commit(drafts, steps, forwards)
    return rows.output(rows.encode(model, cache))


@torch.no_grad()
def denoise_canvas(
    model: Denoiser, state: DenoiseState, cache: Cache, knobs: Knobs
) -> Generator[StepRecord, Changes, Denoised]:
    """Step a canvas until every row is done or out of steps. Finished rows are removed from the batch.

    It yields each `StepRecord`, and accepts changes in the same way as `stream`.
    """
    denoising, device = Denoising(model, state, cache, knobs), state.device
    here = list(range(state.batch_size))  # the rows that are still in the batch
    drafts, steps, forwards = list(state.draft), [0] * len(here), [0] * len(here)
    num_forwards = 0
    expects_more = knobs.stop is None  # without a stop rule, another step is likely; see `Denoiser.read_ahead`
    for num_taken in itertools.count(1):
        record = denoising.take_step()
        num_forwards += record.num_forwards
        changes = yield record
        steps_left = denoising.finish_step(changes, expects_more=expects_more)
        if not all(steps_left):
            now = denoising.state.draft.clone()  # a denoiser may reuse its tensors
            for row, draft, num_left in zip(here, now, steps_left, strict=True):
                if not num_left:
                    drafts[row], steps[row], forwards[row] = draft, num_taken, num_forwards
            if not any(steps_left):
                break
            places = [place for place, num_left in enumerate(steps_left) if num_left]
            here, denoising = [here[place] for place in places], denoising.select(places)
        expects_more = denoising.knobs.stop is None and min(steps_left) > 1
    counts = torch.tensor([steps, forwards], device=device)
    return Denoised(torch.stack(drafts), counts[0], counts[1], denoising.knobs)


def drain(
    events: Generator[RunEvent, Changes, Result], *, on_step: OnStep | None = None, bar: tqdm | None = None
) -> Result:
    """Run a stream to its end, pass the changes of `on_step` back into it, and return its result."""
    changes: Changes = None
    while True:
        try:
            event = events.send(changes)
        except StopIteration as finished:
            return finished.value
        changes = None
        if isinstance(event, StepRecord):
            if bar is not None:
                bar.update()
            changes = on_step(event) if on_step is not None else None
