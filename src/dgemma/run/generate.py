"""The spine: text emerges from noise, canvas by canvas. Read this file first.

    prompt → encode → [ a canvas of noise → (predict → decide → refill → stop?) × steps → commit ] × blocks → tokens

`step` is one pass of the inner loop, pure and public; `stream` is both loops, as a generator of what happens;
`generate` drains it.
"""

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from dgemma.diffusion import draws
from dgemma.diffusion.noise import Noise
from dgemma.diffusion.prediction import Prediction, refuse_nan
from dgemma.diffusion.state import DenoiseState, watch
from dgemma.model.cache import PrefixCache
from dgemma.progress import progress_bar
from dgemma.run.arguments import check_valid, passes_on
from dgemma.run.changes import Changes, apply_changes, snapshot
from dgemma.run.denoiser import Denoiser
from dgemma.run.plan import Knobs, Plan, read_plan
from dgemma.run.records import BlockCommit, Denoised, Events, Generation, Moment, OnStep, StepRecord
from dgemma.sampling.base import Decision
from dgemma.sampling.stopping import ask
from dgemma.sampling.temperature import Temperature

if TYPE_CHECKING:
    from dgemma.run.trajectory import Trajectory


def step(
    denoiser: Denoiser, state: DenoiseState, *, cache: PrefixCache, knobs: Knobs
) -> tuple[DenoiseState, StepRecord]:
    """One denoising step: predict every position, decide, refill what was refused, test for the end.

    Pure, and without host synchronisation: all that varies lives in `state`. Drive it yourself to splice a row, plant a
    canvas or (by `apply_changes`) change a knob between two steps. It keeps gradients, through all steps: wrap it in
    `torch.no_grad()` to sample.

    Example: `state, record = step(model, state, cache=cache, knobs=Knobs(sampler=EntropyBound(), temperature=...))`.
    """
    raw = predict(denoiser, state.canvas, cache, noise_level=state.noise_level, self_cond=state.self_cond)
    prediction = raw.shaped(temperature=state.temperature, allowed=state.allowed, top_k=knobs.top_k, top_p=knobs.top_p)
    decision = knobs.sampler(prediction, state)
    if not isinstance(decision, Decision):
        raise TypeError(f"{type(knobs.sampler).__name__} must return a Decision, got {type(decision).__name__}.")
    if decision.tokens.shape != state.canvas.shape:
        raise ValueError(
            f"{type(knobs.sampler).__name__} must decide the canvas's {tuple(state.canvas.shape)} positions, "
            f"got {tuple(decision.tokens.shape)}."
        )

    free = ~state.frozen & ~state.done[:, None]
    write = decision.write & free
    renoise = decision.renoise & free & ~write
    canvas = torch.where(renoise, state.noise.refill(state), state.canvas)
    canvas = torch.where(write, decision.tokens, canvas)
    if state.noise.kind in knobs.sampler.redecides:
        still_open = ~state.frozen
    else:
        still_open = ((state.open & ~write) | renoise | state.noise.masked(canvas)) & ~state.frozen
    after = replace(
        state,
        canvas=canvas,
        open=torch.where(state.done[:, None], state.open, still_open),
        memory=decision.memory,
        self_cond=prediction,
        **_clock(state.noise, knobs.temperature, state.step + 1, state.num_steps),
    )

    final = torch.where(state.frozen, state.canvas, knobs.sampler.final(prediction, after))
    after = replace(after, draft=torch.where(state.done[:, None], state.draft, final))
    done, looked_at = state.done, after
    if state.awaited is not None:
        looked_at = replace(after, open=after.open & state.awaited, frozen=after.frozen | ~state.awaited)
    if not knobs.sampler.revises:
        done = done | ~looked_at.open.any(-1)
    if knobs.stop is not None:
        stopped, stop_memory = ask(knobs.stop, prediction, looked_at)
        done, after = done | stopped, replace(after, stop_memory=stop_memory)
    after = replace(after, done=done)
    record = StepRecord.of(
        state,
        after,
        prediction,
        accepted=write,
        renoised=renoise,
        active=~state.done,
        verdict=judge(prediction, after),
        cache=cache,
        knobs=knobs,
    )
    return after, record


def predict(
    denoiser: Denoiser,
    canvas: Tensor,
    cache: PrefixCache,
    *,
    noise_level: Tensor,
    self_cond: Prediction | Tensor | None = None,
) -> Prediction:
    """What a denoiser says about canvas (B, C), told its noise_level (B,) if it asks for it.

    Example: `predict(model, canvas, cache, noise_level=torch.ones(2)).entropy`.
    """
    told = {"noise_level": noise_level} if getattr(denoiser, "takes_noise_level", False) else {}
    return denoiser.denoise(canvas, cache, self_cond=self_cond, **told)


def judge(prediction: Prediction, state: DenoiseState) -> Tensor:
    """What the loop asks of a step, (3, B) int64: how many steps a row has left, 0 once it is done; whether its
    prediction is no number; whether its canvas holds tokens of no vocabulary.

    Example: `left, broken, stray = judge(prediction, state).tolist()`.
    """
    left = (state.num_steps - state.step).clamp(min=0).masked_fill(state.done, 0)
    broken = prediction.entropy.isnan().any(-1)
    stray = ((state.canvas < 0) | (state.canvas >= state.noise.vocab_size)).any(-1)
    return torch.stack((left, broken.long(), stray.long()))


def start_state(
    knobs: Knobs,
    noise: Noise,
    *,
    seeds: Tensor,
    canvas_len: int,
    num_steps: int,
    block: int = 0,
    rows: Tensor | None = None,
    canvas: Tensor | None = None,
    frozen: Tensor | None = None,
    allowed: Tensor | None = None,
    awaited: Tensor | None = None,
    noise_level: float = 1.0,
    uniform: Callable[[Tensor, Tensor, Tensor, int, str], Tensor] = draws.uniform,
) -> DenoiseState:
    """A canvas about to be denoised: noise, or `canvas` (B, C) of yours, where -1 asks for noise at that position.

    frozen (B, C) bool never changes; allowed is boolean and broadcastable to (B, C, V); awaited (B, C) bool are the
    positions that decide when the canvas ends. A noise_level below 1 skips the steps above it, to edit a canvas that is
    only partly noise. `uniform` draws, as `draws.uniform` does.

    Example: `start_state(knobs, UniformNoise(512), seeds=torch.arange(2), canvas_len=32, num_steps=16)`.
    """
    check_valid(knobs.sampler, noise)
    batch_size, device = seeds.shape[0], seeds.device
    block_index = torch.full((batch_size,), block, device=device)
    first_step = round((1 - float(noise.schedule.time(torch.tensor(1 - noise_level, dtype=torch.float64)))) * num_steps)
    num_steps_row = torch.full((batch_size,), num_steps, device=device)
    u = uniform(seeds, block_index, torch.zeros_like(block_index), canvas_len, "prior")
    fresh = noise.prior(u, allowed=allowed)
    start = fresh if canvas is None else torch.where(canvas < 0, fresh, canvas)
    if frozen is None:
        frozen = torch.zeros(batch_size, canvas_len, dtype=torch.bool, device=device)
    state = DenoiseState(
        canvas=start,
        open=noise.masked(start) & ~frozen if noise.kind == "mask" else ~frozen,
        frozen=frozen,
        draft=start,
        done=torch.zeros(batch_size, dtype=torch.bool, device=device),
        block=block_index,
        num_steps=num_steps_row,
        seeds=seeds,
        rows=torch.arange(batch_size, device=device) if rows is None else rows,
        noise=noise,
        awaited=awaited,
        allowed=noise.proposable(allowed, device),  # a mask is noise, never a proposal
        **_clock(noise, knobs.temperature, torch.full_like(block_index, min(first_step, num_steps - 1)), num_steps_row),
    )
    state = replace(state, memory=knobs.sampler.start(state))
    return state if knobs.stop is None else replace(state, stop_memory=knobs.stop.start(state))


def start_block(model: Denoiser, plan: Plan, block: int, rows: Tensor, knobs: Knobs) -> DenoiseState:
    """A block of a plan about to be denoised, for some rows (R,) of its batch."""
    return start_state(
        knobs,
        plan.noise,
        seeds=plan.seeds[block, rows],
        canvas_len=plan.canvas_len,
        num_steps=plan.num_steps,
        block=plan.first_block + block,
        rows=rows,
        uniform=model.uniform if hasattr(type(model), "uniform") else draws.uniform,  # type: ignore[attr-defined]
        **plan.block(block, rows),
    )


def _clock(noise: Noise, temperature: Temperature, step: Tensor, num_steps: Tensor) -> dict[str, Any]:
    """All that follows from the step's number: noise before and after it, and the temperature it runs at; (B,) each."""
    steps = torch.stack((step, step + 1))
    level, next_level = 1 - noise.schedule.alpha((1 - steps.double() / num_steps).clamp(min=0.0))
    return {
        "step": step,
        "noise_level": level,
        # The last step ends without noise, also under a schedule that never quite gets there.
        "next_noise_level": torch.where(steps[1] >= num_steps, 0.0, next_level),
        "temperature": temperature(step, num_steps),
    }


@passes_on(read_plan)
def stream(model: Denoiser, prompt_tokens: Tensor, *, cache: PrefixCache | None = None, **options: Any) -> Events:
    """`generate` as a stream: yields a `StepRecord` after every step and a `BlockCommit` after every block.

    For any batch size. Arguments as for `generate`, whose result is the generator's return value. Whatever is sent in
    after a `StepRecord` (a changed state, or a dictionary of changes) holds from the next step on.

    Example: `for event in stream(model, prompt): print(event.state.draft if isinstance(event, StepRecord) else "|")`.
    """
    return run(model, read_plan(model, prompt_tokens, cache=cache, **options), cache)


@passes_on(read_plan)
def generate(
    model: Denoiser,
    prompt_tokens: Tensor,
    *,
    cache: PrefixCache | None = None,
    on_step: OnStep | None = None,
    record: bool = False,
    record_top: int = 5,
    progress: bool = True,
    **options: Any,
) -> Generation:
    """Write up to `max_new_tokens` after prompt_tokens (B, P), canvas by canvas.

    max_new_tokens rounds up to whole canvases. `steps` caps the forwards per canvas. `noise` is the process, `sampler`
    decides what is kept, `temperature` (a schedule or a number), `top_k` and `top_p` shape every prediction, `stop`
    ends a canvas early (None: never). What is left out is the checkpoint's own, which for the published model means
    256 tokens, 48 steps, UniformNoise, EntropyBound(bound=0.1), temperature 0.8 → 0.4, StableAndConfident; that rule
    waits for certain predictions, so a sampler that doubts them (LeaveOneOutGibbs) runs without it.

    An int `seed` s gives row i the seed s + i. With `cache`, prompt_tokens are only what is new. `canvas` (B, N) starts
    from tokens of yours (-1, and whatever lies past N: noise), `frozen` (B, N) bool pins some of them, `allowed`
    restricts tokens: boolean, broadcastable to (B, N, V), a list of ids for all positions, or one list per position.
    Rows that write a stop token (`eos_token_ids`) are padded after it and cost nothing more; before a row's last pin
    nothing stops it. A given cache is extended in place until a row stops; `out.cache` is the one to go on with.

    `on_step(record)` sees every `StepRecord` and may return a changed `record.state`, or a dictionary of changes: any
    field of the state, any of `Knobs`. Knobs keep their change, a state's ends with its canvas. `record=True` keeps a
    `Trajectory`, with the `record_top` best candidates of every position. A progress bar shows on terminals when runs
    are long.

    Example: `dgemma.generate(model, prompt_tokens, max_new_tokens=64, seed=1).new_tokens`.
    """
    from dgemma.run.trajectory import Trajectory  # which replays runs, and so needs this file

    plan = read_plan(model, prompt_tokens, cache=cache, **options)
    trajectory = Trajectory(plan, top=record_top) if record else None
    return drain(run(model, plan, cache), on_step=on_step, trajectory=trajectory, progress=progress)


def drain(
    events: Events, *, on_step: OnStep | None, trajectory: "Trajectory | None" = None, progress: bool = False
) -> Generation:
    """Run a stream to its end: pass what `on_step` answers back into it, and keep a record."""
    changes: Changes = None
    progress = progress and not getattr(on_step, "shows_progress", False)  # a live view draws where the bar would
    with progress_bar(desc="denoising", unit="step", show=progress) as bar:
        while True:
            try:
                event = events.send(changes)
            except StopIteration as finished:
                return replace(finished.value, trajectory=trajectory)
            changes = None
            if isinstance(event, StepRecord):
                bar.update()
                before = snapshot(event.state) if trajectory is not None and on_step is not None else None
                changes = on_step(event) if on_step is not None else None
                if trajectory is not None:
                    trajectory.add_step(event, changes, before=before)
            elif trajectory is not None:
                trajectory.add_commit(event)


@torch.no_grad()
def run(
    model: Denoiser,
    plan: Plan,
    cache: PrefixCache | None = None,
    *,
    past: Sequence[BlockCommit] = (),
    on_start: Callable[[Moment], Changes] | None = None,
) -> Events:
    """Carry out a plan: `stream`, after its arguments were read.

    `past` blocks are taken as written and not yielded again; `on_start` sees every fresh canvas and may change it.

    Example: `run(model, plan, past=trajectory.commits[:2])` begins with the third block.
    """
    prompt = plan.prompt_tokens
    batch_size, device = prompt.shape[0], prompt.device
    knobs, eos = plan.knobs, torch.tensor(plan.eos_token_ids, dtype=torch.int64, device=device)
    cache = model.encode(prompt, cache, plan.attention_mask)
    rows = torch.arange(batch_size, device=device)  # of the batch that still write
    retired: list[tuple[Tensor, PrefixCache]] = []
    blocks: list[Tensor] = []
    forwards: list[Tensor] = []
    for block in range(plan.num_blocks):
        if block < len(past):
            tokens, num_forwards = past[block].tokens.to(device)[rows], past[block].steps.to(device)
        else:
            state = start_block(model, plan, block, rows, knobs)
            if on_start is not None:
                state, knobs = apply_changes(on_start(Moment(state, cache, knobs)), state, knobs)
            tokens, taken, knobs = yield from denoise_canvas(model, state, cache, knobs)
            num_forwards = _spread(taken, rows, batch_size, 0)

        ends_row = torch.isin(tokens, eos)
        if plan.span.frozen is not None:
            ends_row = ends_row & plan.span.past_pins(block, plan.canvas_len, rows)
        ended = ends_row.any(-1).tolist()  # here the host waits for the device
        tokens, real = plan.cut_text(tokens)  # None: all are real
        if any(ended):
            real = ends_row.cumsum(1) - ends_row.long() == 0  # (R, C): no stop token in front
            tokens = torch.where(real, tokens, plan.pad_token_id)
        cache = model.encode(tokens, cache, real)
        written = _spread(tokens, rows, batch_size, plan.pad_token_id)
        blocks.append(written)
        forwards.append(num_forwards)
        if any(ended):
            ends, goes_on = _where(ended, device), _where([not end for end in ended], device)
            retired.append((rows[ends], cache.select(ends)))
            rows, cache = rows[goes_on], cache.select(goes_on)
        if block >= len(past):
            finished = _spread(torch.zeros_like(rows, dtype=torch.bool), rows, batch_size, True)
            yield BlockCommit(block=block, tokens=written, finished=finished, steps=num_forwards)
        if len(rows) == 0:
            break

    new_tokens, steps = torch.cat(blocks, dim=1), torch.stack(forwards, dim=1)
    return Generation(
        tokens=torch.cat((prompt, new_tokens), dim=1),
        new_tokens=new_tokens,
        steps=steps,
        tokens_per_forward=(new_tokens != plan.pad_token_id).sum(1) / steps.sum(1),
        cache=type(cache).join([*retired, (rows, cache)]) if retired else cache,
        trajectory=None,
    )


@torch.no_grad()
def denoise_canvas(
    model: Denoiser, state: DenoiseState, cache: PrefixCache, knobs: Knobs
) -> Generator[StepRecord, Changes, Denoised]:
    """Step a canvas until every row is done or out of steps; rows that are leave and cost nothing more.

    Yields each `StepRecord`, and takes changes as `stream` does.
    """
    device = state.device
    here = list(range(state.batch_size))  # which of the given rows are still there
    drafts, num_forwards = list(state.draft), [0] * state.batch_size
    # Asked of the class: a wrapper around an engine must not step past what it wraps.
    advance: Any = model.step if hasattr(type(model), "step") else partial(step, model)  # type: ignore[attr-defined]
    read_ahead: Any = model.read_ahead if hasattr(type(model), "read_ahead") else Tensor.tolist  # type: ignore[attr-defined]
    goes_on = False  # whether another step follows, unless every row settles in this one
    for num_taken in itertools.count(1):
        state, record = advance(state, cache=cache, knobs=knobs)  # nothing before it: the device is waiting
        written = watch(state.done, state.step, state.num_steps, state.canvas)
        changes = yield record
        verdict = record.verdict if changes is None and not written() else None
        state, knobs = apply_changes(changes, state, knobs)
        if verdict is None:
            verdict = judge(record.prediction, state)
        left, broken, stray = read_ahead(verdict) if goes_on else verdict.tolist()  # here the host waits for the device
        if any(broken) or any(stray):
            _refuse_step(record, broken, stray)
        if not all(left):
            for row, draft in zip(here, state.draft.clone(), strict=True):  # a denoiser may reuse its own
                drafts[row], num_forwards[row] = draft, num_taken
            if not any(left):
                break
            here = [row for row, steps in zip(here, left, strict=True) if steps]
            working = _where(left, device)
            state, cache = state.select(working), cache.select(working)
        goes_on = knobs.stop is None and min(left) > 1
    return Denoised(torch.stack(drafts), torch.tensor(num_forwards, device=device), knobs)


def _refuse_step(record: StepRecord, broken: list[int], stray: list[int]) -> NoReturn:
    """Say where a step went wrong, and through whom: the model's numbers, the sampler's tokens, or a caller's."""
    row = (broken if any(broken) else stray).index(1)
    where = f"at block {int(record.block[row])}, step {int(record.step[row])}, row {int(record.rows[row])}"
    if any(broken):
        refuse_nan(where)
    canvas, vocab_size = record.state.canvas[row], record.state.noise.vocab_size
    got = f"got {int(canvas.min())}..{int(canvas.max())} {where}."
    if record.verdict is not None and not record.verdict[2, row]:
        raise ValueError(f"What is written into a state's canvas must be tokens in [0, {vocab_size}), {got}")
    raise ValueError(
        f"{type(record.knobs.sampler).__name__} must write tokens in [0, {vocab_size}), {got} "
        "Take them from the prediction."
    )


def _where(flags: Sequence[int], device: torch.device) -> Tensor:
    """The places of what is not zero, (n,) int64."""
    return torch.tensor([at for at, flag in enumerate(flags) if flag], dtype=torch.int64, device=device)


def _spread(values: Tensor, rows: Tensor, batch_size: int, fill: int | bool) -> Tensor:
    """The values (R, ...) of some rows of the batch in their places, (B, ...), and `fill` in the others'."""
    if len(rows) == batch_size:
        return values
    return values.new_full((batch_size, *values.shape[1:]), fill).index_copy(0, rows, values)
