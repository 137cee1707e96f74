"""The loop over canvases: start a canvas from noise, step it until its rows are done, commit it.

`run_plan` is the loop as a generator of events. `drain` runs it to its end, with a callback and a recording.
"""

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from dgemma.diffusion.prediction import refuse_nan
from dgemma.diffusion.state import DenoiseState, watch
from dgemma.model.cache import Cache
from dgemma.model.denoiser import Denoiser
from dgemma.printing import progress_bar
from dgemma.run.changes import Changes, apply_changes, snapshot
from dgemma.run.knobs import Knobs
from dgemma.run.plan import Plan
from dgemma.run.recording import Recording
from dgemma.run.records import BlockCommit, Denoised, Events, Moment, OnStep, Output, StepRecord, shows_progress
from dgemma.run.step import judge, start_state, take_step

Result = TypeVar("Result")


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
    prompt = plan.prompt_tokens
    batch_size, device = prompt.shape[0], prompt.device
    knobs = plan.knobs
    cache = model.encode(prompt, cache, plan.attention_mask)
    rows = torch.arange(batch_size, device=device)  # the unfinished rows
    retired: list[tuple[Tensor, Cache]] = []
    blocks: list[Tensor] = []
    forwards: list[Tensor] = []
    states = None if plan.language is None else plan.language.start  # of the unfinished rows
    early: _EarlyCanvas | None = None  # the next block's

    def start_early(block: int, rows: Tensor, knobs: Knobs) -> None:
        nonlocal early
        # The state of a language is known only after the previous block.
        if block < plan.num_blocks and plan.language is None:
            early = _EarlyCanvas(rows, knobs, start_block(model, plan, block, rows, knobs))

    for block in range(plan.num_blocks):
        if block < len(past):
            tokens, num_forwards = past[block].tokens.to(device)[rows], past[block].steps.to(device)
        else:
            if early is not None and early.rows is rows and early.knobs is knobs:
                state = early.state
            else:  # rows have ended since, or a callback has changed the knobs
                state = start_block(model, plan, block, rows, knobs, states)
            early = None
            if on_start is not None:
                state, knobs = apply_changes(on_start(Moment(state, cache, knobs)), state, knobs)
            start_next = partial(start_early, block + 1, rows, knobs)
            tokens, taken, knobs = yield from denoise_canvas(
                model, state, cache, knobs, num_steps=plan.num_steps, meanwhile=start_next
            )
            num_forwards = _spread(taken, rows, batch_size, 0)

        if plan.language is not None and states is not None:
            states = plan.language.advance(states, tokens)
        tokens, real, ended = plan.end_rows(tokens, block, rows)
        cache = model.encode(tokens, cache, real)
        written = _spread(tokens, rows, batch_size, plan.pad_token_id)
        blocks.append(written)
        forwards.append(num_forwards)
        if any(ended):
            ends, goes_on = _where(ended, device), _where([not end for end in ended], device)
            retired.append((rows[ends], cache.select(ends)))
            rows, cache = rows[goes_on], cache.select(goes_on)
            states = None if states is None else states[goes_on]
        if block >= len(past):
            finished = _spread(torch.zeros_like(rows, dtype=torch.bool), rows, batch_size, True)
            yield BlockCommit(block=block, tokens=written, finished=finished, steps=num_forwards)
        if len(rows) == 0:
            break

    new_tokens, steps = torch.cat(blocks, dim=1), torch.stack(forwards, dim=1)
    return Output(
        tokens=torch.cat((prompt, new_tokens), dim=1),
        new_tokens=new_tokens,
        steps=steps,
        tokens_per_forward=(new_tokens != plan.pad_token_id).sum(1) / steps.sum(1),
        cache=type(cache).join([*retired, (rows, cache)]) if retired else cache,
    )


class _EarlyCanvas(NamedTuple):
    """A canvas that was started while the device still worked on the block before it, for these rows and knobs."""

    rows: Tensor
    knobs: Knobs
    state: DenoiseState


def start_block(
    model: Denoiser, plan: Plan, block: int, rows: Tensor, knobs: Knobs, states: Tensor | None = None
) -> DenoiseState:
    """The state of a plan's block before its first step, for some rows (R,) of the batch.

    states (R,): the automaton states of the plan's language before the block.
    """
    return start_state(
        knobs,
        plan.noise,
        seeds=plan.seeds[block, rows],
        canvas_len=plan.canvas_len,
        num_steps=plan.num_steps,
        block=plan.first_block + block,
        rows=rows,
        uniform=model.uniform,
        **plan.block(block, rows, states),
    )


@torch.no_grad()
def denoise_canvas(
    model: Denoiser,
    state: DenoiseState,
    cache: Cache,
    knobs: Knobs,
    *,
    num_steps: int = 1,
    meanwhile: Callable[[], object] | None = None,
) -> Generator[StepRecord, Changes, Denoised]:
    """Step a canvas until every row is done or out of steps. Finished rows are removed from the batch.

    It yields each `StepRecord`, and accepts changes in the same way as `stream`. `num_steps` is a hint that does not
    change results. If it is above 1 and there is no stop rule, the second step is prepared while the host waits for the
    first. `meanwhile` is called while the device takes the first step.

    Example: `for record in denoise_canvas(model, state, cache, knobs): print(record.state.draft)`.
    """
    device = state.device
    here = list(range(state.batch_size))  # the rows that are still in the batch
    drafts, num_forwards = list(state.draft), [0] * state.batch_size
    # True if another step is likely: there is no stop rule, and every row has at least two steps left. A row may still
    # finish early, when it has no undecided position left.
    goes_on = knobs.stop is None and num_steps > 1
    for num_taken in itertools.count(1):
        state, record = take_step(
            model, state, cache=cache, knobs=knobs
        )  # before any host work, because the device is idle
        if num_taken == 1 and meanwhile is not None:
            meanwhile()
        written = watch(state.done, state.step, state.num_steps, state.canvas)
        changes = yield record
        verdict = record.verdict if changes is None and not written() else None
        state, knobs = apply_changes(changes, state, knobs)
        if verdict is None:
            verdict = judge(record.prediction, state)
        # The host waits for the device here.
        left, broken, stray = model.read_ahead(verdict) if goes_on else verdict.tolist()
        if any(broken) or any(stray):
            refuse_step(record, broken, stray)
        if not all(left):
            for row, draft in zip(here, state.draft.clone(), strict=True):  # a denoiser may reuse its tensors
                drafts[row], num_forwards[row] = draft, num_taken
            if not any(left):
                break
            here = [row for row, steps in zip(here, left, strict=True) if steps]
            working = _where(left, device)
            state, cache = state.select(working), cache.select(working)
        goes_on = knobs.stop is None and min(left) > 1
    return Denoised(torch.stack(drafts), torch.tensor(num_forwards, device=device), knobs)


def drain(events: Events, *, on_step: OnStep | None, recording: Recording | None, progress: bool = False) -> Output:
    """Run a stream to its end, pass the changes of `on_step` back into it, and record its events."""
    with progress_bar(desc="denoising", unit="step", show=progress and not shows_progress(on_step)) as bar:
        return run_events(events, bar, on_step=on_step, recording=recording)


def run_events(
    events: Generator[StepRecord | BlockCommit, Changes, Result] | Generator[StepRecord, Changes, Result],
    bar: tqdm,
    *,
    on_step: OnStep | None,
    recording: Recording | None,
    rows: Tensor | None = None,
) -> Result:
    """Do what `drain` does, for a stream with a result of any type, and with a given progress bar.

    rows: pass it if the events belong to some rows of a larger batch. It holds their row numbers in that batch,
    ascending. In the recording they are numbered 0, 1, ….
    """
    changes: Changes = None
    while True:
        try:
            event = events.send(changes)
        except StopIteration as finished:
            return finished.value
        changes = None
        if isinstance(event, StepRecord):
            bar.update()
            unwritten = snapshot(event.state) if recording is not None and on_step is not None else None
            changes = on_step(event) if on_step is not None else None
            if recording is not None:
                here = event if rows is None else replace(event, rows=torch.searchsorted(rows, event.rows))
                recording.add_step(here, changes, unwritten=unwritten)
        elif recording is not None:
            recording.add_commit(event)


def refuse_step(record: StepRecord, broken: list[int], stray: list[int]) -> NoReturn:
    """Raise for NaN or for ids outside the vocabulary. The message names the block, step, row and cause."""
    row = (broken if any(broken) else stray).index(1)
    where = f"at block {int(record.block[row])}, step {int(record.step[row])}, row {int(record.rows[row])}"
    if any(broken):
        refuse_nan(where)
    canvas, vocab_size = record.state.canvas[row], record.state.noise.vocab_size
    got = f"got {int(canvas.min())}..{int(canvas.max())} {where}."
    if record.verdict is not None and not record.verdict[2, row]:
        raise ValueError(
            f"DenoiseState.canvas must hold tokens in [0, {vocab_size}), {got} Write only token ids into it."
        )
    raise ValueError(
        f"{type(record.knobs.sampler).__name__} must write tokens in [0, {vocab_size}), {got} "
        "Take them from the prediction."
    )


def _where(flags: Sequence[int], device: torch.device) -> Tensor:
    """The indices of the flags that are not zero, (n,) int64."""
    return torch.tensor([at for at, flag in enumerate(flags) if flag], dtype=torch.int64, device=device)


def _spread(values: Tensor, rows: Tensor, batch_size: int, fill: int | bool) -> Tensor:
    """Spread the values (R, ...) of some rows over the batch, (B, ...), with `fill` in the other rows."""
    if len(rows) == batch_size:
        return values
    return values.new_full((batch_size, *values.shape[1:]), fill).index_copy(0, rows, values)
