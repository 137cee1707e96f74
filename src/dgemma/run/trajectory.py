"""A recorded run: every step's canvas, decisions and certainty. It can be saved, replayed exactly, and forked.

A draw is a function of (seed, block, step, position, purpose). So the plan, the model and the changes made by
callbacks determine a run. A trajectory keeps the plan and the changes; with the model, any step can be repeated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dgemma.checks import as_int, show, typed
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState
from dgemma.model.cache import Cache
from dgemma.progress import progress_bar
from dgemma.run import archive, arguments
from dgemma.run.changes import Changes, apply_changes, knob_changes, list_changes, list_writes, snapshot
from dgemma.run.knobs import Knobs
from dgemma.run.loop import run_plan, start_block
from dgemma.run.plan import Plan
from dgemma.run.records import BlockCommit, Events, Moment, OnStep, Output, StepRecord
from dgemma.run.step import Denoiser, check_denoiser, clock, shape
from dgemma.run.stored import check_content
from dgemma.values import find_unknown

_KIND = "trajectory"


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedStep:
    """One step of R unfinished rows, C positions and k candidates, on the CPU in small types."""

    block: int
    index: int  # the step's place in its block
    rows: Tensor  # (R,) row numbers in the batch
    step: Tensor  # (R,) int64, the step number used in random draws
    seeds: Tensor  # (R,) int64
    temperature: Tensor  # (R,) float32
    noise_level: Tensor  # (R,) float64
    done: Tensor  # (R,) bool, after the step
    canvas: Tensor  # (R, C) int, before the step
    next_canvas: Tensor  # (R, C) int, after it
    draft: Tensor  # (R, C) int: the commit if the canvas ended after this step
    argmax: Tensor  # (R, C) int
    accepted: Tensor  # (R, C) bool
    renoised: Tensor  # (R, C) bool
    open: Tensor  # (R, C) bool, after the step
    entropy: Tensor  # (R, C) float32, nats
    confidence: Tensor  # (R, C) float32
    top_tokens: Tensor  # (R, C, k) int, best first
    top_probabilities: Tensor  # (R, C, k) float16


_COLUMNS = tuple(f.name for f in fields(RecordedStep) if f.type is Tensor)


@dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """Changes by a callback or a fork before step `index` of a block: fields of the state and knobs, by name."""

    block: int
    index: int
    values: dict[str, Any]


class Trajectory:
    """A recorded run; `generate(..., record=True).trajectory` is one.

    `len` counts the steps of all blocks. `trajectory[i]` is a `RecordedStep`, and `array(name)` has one of its fields
    over all steps and rows. `plan` holds the settings of the run, `changes` the changes made by callbacks, and
    `commits` the finished blocks.

    Example: `generate(model, prompt, record=True).trajectory.array("entropy").mean(-1)` is (steps, B).
    """

    def __init__(self, plan: Plan, *, top: int = 5) -> None:
        if not isinstance(plan, Plan):
            raise ValueError(f"Trajectory.plan must be a Plan, got {show(plan)}. `read_plan` makes one.")
        number = as_int(top)
        if number is None or not 0 <= number <= plan.noise.vocab_size:
            raise ValueError(f"Trajectory.top must be in [0, {plan.noise.vocab_size}], got {top}. Use 0 for none.")
        self.plan, self.top = plan, number
        self.steps: list[RecordedStep] = []
        self.commits: list[BlockCommit] = []
        self.changes: list[Change] = []

    def add_step(self, record: StepRecord, changes: Changes = None, *, before: DenoiseState | None = None) -> None:
        """Record a step, and the changes after it.

        before: a `snapshot` of the state right after the step. Pass it if a callback may have written into the state.
        """
        written = {} if before is None else list_writes(before, record.state)
        after = record.state if before is None else before
        token_type = torch.int16 if self.plan.noise.vocab_size <= 2**15 else torch.int32
        top = record.top(self.top) if self.top else None
        none = record.entropy.new_empty(*record.canvas.shape, 0)
        columns = {
            "rows": record.rows.int(),
            "step": record.step,
            "seeds": record.seeds,
            "temperature": record.temperature.float(),
            "noise_level": record.noise_level,
            "done": after.done,
            "canvas": record.canvas.to(token_type),
            "next_canvas": after.canvas.to(token_type),
            "draft": after.draft.to(token_type),
            "argmax": record.argmax.to(token_type),
            "accepted": record.accepted,
            "renoised": record.renoised,
            "open": after.open,
            "entropy": record.entropy.float(),
            "confidence": record.confidence.float(),
            "top_tokens": (none if top is None else top.tokens).to(token_type),
            "top_probabilities": (none if top is None else top.probabilities).half(),
        }
        columns = {name: tensor.detach().cpu() for name, tensor in columns.items()}
        block, index = self._place()
        self.steps.append(RecordedStep(block=block, index=index, **columns))
        self._add_change((block, index + 1), changes, Moment(record.state, record.cache, record.knobs), written)

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
        blocks = f"{len(self.commits)} of {self.plan.num_blocks} blocks"
        return (
            f"Trajectory({self.batch_size} rows, {blocks}, {len(self)} steps, {type(self.plan.knobs.sampler).__name__})"
        )

    @property
    def batch_size(self) -> int:
        return self.plan.prompt_tokens.shape[0]

    @property
    def present(self) -> Tensor:
        """Mask of the rows that took part in each step, (steps, B) bool. The others were already done."""
        return self._spread("rows", -1) >= 0

    @typed
    def array(self, name: str) -> Tensor:
        """A field of `RecordedStep` over all steps and rows: (steps, B), (steps, B, C) or (steps, B, C, k).

        For an absent row, integer fields are -1, float fields NaN and boolean fields False.

        Example: `trajectory.array("accepted").sum(-1)` counts the tokens that each step accepted.
        """
        if name not in _COLUMNS:
            raise ValueError(f"Trajectory.array name must be one of {', '.join(_COLUMNS)}; got {name!r}.")
        kind = getattr(self.steps[0], name).dtype if self.steps else torch.int64
        absent = False if kind == torch.bool else float("nan") if kind.is_floating_point else -1
        return self._spread(name, absent)

    @typed
    def at(self, *, block: int, step: int) -> RecordedStep:
        """Return step number `step` of a block.

        Example: `trajectory.at(block=0, step=3).entropy`.
        """
        for recorded in self.steps:
            if (recorded.block, recorded.index) == (block, step):
                return recorded
        raise IndexError(f"Trajectory.at must name a recorded step, got block {block}, step {step} of {self!r}.")

    @property
    def new_tokens(self) -> Tensor:
        """The committed blocks, (B, N) int64."""
        none = torch.empty(self.batch_size, 0, dtype=torch.int64)
        return torch.cat([none, *(commit.tokens for commit in self.commits)], dim=1)

    @property
    def num_forwards(self) -> Tensor:
        """Forwards of each row in each committed block, (B, blocks)."""
        none = torch.empty(self.batch_size, 0, dtype=torch.int64)
        return torch.cat([none, *(commit.steps[:, None] for commit in self.commits)], dim=1)

    @property
    def tokens_per_forward(self) -> Tensor:
        """New tokens without padding, divided by forwards, (B,)."""
        return (self.new_tokens != self.plan.pad_token_id).sum(1) / self.num_forwards.sum(1)

    @typed
    def save(self, path: str | Path) -> None:
        """Write the trajectory to one safetensors file, for `load`.

        Example: `trajectory.save("run.safetensors")`.
        """
        steps = {name: torch.cat([getattr(step, name) for step in self.steps]) for name in _COLUMNS if self.steps}
        sizes = [(step.block, step.index, len(step.rows)) for step in self.steps]
        content = {"plan": self.plan, "top": self.top, "steps": steps, "sizes": sizes}
        archive.save(path, {**content, "commits": self.commits, "changes": self.changes}, kind=_KIND)

    @classmethod
    @typed
    def load(cls, path: str | Path, *, classes: Iterable[type] = ()) -> Self:
        """Read a trajectory. To replay or fork a run that used your own classes, pass these in `classes`.

        Example: `Trajectory.load("run.safetensors", classes=[MySampler]).replay(model)`.
        """
        content = archive.load(path, kind=_KIND, classes=classes)
        missing = find_unknown(getattr(content.get("plan"), "noise", None))
        if missing is not None:
            raise ValueError(
                f"{path} was made with {missing.name}, which this process does not know. Pass it in classes=[...]."
            )
        try:
            check_content(content)
        except ValueError as error:
            raise ValueError(f"{path} is not a complete {_KIND} file of this version of dgemma: {error}") from None
        trajectory = cls(content["plan"], top=content["top"])
        trajectory.commits, trajectory.changes = list(content["commits"]), list(content["changes"])
        columns = {name: tensor.split([s[2] for s in content["sizes"]]) for name, tensor in content["steps"].items()}
        for i, (block, index, _) in enumerate(content["sizes"]):
            tensors = {name: column[i] for name, column in columns.items()}
            trajectory.steps.append(RecordedStep(block=block, index=index, **tensors))
        return trajectory

    @typed
    def replay(self, model: Denoiser, *, cache: Cache | None = None, strict: bool = True) -> "Trajectory":
        """Repeat the run and return its trajectory. With `strict`, raise if it differs from this one.

        The recorded changes of an `on_step` callback are applied again. A run that continued a cache needs that cache
        as it was before the run; the cache is copied, not extended.

        Example: `trajectory.replay(model)`.
        """
        again = Trajectory(self.plan, top=self.top)

        def script(place: Place, moment: Moment, record: StepRecord | None) -> Changes:
            if strict and len(again) > len(self):
                _refuse_difference(f"the end: {len(self)} steps in the run, more in the replay")
            return self._changes_before(place, moment)

        self._rerun(model, cache, again, script)
        difference = self.difference(again) if strict else None
        if difference:
            _refuse_difference(difference)
        return again

    @typed
    def log_prob(self, model: Denoiser, *, cache: Cache | None = None) -> Tensor:
        """Return the log-probability of each row's decisions together under `model`, (B,), with gradients.

        A decision is a token that a step wrote. Its probability is that of the step's prediction, after temperature
        and truncation. `model` predicts the recorded canvases again, so it may have other weights than in the run. The
        difference of two results is then the log-ratio of two policies. Two things are left out: noise tokens, which do
        not depend on the weights, and the argmax at positions that are still open at the end.

        A sampler such as `EntropyBound` does not use the drawn tokens to choose positions. For such samplers, the
        result is the exact log-likelihood of the written tokens, given the run's positions and noise.

        A run that continued a cache needs that cache as it was before the run.

        Example: `(advantage * generate(model, prompt, record=True).trajectory.log_prob(model)).sum().backward()`.
        """
        self._check_model(model, cache)
        if self.plan.language is not None:
            raise ValueError(
                "Trajectory.log_prob needs a run without a constraint, because a constraint draws the tokens of a "
                "canvas together. Record the run without `constraint`."
            )
        plan, device = self.plan.to(model.device), model.device
        cache = model.encode(plan.prompt_tokens, None if cache is None else cache.clone(), plan.attention_mask)
        rows, knobs = torch.arange(self.batch_size, device=device), plan.knobs
        total = torch.zeros(self.batch_size, dtype=torch.float64, device=device)
        for block in range(self.steps[-1].block + 1 if self.steps else 0):
            if block > 0:
                tokens, real, ended = plan.end_rows(self.commits[block - 1].tokens.to(device)[rows], block - 1, rows)
                cache = model.encode(tokens, cache, real)
                goes_on = torch.tensor([not end for end in ended], device=device).nonzero()[:, 0]
                rows, cache = rows[goes_on], cache.select(goes_on)
            state, here = start_block(model, plan, block, rows, knobs), cache
            for taken in (step for step in self.steps if step.block == block):
                changes = self._changes_before((block, taken.index), Moment(state, here, knobs))
                state, knobs = apply_changes(changes, state, knobs)
                left = torch.isin(state.rows, taken.rows.to(device)).nonzero()[:, 0]
                state, here = state.select(left), here.select(left)
                level = taken.noise_level.to(device)
                raw = model.denoise_at(level, state.canvas, here, self_cond=state.self_cond, frozen=state.frozen)
                prediction, canvas = shape(raw, state, knobs), taken.next_canvas.to(device).long()
                written = torch.where(taken.accepted.to(device), prediction.log_prob(canvas).double(), 0.0)
                total = total.index_add(0, state.rows, written.sum(1))
                time = clock(plan.noise, knobs.temperature, state.step + 1, state.num_steps)
                state = replace(state, canvas=canvas, open=taken.open.to(device), self_cond=prediction, **time)
        return total

    @typed
    def moment(self, model: Denoiser, *, block: int = 0, step: int = 0, cache: Cache | None = None) -> Moment:
        """Rebuild the state before step `step` of a block, by running from the block's start.

        It includes rows that finished in the step before. Rows that finished earlier have left the batch. To continue
        from a changed state, use `fork(..., state=...)`.

        Example: `a.moment(model, step=3).state.splice(rows, b.moment(model, step=3).state.select(rows))`.
        """
        self._check_place(block, step)

        def script(place: Place, moment: Moment, record: StepRecord | None) -> Changes:
            changes = self._changes_before(place, moment)
            if place == (block, step):
                state, knobs = apply_changes(changes, moment.state, moment.knobs)
                raise _Reached(Moment(state, moment.cache, knobs))
            return changes

        try:
            self._rerun(model, cache, self._until(block), script)
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

        changes: fields of the state (with the rows of `moment`), a whole `state`, or fields of `Knobs`. `seed` applies
        from that step on. Changes that a callback made up to that step are applied again. Later ones belong to the old
        canvas, so they are repeated only if the fork changes nothing. Pass `on_step` again to keep the callback. The
        new trajectory begins with the shared steps, and can be saved, replayed and forked too.

        Example: `trajectory.fork(model, block=1, step=4, sampler=EntropyBound(bound=0.5))`.
        """
        self._check_place(block, step)
        forked = self._until(block)
        if seed is not None:
            row_seeds = arguments.read_seeds(seed, self.plan.prompt_tokens)
            seeds = self.plan.seeds.clone()
            seeds[block if step == 0 else block + 1 :] = row_seeds
            forked.plan = replace(self.plan, seeds=seeds)

        unchanged = not changes and seed is None and on_step is None

        def script(place: Place, moment: Moment, record: StepRecord | None) -> Changes:
            if place > (block, step) and not unchanged:
                return on_step(record) if on_step is not None and record is not None else None
            earlier = self._changes_before(place, moment)
            if place != (block, step):
                return earlier
            new = dict(changes)
            if seed is not None and step > 0:
                new.setdefault("seeds", row_seeds.to(moment.state.device)[moment.state.rows])
            return _merge(earlier, new)

        return self._rerun(model, cache, forked, script)

    def difference(self, other: "Trajectory") -> str | None:
        """Describe where two trajectories first differ; None if they are equal bit for bit.

        Example: `a.difference(b)` may be "block 0, step 3, row 1: canvas".
        """
        for mine, theirs in zip(self.steps, other.steps, strict=False):
            where = f"block {mine.block}, step {mine.index}"
            if (mine.block, mine.index) != (theirs.block, theirs.index) or not torch.equal(mine.rows, theirs.rows):
                return f"{where}: the unfinished rows"
            for name in _COLUMNS:
                differs = ~_same(getattr(mine, name), getattr(theirs, name)).flatten(1).all(1)
                if bool(differs.any()):
                    return f"{where}, row {int(mine.rows[differs][0])}: {name}"
        for one, another in zip(self.commits, other.commits, strict=False):
            if not torch.equal(one.tokens, another.tokens) or not torch.equal(one.steps, another.steps):
                return f"block {one.block}: the committed tokens"
        if len(self) != len(other) or len(self.commits) != len(other.commits):
            return f"the end: {len(self)} steps versus {len(other)}"
        return None

    def _rerun(self, model: Denoiser, cache: Cache | None, again: "Trajectory", script: "Script") -> "Generation":
        """Run the rest of the plan of `again` and append it there. `script` returns the changes before each step."""
        self._check_model(model, cache)
        plan = replace(again.plan, knobs=self._knobs_at(len(again.commits))).to(model.device)

        def on_start(moment: Moment) -> Changes:
            place = (len(again.commits), 0)
            changes = script(place, moment, None)
            again._add_change(place, changes, moment)
            return changes

        def on_step(record: StepRecord) -> Changes:
            block, index = again._place()
            return script((block, index + 1), Moment(record.state, record.cache, record.knobs), record)

        past = list(again.commits)
        events = run_plan(model, plan, None if cache is None else cache.clone(), past=past, on_start=on_start)
        return drain(events, on_step=on_step, trajectory=again)

    def _spread(self, name: str, absent: Any) -> Tensor:
        """A column over all steps and rows, (steps, B, ...)."""
        columns = [getattr(step, name) for step in self.steps]
        if not columns:
            return torch.full((0, self.batch_size), absent)
        spread = torch.full((len(columns), self.batch_size, *columns[0].shape[1:]), absent, dtype=columns[0].dtype)
        for i, (step, column) in enumerate(zip(self.steps, columns, strict=True)):
            spread[i, step.rows.long()] = column
        return spread

    def _place(self) -> "Place":
        """The block of the next recorded step, and its place there."""
        block = len(self.commits)
        return block, self.steps[-1].index + 1 if self.steps and self.steps[-1].block == block else 0

    def _until(self, block: int) -> "Trajectory":
        """A new trajectory with everything before `block`."""
        beginning = Trajectory(self.plan, top=self.top)
        beginning.steps = [recorded for recorded in self.steps if recorded.block < block]
        beginning.commits = self.commits[:block]
        beginning.changes = [change for change in self.changes if change.block < block]
        return beginning

    def _add_change(
        self, place: "Place", changes: Changes, moment: Moment, written: Mapping[str, Any] | None = None
    ) -> None:
        values = _merge(dict(written or {}), list_changes(changes, moment.state, moment.knobs))
        if values:
            self.changes.append(Change(block=place[0], index=place[1], values=tree_map(_on_cpu, values)))

    def _changes_before(self, place: "Place", moment: Moment) -> dict[str, Any]:
        """The changes before the step at `place`, on the device of the run."""
        values: dict[str, Any] = {}
        for change in self.changes:
            if (change.block, change.index) == place:
                values = _merge(values, change.values)
        return tree_map(lambda x: x.to(moment.state.device) if isinstance(x, Tensor) else x, values)

    def _knobs_at(self, block: int) -> Knobs:
        """The knobs at the start of a block."""
        knobs = self.plan.knobs
        for change in self.changes:
            if change.block < block:
                knobs = replace(knobs, **knob_changes(change.values))
        return knobs

    def _check_place(self, block: int, step: int) -> None:
        if not any((recorded.block, recorded.index) == (block, step) for recorded in self.steps):
            counts = [sum(recorded.block == b for recorded in self.steps) for b in range(self._place()[0] + 1)]
            raise ValueError(
                f"Trajectory block and step must name a recorded step, got block {block}, step {step}. "
                f"The recorded steps per block are {[count for count in counts if count]}."
            )

    def _check_model(self, model: Denoiser, cache: Cache | None) -> None:
        check_denoiser("Trajectory", model)
        plan, config = self.plan, model.config
        if cache is not None and not hasattr(cache, "lengths"):
            raise ValueError(f"Trajectory cache must come from encode, got {show(cache)}.")
        missing = find_unknown((plan, self.changes))
        if missing is not None:
            fix = f"Pass it: Trajectory.load(path, classes=[{missing.name}])."
            if missing.fields is None:
                fix = "Only its name was saved. Make it a frozen dataclass and record the run again."
            raise ValueError(f"This trajectory was made with {missing.name}, which this process does not know. {fix}")
        if (plan.canvas_len, plan.noise.vocab_size) != (config.canvas_length, config.vocab_size):
            raise ValueError(
                f"This trajectory needs a model with canvas_length {plan.canvas_len} and vocab_size "
                f"{plan.noise.vocab_size}, got {config.canvas_length} and {config.vocab_size}."
            )
        if (plan.num_cached is None) != (cache is None) or (
            cache is not None
            and plan.num_cached is not None
            and not torch.equal(plan.num_cached.cpu(), cache.lengths.cpu())
        ):
            had = "no cache" if plan.num_cached is None else f"a cache of {plan.num_cached.tolist()} tokens per row"
            got = "none" if cache is None else f"one of {cache.lengths.tolist()}"
            raise ValueError(
                f"This trajectory began with {had}, got {got}. Pass a clone taken before the run, or None."
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class Generation(Output):
    """The result of `generate`. tokens (B, P + N) and new_tokens (B, N); steps (B, blocks) counts forwards."""

    trajectory: Trajectory | None


def drain(
    events: Events, *, on_step: OnStep | None, trajectory: Trajectory | None = None, progress: bool = False
) -> Generation:
    """Run a stream to its end, pass the changes of `on_step` back into it, and record into `trajectory`."""
    changes: Changes = None
    progress = progress and not getattr(on_step, "shows_progress", False)  # a live view replaces the bar
    with progress_bar(desc="denoising", unit="step", show=progress) as bar:
        while True:
            try:
                event = events.send(changes)
            except StopIteration as finished:
                return Generation(**vars(finished.value), trajectory=trajectory)
            changes = None
            if isinstance(event, StepRecord):
                bar.update()
                before = snapshot(event.state) if trajectory is not None and on_step is not None else None
                changes = on_step(event) if on_step is not None else None
                if trajectory is not None:
                    trajectory.add_step(event, changes, before=before)
            elif trajectory is not None:
                trajectory.add_commit(event)


Place = tuple[int, int]  # a block, and a step's place in it
Script = Callable[[Place, Moment, StepRecord | None], Changes]


class _Reached(Exception):
    """Ends a rerun at the requested moment."""

    def __init__(self, moment: Moment) -> None:
        self.moment = moment


def _refuse_difference(difference: str) -> NoReturn:
    raise RuntimeError(
        f"The replay differs from the run at {difference}. Use the same weights, dtype, device and versions."
    )


def _merge(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Combine two sets of changes; later changes replace earlier ones."""
    if "state" in later:  # the new state already includes the earlier changes of the state
        earlier = knob_changes(earlier)
    if later.keys() & {"canvas", "frozen"}:  # canvas and frozen determine `open`
        earlier = {name: value for name, value in earlier.items() if name != "open"}
    return {**earlier, **later}


def _on_cpu(value: Any) -> Any:
    value = value.logits if isinstance(value, Prediction) else value
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _same(left: Tensor, right: Tensor) -> Tensor:
    if left.shape != right.shape:
        return torch.zeros(len(left), 1, dtype=torch.bool)
    same = left == right
    return (same | (left.isnan() & right.isnan()) if left.is_floating_point() else same).reshape(len(left), -1)
