"""The steps of a trajectory as it keeps them, and its file: one safetensors file, without pickle.

Classes are stored as names and fields, booleans as bits. Everything that is read is checked before it is used.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from dgemma.checks import as_int, check_types, require, require_tensor, short_repr
from dgemma.files import open_tensors, parse_json, write_tensors
from dgemma.run.arguments import MOST_STEPS
from dgemma.run.plan import Plan
from dgemma.run.records import BlockCommit
from dgemma.values import describe_value, find_unknown, rebuild_value


class Form(NamedTuple):
    """The form of a tensor or number in a file: a letter per dimension, its dtypes, and its least and greatest value.

    "B" is the batch, "R" the rows of all steps together, "L" blocks, "C" positions of a canvas, "K" candidates, "V" the
    vocabulary, and "." any size. A greatest value of "B" or "V" is the largest row number or token.
    """

    dims: str
    dtypes: tuple[torch.dtype, ...] = ()  # a file may have any of them; the last one is written
    least: float | None = None
    most: float | str | None = None


INTS, _LONG, _BOOL = (torch.int64, torch.int16, torch.int32), (torch.int64,), (torch.bool,)
_TokenColumn = Annotated[Tensor, Form("RC", INTS, 0, "V")]  # written in int16 if the vocabulary is small
_FlagColumn = Annotated[Tensor, Form("RC", _BOOL)]


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedStep:
    """One step of R unfinished rows, C positions and k candidates, on the CPU in small types."""

    block: int
    index: int  # the step's place in its block, from 0: the `step` of `at`, `moment` and `fork`
    rows: Annotated[Tensor, Form("R", INTS, 0, "B")]  # row numbers in the batch
    # the step number used in random draws; above `index` if the run began at a lower level
    step: Annotated[Tensor, Form("R", _LONG)]
    seeds: Annotated[Tensor, Form("R", _LONG)]
    temperature: Annotated[Tensor, Form("R", (torch.float32,), 0, 1e9)]
    noise_level: Annotated[Tensor, Form("R", (torch.float64,), 0, 1)]
    done: Annotated[Tensor, Form("R", _BOOL)]  # after the step
    canvas: _TokenColumn  # before the step
    next_canvas: _TokenColumn  # after it
    draft: _TokenColumn  # the commit if the canvas ended after this step
    argmax: _TokenColumn
    accepted: _FlagColumn
    renoised: _FlagColumn
    open: _FlagColumn  # after the step
    entropy: Annotated[Tensor, Form("RC", (torch.float32,), 0, 1e9)]  # nats
    confidence: Annotated[Tensor, Form("RC", (torch.float32,), 0, 1)]
    top_tokens: Annotated[Tensor, Form("RCK", INTS, 0, "V")]  # best first
    top_probabilities: Annotated[Tensor, Form("RCK", (torch.float16,), 0, 1)]

    __repr__ = short_repr


COLUMNS: dict[str, Form] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(RecordedStep, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """Changes by a callback or a fork before step `index` of a block: fields of the state and knobs, by name."""

    block: int
    index: int
    values: dict[str, Any]


_KIND, _HEADER, _ROUNDING = "trajectory", "dgemma", 1e-3  # the metadata entry _HEADER holds all but the tensors
_PLAN = {
    "num_blocks": Form("", (), 1, 1 << 31),
    "num_steps": Form("", (), 1, MOST_STEPS),
    "canvas_len": Form("", (), 1, 1 << 31),
    "pad_token_id": Form("", (), 0, "V"),
    "first_block": Form("", (), 0, 1 << 62),
    "noise_level": Form("", (), 1e-300, 1),
    "prompt_tokens": Form("B.", INTS, 0, "V"),
    "attention_mask": Form("B."),
    "num_cached": Form("B", INTS),
    "text_len": Form("B", INTS),
    "seeds": Form("LB", _LONG),
    "span.canvas": Form("B.", _LONG, -1, "V"),
    "span.frozen": Form("B.", _BOOL),
    "span.awaited": Form("B.", _BOOL),
    "span.allowed": Form("..V", _BOOL),
}
_COMMIT = {
    "tokens": Form("BC", INTS, 0, "V"),
    "finished": Form("B", _BOOL),
    "steps": Form("B", INTS),
    "forwards": Form("B", INTS),
}


def write_file(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write `content` to `path` atomically: an interrupted save leaves the old file. `Trajectory.save` calls it."""
    tensors: dict[str, Tensor] = {}
    header = {"kind": _KIND, "content": describe_value(dict(content), tensors)}
    write_tensors(path, tensors, metadata={_HEADER: json.dumps(header)})


def read_file(path: str | Path, classes: Iterable[type] = ()) -> dict[str, Any]:
    """Return what `write_file` wrote. Other classes than those of dgemma are built if they are in `classes`."""
    with open_tensors(path) as file:
        header = parse_json((file.metadata() or {}).get(_HEADER, "{}"), f"the header of {path}")
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    if header.get("kind") != _KIND:
        raise ValueError(f"{path} must be a {_KIND} file of dgemma, got another safetensors file.")
    try:
        content: dict[str, Any] = rebuild_value(header.get("content"), tensors, classes)
        _check(**content)
    except Exception as error:  # a part of a wrong type may lead to any error
        raise ValueError(f"{path} is not a complete {_KIND} file of this version of dgemma: {error}") from None
    return content


def _check(
    *,
    plan: Plan,
    top: int,
    sizes: tuple[tuple[int, int, int], ...],
    steps: dict[str, Tensor],
    commits: tuple[BlockCommit, ...],
    changes: tuple[Change, ...],
) -> None:
    """Raise unless this is what `Trajectory.save` writes: sizes, ranges, and how the parts fit together."""
    missing = find_unknown(plan.noise)
    if missing is not None:
        raise ValueError(f"its noise is a {missing.name}, which this process does not know. Pass it in classes=[...].")
    for part in (plan, plan.span, *commits, *changes):
        check_types(part)  # `rebuild_value` omits this where a part is unknown, such as a user's sampler
    numbers = {"B": plan.batch_size, "L": plan.num_blocks, "C": plan.canvas_len, "V": plan.noise.vocab_size, "K": top}
    _check_values("plan", plan, _PLAN, numbers)
    _check_plan(plan)
    places, num_rows = [size[:2] for size in sizes], [size[2] for size in sizes]
    fits = all(type(number) is int for size in sizes for number in size)
    for (block, step), place in pairwise([(-1, 0), *places]):
        fits = fits and place in ((block, step + 1), (block + 1, 0))
    fits = fits and all(0 <= block < plan.num_blocks and 0 <= step < plan.num_steps for block, step in places)
    fits = fits and all(1 <= number <= plan.batch_size for number in num_rows)
    require(fits, "sizes", "be a block, a step and a number of rows, in order", sizes)
    fits = steps.keys() == (COLUMNS.keys() if sizes else set())
    fits = fits and all(isinstance(column, Tensor) for column in steps.values())
    require(fits, "steps", "be the recorded columns", steps)
    if steps:
        _check_values("steps", steps, COLUMNS, {**numbers, "R": sum(num_rows)})
        in_order = all(bool((rows.diff() > 0).all()) for rows in steps["rows"].split(num_rows))
        require(in_order, "steps.rows", "ascend within a step", steps["rows"])
    fits = [commit.block for commit in commits] == list(range(min(len(commits), plan.num_blocks)))
    require(fits, "commits", f"be at most {plan.num_blocks} blocks in order", commits)
    for commit in commits:
        _check_values("commits", commit, _COMMIT, numbers)
    for change in changes:
        # A subclass of the state may have other fields. So only a replay, which knows the state, checks the names.
        fits = 0 <= change.block < plan.num_blocks and 0 <= change.index <= plan.num_steps
        require(fits and "state" not in change.values, "changes", "belong to a step of the run", change)


def _check_plan(plan: Plan) -> None:
    """Check how the parts of a plan fit together."""
    prompt, span, mask = plan.prompt_tokens, plan.span, plan.attention_mask
    num_positions = plan.num_blocks * plan.canvas_len
    fits = prompt.shape[0] > 0 and (prompt.shape[1] > 0 or plan.num_cached is not None)
    fits = fits and (mask is None or (mask.shape[1] >= prompt.shape[1] and not mask.is_complex()))
    require(fits, "plan.prompt_tokens", "have a row, a token or a cache, and a mask of their length", prompt)
    stops = all(as_int(stop) is not None for stop in plan.eos_token_ids)
    require(stops, "plan.eos_token_ids", "be 64-bit integers", plan.eos_token_ids)
    fits = all(1 <= table.shape[1] <= num_positions for table in vars(span).values() if table is not None)
    fits = fits and (span.allowed is None or span.allowed.shape[0] in (1, plan.batch_size))
    fits = fits and (span.frozen is None or (span.canvas is not None and span.canvas.shape == span.frozen.shape))
    require(fits, "plan.span", f"have rows of 1 to {num_positions} positions, and a canvas under frozen", span)


def _check_values(owner: str, values: Any, table: Mapping[str, Form], sizes: Mapping[str, int]) -> None:
    """Check the tensors and numbers of a dictionary or a dataclass against a table; None is absent."""
    for name, (dims, dtypes, least, most) in table.items():
        value = values
        for part in name.split("."):
            value = value[part] if isinstance(value, Mapping) else getattr(value, part)
        if dims and value is not None:
            shape = tuple(sizes.get(letter) for letter in dims)
            rule = f"be {dtypes[-1] if dtypes else 'a tensor'} {shape}"
            require_tensor(value, f"{owner}.{name}", rule, shape=shape, dtypes=dtypes or None)
        if least is not None and value is not None and (not dims or value.numel()):
            highest: Any = sizes[most] - 1 if isinstance(most, str) else most
            found = value if dims else torch.tensor(value, dtype=torch.float64)
            slack = _ROUNDING if dims and value.is_floating_point() else 0
            fits = float(found.min()) >= least - slack and float(found.max()) <= highest + slack  # NaN does not fit
            require(fits, f"{owner}.{name}", f"be in [{least:g}, {highest:g}]", value)
