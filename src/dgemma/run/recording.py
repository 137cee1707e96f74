"""Recording of a run: every step's canvas, decisions and certainty, with the run's plan and the changes to it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dgemma.checks import as_int, require, typed
from dgemma.diffusion.prediction import Prediction, Top
from dgemma.diffusion.state import DenoiseState
from dgemma.run import stored
from dgemma.run.changes import Changes, knob_changes, list_changes, list_in_place, merge_changes
from dgemma.run.knobs import Knobs
from dgemma.run.plan import Plan
from dgemma.run.records import COLUMNS, BlockCommit, Change, Moment, RecordedStep, StepRecord

StepPlace = tuple[int, int]  # a block, and a step's place in it


class Recording:
    """The part of a `Trajectory` that needs no model: recorded steps, committed blocks and changes, and their file."""

    def __init__(self, plan: Plan, *, top: int = 5) -> None:
        require(isinstance(plan, Plan), "Trajectory.plan", "come from read_plan", plan)
        fits = as_int(top) is not None and 0 <= top <= plan.noise.vocab_size
        require(fits, "Trajectory.top", f"be in [0, {plan.noise.vocab_size}]", top)
        self.plan, self.top = plan, int(top)
        self.steps: list[RecordedStep] = []
        self.commits: list[BlockCommit] = []
        self.changes: list[Change] = []

    def add_step(self, record: StepRecord, changes: Changes = None, *, untouched: DenoiseState | None = None) -> None:
        """Record a step, and the changes after it.

        untouched: a `snapshot` of the state as the step left it. Pass it if a callback may have changed the state.
        """
        in_place = {} if untouched is None else list_in_place(untouched, record.state)
        after = record.state if untouched is None else untouched
        none = record.entropy.new_empty(*record.canvas.shape, 0)
        top = record.prediction.top(self.top) if self.top else Top(none, none)
        values = {"next_canvas": after.canvas, "done": after.done, "draft": after.draft, "open": after.open}
        values |= {"top_tokens": top.tokens, "top_probabilities": top.probabilities}
        columns = {}
        for name, column in COLUMNS.items():
            is_small = column.most == "V" and self.plan.noise.vocab_size <= 2**15
            tensor = values[name] if name in values else getattr(record, name)
            columns[name] = tensor.detach().to(torch.int16 if is_small else column.dtypes[-1]).cpu()
        block, index = self.place()
        self.steps.append(RecordedStep(block=block, index=index, **columns))
        self._add_change((block, index + 1), changes, Moment(record.state, record.cache, record.knobs), in_place)

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
        require(name in COLUMNS, "Trajectory.array name", f"be one of {', '.join(COLUMNS)}", name)
        kind = getattr(self.steps[0], name).dtype if self.steps else torch.int64
        absent = False if kind == torch.bool else float("nan") if kind.is_floating_point else -1
        return self._spread(name, absent)

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
        counts = [commit.steps if commit.forwards is None else commit.forwards for commit in self.commits]
        return torch.cat([none, *(count[:, None] for count in counts)], dim=1)

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
        stored.save(path, {**content, "commits": self.commits, "changes": self.changes})

    @classmethod
    @typed
    def load(cls, path: str | Path, *, classes: Iterable[type] = ()) -> Self:
        """Read a trajectory. To replay or fork a run that used your own classes, pass these in `classes`.

        Example: `Trajectory.load("run.safetensors", classes=[MySampler]).replay(model)`.
        """
        content = stored.load(path, classes)
        trajectory = cls(content["plan"], top=content["top"])
        trajectory.commits, trajectory.changes = list(content["commits"]), list(content["changes"])
        columns = {name: tensor.split([s[2] for s in content["sizes"]]) for name, tensor in content["steps"].items()}
        for i, (block, index, _) in enumerate(content["sizes"]):
            tensors = {name: column[i] for name, column in columns.items()}
            trajectory.steps.append(RecordedStep(block=block, index=index, **tensors))
        return trajectory

    def difference(self, other: "Recording") -> str | None:
        """Describe where two trajectories first differ; None if they are equal bit for bit.

        Example: `a.difference(b)` may be "block 0, step 3, row 1: canvas".
        """
        for mine, theirs in zip(self.steps, other.steps, strict=False):
            where = f"block {mine.block}, step {mine.index}"
            if (mine.block, mine.index) != (theirs.block, theirs.index) or not torch.equal(mine.rows, theirs.rows):
                return f"{where}: the unfinished rows"
            for name in COLUMNS:
                differs = ~_same(getattr(mine, name), getattr(theirs, name)).flatten(1).all(1)
                if bool(differs.any()):
                    return f"{where}, row {int(mine.rows[differs][0])}: {name}"
        for one, another in zip(self.commits, other.commits, strict=False):
            if not torch.equal(one.tokens, another.tokens) or not torch.equal(one.steps, another.steps):
                return f"block {one.block}: the committed tokens"
        if len(self) != len(other) or len(self.commits) != len(other.commits):
            return f"the end: {len(self)} steps versus {len(other)}"
        return None

    def _spread(self, name: str, absent: Any) -> Tensor:
        """A column over all steps and rows, (steps, B, ...)."""
        columns = [getattr(step, name) for step in self.steps]
        if not columns:
            return torch.full((0, self.batch_size), absent)
        spread = torch.full((len(columns), self.batch_size, *columns[0].shape[1:]), absent, dtype=columns[0].dtype)
        for i, (step, column) in enumerate(zip(self.steps, columns, strict=True)):
            spread[i, step.rows.long()] = column
        return spread

    def place(self) -> StepPlace:
        """The block of the next recorded step, and its place there."""
        block = len(self.commits)
        return block, self.steps[-1].index + 1 if self.steps and self.steps[-1].block == block else 0

    def _until(self, block: int) -> Self:
        """A new recording with everything before `block`."""
        beginning = type(self)(self.plan, top=self.top)
        beginning.steps = [recorded for recorded in self.steps if recorded.block < block]
        beginning.commits = self.commits[:block]
        beginning.changes = [change for change in self.changes if change.block < block]
        return beginning

    def _add_change(
        self, place: StepPlace, changes: Changes, moment: Moment, written: Mapping[str, Any] | None = None
    ) -> None:
        listed = list_changes(changes, moment.state, moment.knobs)
        values = merge_changes(dict(written or {}), listed, moment.knobs)
        if values:
            self.changes.append(Change(block=place[0], index=place[1], values=tree_map(_on_cpu, values)))

    def _changes_before(self, place: StepPlace, moment: Moment) -> dict[str, Any]:
        """The changes before the step at `place`, on the device of the run."""
        values: dict[str, Any] = {}
        for change in self.changes:
            if (change.block, change.index) == place:
                values = merge_changes(values, change.values, moment.knobs)
        return tree_map(lambda x: x.to(moment.state.device) if isinstance(x, Tensor) else x, values)

    def _knobs_at(self, block: int) -> Knobs:
        """The knobs at the start of a block."""
        knobs = self.plan.knobs
        for change in self.changes:
            if change.block < block:
                knobs = replace(knobs, **knob_changes(change.values, knobs))
        return knobs


def _on_cpu(value: Any) -> Any:
    value = value.logits if isinstance(value, Prediction) else value
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _same(left: Tensor, right: Tensor) -> Tensor:
    if left.shape != right.shape:
        return torch.zeros(len(left), 1, dtype=torch.bool)
    same = left == right
    return (same | (left.isnan() & right.isnan()) if left.is_floating_point() else same).reshape(len(left), -1)
