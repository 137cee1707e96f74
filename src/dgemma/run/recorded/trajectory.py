"""A recorded run that can be replayed exactly, and forked.

A draw is a function of (seed, block, step, position, purpose). So the plan, the model and the changes made by
callbacks determine a run. A trajectory keeps the plan and the changes; with the model, any step can be repeated.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dgemma.checks import as_int, require, typed
from dgemma.diffusion.decision import Decision
from dgemma.diffusion.law import Law
from dgemma.diffusion.prediction import Prediction, Top
from dgemma.diffusion.state import DenoiseState
from dgemma.model.cache import Cache
from dgemma.model.denoiser import Denoiser, check_denoiser
from dgemma.run import arguments
from dgemma.run.changes import Changes, apply_changes, knob_changes, list_changes, list_in_place, snapshot
from dgemma.run.knobs import Knobs
from dgemma.run.loop import drain, run_plan
from dgemma.run.plan import Plan
from dgemma.run.recorded.steps import COLUMNS, Change, RecordedStep, read_file, write_file
from dgemma.run.records import BlockCommit, Moment, OnStep, Output, Result, RunEvent, StepRecord
from dgemma.run.rows import Rows
from dgemma.run.step import predict, settle
from dgemma.values import find_unknown

_TOP = 5  # candidates of a position, by default
StepPlace = tuple[int, int]  # a block, and a step's place in it
Now = Moment | StepRecord  # before the first step of a canvas, and after each step
Script = Callable[[StepPlace, Now], Changes]


class Trajectory:
    """A recorded run; `generate(..., record=True).trajectory` is one.

    `len` counts the steps of all blocks. `trajectory[i]` is a `RecordedStep`, and `array(name)` has one of its fields
    over all steps and rows. `plan` holds the settings of the run, `changes` the changes made by callbacks, and
    `commits` the finished blocks.

    Example: `generate(model, prompt, record=True).trajectory.array("entropy").mean(-1)` is (steps, B).
    """

    def __init__(self, plan: Plan, *, top: int | None = None) -> None:
        require(isinstance(plan, Plan), "Trajectory.plan", "come from read_plan", plan)
        vocab_size = plan.noise.vocab_size
        read = min(_TOP, vocab_size) if top is None else as_int(top)
        fits, rule = read is not None and 0 <= read <= vocab_size, f"be from 0 to the vocabulary's {vocab_size}"
        require(fits, "record_top", rule, top)
        self.plan, self.top = plan, cast(int, read)
        self.steps: list[RecordedStep] = []
        self.commits: list[BlockCommit] = []
        self.changes: list[Change] = []

    def record(
        self, events: Generator[RunEvent, Changes, Result], *, may_change: bool, rows: Tensor | None = None
    ) -> Generator[RunEvent, Changes, Result]:
        """Yield the events of a run, and record them with the changes that are sent back.

        may_change: True if the receiver may change states, in place or by changes. rows: for events of some rows of a
        larger batch, their row numbers there, ascending. Here they are numbered 0, 1, ….
        """
        changes: Changes = None
        while True:
            try:
                event = events.send(changes)
            except StopIteration as finished:
                return finished.value
            if isinstance(event, StepRecord):
                untouched = snapshot(event.state) if may_change else event.state
                changes = yield event
                self._add_step(event, changes, untouched, rows)
            else:
                self.add_commit(event)
                changes = yield event

    def _add_step(self, record: StepRecord, changes: Changes, after: DenoiseState, rows: Tensor | None) -> None:
        """Record a step. `after` is the state after it, before the receiver changed anything."""
        none = record.entropy.new_empty(*record.canvas.shape, 0)
        top = record.prediction.top(self.top) if self.top else Top(none, none)
        values = {"next_canvas": after.canvas, "done": after.done, "draft": after.draft, "open": after.open}
        values |= {"top_tokens": top.tokens, "top_probabilities": top.probabilities}
        if rows is not None:
            values["rows"] = torch.searchsorted(rows, record.rows)
        columns = {}
        for name, form in COLUMNS.items():
            is_small = form.most == "V" and self.plan.noise.vocab_size <= 2**15
            tensor = values[name] if name in values else getattr(record, name)
            columns[name] = tensor.detach().to(torch.int16 if is_small else form.dtypes[-1]).cpu()
        block, index = self.place()
        self.steps.append(RecordedStep(block=block, index=index, **columns))
        listed = list_in_place(after, record.state) | list_changes(changes, record.state, record.knobs)
        self._add_change((block, index + 1), listed)

    def add_commit(self, commit: BlockCommit) -> None:
        """Record a finished block."""
        kept = {f.name: tree_map(_on_cpu, getattr(commit, f.name)) for f in fields(commit)}
        self.commits.append(BlockCommit(**kept))

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> RecordedStep:
        return self.steps[index]

    def __iter__(self) -> Iterator[RecordedStep]:
        return iter(self.steps)

    def __repr__(self) -> str:
        blocks, sampler = f"{len(self.commits)} of {self.plan.num_blocks} blocks", self.plan.knobs.sampler
        return f"Trajectory({self.batch_size} rows, {blocks}, {len(self)} steps, {type(sampler).__name__})"

    @property
    def batch_size(self) -> int:
        return self.plan.batch_size

    @property
    def present(self) -> Tensor:
        """Mask of the rows that took part in each step, (steps, B) bool. The others were already done."""
        return self.array("rows") >= 0

    @typed
    def array(self, name: str) -> Tensor:
        """A field of `RecordedStep` over all steps and rows: (steps, B), (steps, B, C) or (steps, B, C, k).

        For an absent row, integer fields are -1, float fields NaN and boolean fields False.

        Example: `trajectory.array("accepted").sum(-1)` counts the tokens that each step accepted.
        """
        require(name in COLUMNS, "Trajectory.array name", f"be one of {', '.join(COLUMNS)}", name)
        columns = [getattr(step, name) for step in self.steps]
        if not columns:
            return torch.full((0, self.batch_size), -1)
        kind, shape = columns[0].dtype, columns[0].shape[1:]
        absent = False if kind == torch.bool else float("nan") if kind.is_floating_point else -1
        spread = torch.full((len(columns), self.batch_size, *shape), absent, dtype=kind)
        for i, (step, column) in enumerate(zip(self.steps, columns, strict=True)):
            spread[i, step.rows.long()] = column
        return spread

    @typed
    def at(self, *, block: int, step: int) -> RecordedStep:
        """Return a step of a block. `step` counts the recorded steps of the block from 0, like `RecordedStep.index`.

        Example: `trajectory.at(block=0, step=3).entropy`.
        """
        for recorded in self.steps:
            if (recorded.block, recorded.index) == (block, step):
                return recorded
        counts = list(Counter(recorded.block for recorded in self.steps).values())
        raise IndexError(f"Trajectory has no block {block}, step {step}. The recorded steps per block are {counts}.")

    @property
    def new_tokens(self) -> Tensor:
        """The committed blocks, (B, N) int64."""
        none = torch.empty(self.batch_size, 0, dtype=torch.int64)
        return torch.cat([none, *(commit.tokens for commit in self.commits)], dim=1)

    @property
    def num_forwards(self) -> Tensor:
        """Forwards of each row in each committed block, (B, blocks)."""
        none = torch.empty(self.batch_size, 0, dtype=torch.int64)
        return torch.cat([none, *(commit.forwards[:, None] for commit in self.commits)], dim=1)

    @property
    def tokens_per_forward(self) -> Tensor:
        """New tokens without padding, divided by forwards, (B,)."""
        return self.plan.count_tokens(self.new_tokens) / self.num_forwards.sum(1)

    @typed
    def save(self, path: str | Path) -> None:
        """Write the trajectory to one safetensors file, for `load`.

        Example: `trajectory.save("run.safetensors")`.
        """
        steps = {name: torch.cat([getattr(step, name) for step in self.steps]) for name in COLUMNS if self.steps}
        sizes = [(step.block, step.index, len(step.rows)) for step in self.steps]
        content = {"plan": self.plan, "top": self.top, "steps": steps, "sizes": sizes}
        write_file(path, {**content, "commits": self.commits, "changes": self.changes})

    @classmethod
    @typed
    def load(cls, path: str | Path, *, classes: Iterable[type] = ()) -> Self:
        """Read a trajectory. To replay or fork a run that used your own classes, pass these in `classes`.

        Example: `Trajectory.load("run.safetensors", classes=[MySampler]).replay(model)`.
        """
        content = read_file(path, classes)
        trajectory = cls(content["plan"], top=content["top"])
        trajectory.commits, trajectory.changes = list(content["commits"]), list(content["changes"])
        columns = {name: tensor.split([s[2] for s in content["sizes"]]) for name, tensor in content["steps"].items()}
        for i, (block, index, _) in enumerate(content["sizes"]):
            tensors = {name: column[i] for name, column in columns.items()}
            trajectory.steps.append(RecordedStep(block=block, index=index, **tensors))
        return trajectory

    def difference(self, other: "Trajectory") -> str | None:
        """Describe where two trajectories first differ; None if they are equal bit for bit.

        Example: `a.difference(b)` may be "block 0, step 3, row 1: canvas".
        """
        for mine, theirs in zip(self.steps, other.steps, strict=False):
            where = f"block {mine.block}, step {mine.index}"
            if (mine.block, mine.index) != (theirs.block, theirs.index) or not torch.equal(mine.rows, theirs.rows):
                return f"{where}: the unfinished rows"
            for name in COLUMNS:
                differs = ~_same(getattr(mine, name), getattr(theirs, name)).all(1)
                if bool(differs.any()):
                    return f"{where}, row {int(mine.rows[differs][0])}: {name}"
        for one, another in zip(self.commits, other.commits, strict=False):
            if not torch.equal(one.tokens, another.tokens) or not torch.equal(one.steps, another.steps):
                return f"block {one.block}: the committed tokens"
        if len(self) != len(other) or len(self.commits) != len(other.commits):
            return f"the end: {len(self)} steps versus {len(other)}"
        return None

    def place(self) -> StepPlace:
        """The block of the next recorded step, and its place there."""
        block = len(self.commits)
        return block, self.steps[-1].index + 1 if self.steps and self.steps[-1].block == block else 0

    @typed
    def replay(self, model: Denoiser, *, cache: Cache | None = None, strict: bool = True) -> "Trajectory":
        """Repeat the run and return its trajectory. With `strict`, raise if it differs from this one.

        The recorded changes of an `on_step` callback are applied again. A run that continued a cache needs that cache
        as it was before the run; the cache is copied, not extended.

        Example: `trajectory.replay(model)`.
        """
        again = type(self)(self.plan, top=self.top)

        def script(place: StepPlace, now: Now) -> Changes:
            if strict and len(again) > len(self):
                raise _Reached(Moment(now.state, now.cache, now.knobs))  # the difference below says so
            return self._changes_before(place, now)

        with suppress(_Reached):
            self._rerun(model, cache, 0, script, again)
        difference = self.difference(again) if strict else None
        if difference:
            fix = "Use the same weights, dtype, device and versions."
            raise RuntimeError(f"The replay differs from the run at {difference}. {fix}")
        return again

    @typed
    def log_prob(
        self, model: Denoiser, *, cache: Cache | None = None, strict: bool = True, through_self_cond: bool = True
    ) -> Tensor:
        """Return the log-probability of each row's run under `model`, (B,) float64, with gradients.

        It includes every decision: which positions were written and with which tokens, which returned to noise, and
        when the run stopped. Noise tokens are left out, because they do not depend on the weights. So for the weights
        of the run, exp is its frequency, given its noise.

        `model` predicts the recorded canvases again, so it may have other weights. The difference of two results is the
        log of the importance ratio. Some rules are not random: a threshold, a greedy token, a stop rule, the argmax
        that is committed at the end. If these weights would have decided otherwise there, the run is impossible under
        them and the result is -inf. With `strict=False` such rules count as given, and the result is the
        log-probability of what was drawn. Where both are finite, they and their gradients are equal.

        Each step sees the prediction of the step before it, if the model uses self-conditioning. Gradients flow through
        this prediction too, unless `through_self_cond` is False; that takes less memory, but the gradient is biased. A
        run that continued a cache needs that cache as it was before the run.

        Example: `(advantage * generate(model, prompt, record=True).trajectory.log_prob(model)).sum().backward()`.
        """
        return self.step_log_probs(model, cache=cache, strict=strict, through_self_cond=through_self_cond).sum(0)

    @typed
    def step_log_probs(
        self,
        model: Denoiser,
        *,
        cache: Cache | None = None,
        strict: bool = True,
        through_self_cond: bool = True,
        with_grad: Sequence[bool] | None = None,
    ) -> Tensor:
        """Return the parts of `log_prob` that come from each step, (steps, B); 0 where a row took no part.

        with_grad: a flag per step. Steps without it are computed without gradients, and take less memory.

        Example: `trajectory.step_log_probs(model)[:4].sum(0)` is the log-probability of the first four steps.
        """
        zeros = torch.zeros(self.batch_size, dtype=torch.float64, device=model.device)
        of_steps = [
            zeros.index_add(0, taken.rows.to(model.device, torch.int64), law.log_prob if strict else law.drawn)
            for taken, _, law in self._predict_again(model, cache, through_self_cond, with_grad)
        ]
        return torch.stack(of_steps) if of_steps else zeros[None][:0]

    @typed
    def token_log_probs(self, model: Denoiser, *, cache: Cache | None = None, through_self_cond: bool = True) -> Tensor:
        """Return the log-probability of every token when it was written, (steps, B, C) float64, with gradients.

        It is that of the shaped prediction: after temperature, allowed tokens, top-k and top-p. It is NaN where a step
        wrote no token.

        Example: `trajectory.token_log_probs(model).nansum(-1)` is (steps, B).
        """
        size = self.batch_size, self.plan.canvas_len
        nothing = torch.full(size, torch.nan, dtype=torch.float64, device=model.device)
        of_steps = []
        for taken, prediction, _ in self._predict_again(model, cache, through_self_cond, None):
            tokens, written = taken.next_canvas.long().to(model.device), taken.accepted.to(model.device)
            log_probs = prediction.log_prob(tokens).double().masked_fill(~written, torch.nan)  # (R, C)
            of_steps.append(nothing.index_copy(0, taken.rows.to(model.device, torch.int64), log_probs))
        return torch.stack(of_steps) if of_steps else nothing[None][:0]

    def _predict_again(
        self, model: Denoiser, cache: Cache | None, through_self_cond: bool, with_grad: Sequence[bool] | None
    ) -> Iterator[tuple[RecordedStep, Prediction, Law]]:
        """Yield every recorded step, with the prediction of `model` for its canvas and the law of its decision."""
        self._check_model(model, cache)
        rows = Rows(self.plan.to(model.device))
        cache = None if cache is None else cache.clone()
        for number, taken in enumerate(self.steps):
            if taken.index == 0:
                if taken.block > 0:
                    rows.repeat(self.commits[taken.block - 1])
                cache = rows.encode(model, cache)
                knobs = self._knobs_at(taken.block)
                now = Moment(rows.start(model, knobs), cache, knobs)
            now = self._enter(taken, now)
            has_grad = torch.is_grad_enabled() and (with_grad is None or with_grad[number])
            with torch.set_grad_enabled(has_grad):
                prediction = predict(model, now.state, cache=now.cache, knobs=now.knobs)
                law, state = _repeat_step(taken, prediction, now.state, now.knobs, self._ends(number).to(model.device))
            yield taken, prediction, law
            if not through_self_cond:
                state = replace(state, self_cond=Prediction(prediction.unconditioned.logits.detach()))
            now = now._replace(state=state)

    def _enter(self, taken: RecordedStep, now: Moment) -> Moment:
        """The moment before a recorded step, after the changes made there. Rows that take no part in it have left."""
        state, knobs = apply_changes(self._changes_before((taken.block, taken.index), now), now.state, now.knobs)
        stay = torch.isin(state.rows, taken.rows.to(state.device)).nonzero()[:, 0]
        if len(stay) == len(state.rows):
            return Moment(state, now.cache, knobs)
        return Moment(state.select(stay), now.cache.select(stay), knobs)

    def _ends(self, number: int) -> Tensor:
        """Return whether the canvas of each row ends with this step, (R,) bool. The next step has only other rows."""
        taken, following = self.steps[number], self.steps[number + 1 : number + 2]
        next_rows = [step.rows for step in following if step.block == taken.block]
        return ~torch.isin(taken.rows, torch.cat([taken.rows[:0], *next_rows]))

    @typed
    def moment(self, model: Denoiser, *, block: int = 0, step: int = 0, cache: Cache | None = None) -> Moment:
        """Rebuild the state before step `step` of a block, by running from the block's start.

        It includes rows that finished in the step before. Rows that finished earlier have left the batch. To continue
        from a changed state, use `fork(..., state=...)`.

        Example: `a.moment(model, step=3).state.splice(rows, b.moment(model, step=3).state.select(rows))`.
        """
        self.at(block=block, step=step)  # raises if there is no such step

        def script(place: StepPlace, now: Now) -> Changes:
            changes = self._changes_before(place, now)
            if place == (block, step):
                state, knobs = apply_changes(changes, now.state, now.knobs)
                raise _Reached(Moment(state, now.cache, knobs))
            return changes

        try:
            self._rerun(model, cache, block, script)
        except _Reached as reached:
            return reached.moment
        raise RuntimeError(f"The run ended before block {block}, step {step}. Use the model it was recorded with.")

    @typed
    def fork(
        self,
        model: Denoiser,
        *,
        block: int = 0,
        step: int = 0,
        cache: Cache | None = None,
        seed: int | Sequence[int] | Tensor | None = None,
        on_step: OnStep | None = None,
        **changes: Any,
    ) -> "Generation":
        """Continue from step `step` of a block with changes; without changes, the result equals the run.

        changes: fields of the state (with one entry per row of `moment(...).state`), a whole `state`, or fields of
        `Knobs`. `seed` applies from that step on. Changes that a callback made up to that step are applied again. Later
        ones belong to the old canvas, so they are repeated only if the fork changes nothing. Pass `on_step` again to
        keep the callback. The new trajectory begins with the shared steps, and can be saved, replayed and forked too.

        Example: `trajectory.fork(model, block=1, step=4, sampler=EntropyBound(bound=0.5))`.
        """
        self.at(block=block, step=step)  # raises if there is no such step
        plan, unchanged = self.plan, not changes and seed is None and on_step is None
        if seed is not None:
            row_seeds, seeds = arguments.read_seeds(seed, plan.prompt_tokens), plan.seeds.clone()
            seeds[block if step == 0 else block + 1 :] = row_seeds
            plan = replace(plan, seeds=seeds)

        def script(place: StepPlace, now: Now) -> Changes:
            if place > (block, step) and not unchanged:
                return on_step(now) if on_step is not None and isinstance(now, StepRecord) else None
            earlier = self._changes_before(place, now)
            if place != (block, step):
                return earlier
            new = dict(changes)
            if seed is not None and step > 0:
                new.setdefault("seeds", row_seeds.to(now.state.device)[now.state.rows])
            return earlier | list_changes(new, *apply_changes(earlier, now.state, now.knobs))

        return self._rerun(model, cache, block, script, type(self)(plan, top=self.top))

    def _rerun(
        self, model: Denoiser, cache: Cache | None, block: int, script: Script, again: "Trajectory | None" = None
    ) -> "Generation":
        """Run again from the start of a block, and record it. `script` returns the changes before each step."""
        self._check_model(model, cache)
        again = type(self)(self.plan, top=self.top) if again is None else again
        again.steps = [step for step in self.steps if step.block < block]
        again.changes = [change for change in self.changes if change.block < block]
        again.commits = self.commits[:block]

        def on_start(moment: Moment) -> Changes:
            place = again.place()
            changes = script(place, moment)
            again._add_change(place, list_changes(changes, moment.state, moment.knobs))
            return changes

        def on_step(record: StepRecord) -> Changes:
            block, index = again.place()
            return script((block, index + 1), record)

        plan = replace(again.plan, knobs=self._knobs_at(block)).to(model.device)
        cache = None if cache is None else cache.clone()
        events = run_plan(model, plan, cache, past=self.commits[:block], on_start=on_start)
        return Generation(**vars(drain(again.record(events, may_change=True), on_step=on_step)), recorded=again)

    def _check_model(self, model: Denoiser, cache: Cache | None) -> None:
        """Raise unless the run can be repeated with this model and cache."""
        check_denoiser("Trajectory", model)
        plan, sizes = self.plan, (model.config.canvas_length, model.config.vocab_size)
        missing = find_unknown((plan, self.changes))
        if missing is not None:
            is_named = missing.fields is None
            fix = "Only its name was saved. Record the run with a frozen dataclass." if is_named else "Pass it to load."
            raise ValueError(f"This trajectory was made with {missing.name}, which this process does not know. {fix}")
        needed = (plan.canvas_len, plan.noise.vocab_size)
        rule = f"have the canvas_length and vocab_size {needed} of the run"
        require(sizes == needed, "Trajectory model", rule, sizes)
        had = None if plan.num_cached is None else plan.num_cached.tolist()
        got = None if cache is None else cache.lengths.tolist()
        require(had == got, "Trajectory cache", f"have the tokens per row {had} with which the run began", got)

    def _add_change(self, place: StepPlace, listed: dict[str, Any]) -> None:
        if listed:
            self.changes.append(Change(block=place[0], index=place[1], values=tree_map(_on_cpu, listed)))

    def _changes_before(self, place: StepPlace, now: Now) -> dict[str, Any]:
        """The changes before the step at `place`, on the device of the run."""
        values: dict[str, Any] = {}
        for change in self.changes:
            if (change.block, change.index) == place:
                values |= change.values
        return tree_map(lambda x: x.to(now.state.device) if isinstance(x, Tensor) else x, values)

    def _knobs_at(self, block: int) -> Knobs:
        """The knobs at the start of a block."""
        knobs = self.plan.knobs
        for change in self.changes:
            if change.block < block:
                knobs = replace(knobs, **knob_changes(change.values, knobs))
        return knobs


@dataclass(frozen=True, kw_only=True, repr=False)
class Generation(Output):
    """The result of `generate`. tokens (B, P + N) and new_tokens (B, N); steps (B, blocks)."""

    recorded: Trajectory | None

    @property
    def trajectory(self) -> Trajectory:
        """The recorded run."""
        if self.recorded is None:
            raise AttributeError("Generation.trajectory needs a recorded run. Pass record=True to generate.")
        return self.recorded


class _Reached(Exception):
    """Ends a rerun at a moment."""

    def __init__(self, moment: Moment) -> None:
        self.moment = moment


def _repeat_step(
    taken: RecordedStep, prediction: Prediction, state: DenoiseState, knobs: Knobs, ends: Tensor
) -> tuple[Law, DenoiseState]:
    """Return the law of a recorded step, and the state after it. ends (R,) bool: rows whose canvas ends with it."""
    canvas, is_open, write, renoise, done, draft = (
        tensor.to(state.device)
        for tensor in (taken.next_canvas, taken.open, taken.accepted, taken.renoised, taken.done, taken.draft)
    )
    decision = Decision(tokens=canvas.long(), write=write, renoise=renoise)
    law = knobs.sampler.law(prediction, state, decision)
    after = settle(state, prediction, replace(decision, memory=law.memory), knobs).state
    same_end = (after.done == done) & ((after.draft == draft).all(-1) | ~ends)
    after = replace(after, canvas=decision.tokens, open=is_open, done=done)
    return law._replace(agrees=law.agrees & same_end), after


def _on_cpu(value: Any) -> Any:
    value = value.logits if isinstance(value, Prediction) else value
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _same(left: Tensor, right: Tensor) -> Tensor:
    if left.shape != right.shape:
        return torch.zeros(len(left), 1, dtype=torch.bool)
    same = left == right
    return (same | (left.isnan() & right.isnan()) if left.is_floating_point() else same).reshape(len(left), -1)
