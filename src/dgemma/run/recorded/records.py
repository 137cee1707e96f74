"""Records of steps and changes as a trajectory keeps them: on the CPU, in small types."""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from dgemma.checks import short_repr


class Column(NamedTuple):
    """The form of a column: a letter per dimension, its dtypes, and its least and greatest value; see `stored.py`."""

    dims: str
    dtypes: tuple[torch.dtype, ...]  # a file may have any of them; the last one is written
    least: float | None = None
    most: float | str | None = None


INTS = (torch.int64, torch.int16, torch.int32)
_TokenColumn = Annotated[Tensor, Column("RC", INTS, 0, "V")]  # written in int16 if the vocabulary is small
_FlagColumn = Annotated[Tensor, Column("RC", (torch.bool,))]


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedStep:
    """One step of R unfinished rows, C positions and k candidates, on the CPU in small types."""

    block: int
    index: int  # the step's place in its block, from 0: the `step` of `at`, `moment` and `fork`
    rows: Annotated[Tensor, Column("R", INTS, 0, "B")]  # row numbers in the batch
    # the step number used in random draws; above `index` if the run began at a lower level
    step: Annotated[Tensor, Column("R", (torch.int64,))]
    seeds: Annotated[Tensor, Column("R", (torch.int64,))]
    temperature: Annotated[Tensor, Column("R", (torch.float32,), 0, 1e9)]
    noise_level: Annotated[Tensor, Column("R", (torch.float64,), 0, 1)]
    done: Annotated[Tensor, Column("R", (torch.bool,))]  # after the step
    canvas: _TokenColumn  # before the step
    next_canvas: _TokenColumn  # after it
    draft: _TokenColumn  # the commit if the canvas ended after this step
    argmax: _TokenColumn
    accepted: _FlagColumn
    renoised: _FlagColumn
    open: _FlagColumn  # after the step
    entropy: Annotated[Tensor, Column("RC", (torch.float32,), 0, 1e9)]  # nats
    confidence: Annotated[Tensor, Column("RC", (torch.float32,), 0, 1)]
    top_tokens: Annotated[Tensor, Column("RCK", INTS, 0, "V")]  # best first
    top_probabilities: Annotated[Tensor, Column("RCK", (torch.float16,), 0, 1)]

    __repr__ = short_repr


COLUMNS: dict[str, Column] = {
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
