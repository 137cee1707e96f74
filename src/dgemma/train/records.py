"""What passes between the training loop and those around it: an objective's terms, a step, a result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dgemma.model.diffusion import DiffusionGemma
from dgemma.train.batch import TrainBatch
from dgemma.train.feed import Part
from dgemma.train.log import TrainLog
from dgemma.train.parallel import Parallel


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What an objective measured: of each named term, every row's sum (B,) and how many positions it is over (B,).

    Example: `objective(model, batch, seeds=seeds).sums["decoder"]`.
    """

    sums: Mapping[str, Tensor]
    counts: Mapping[str, Tensor]


class Measure(Protocol):
    """What is minimised. A function of the model, the rows and their seeds: it draws nothing else.

    `total_counts` says, before any forward, how many positions each term of these rows will have; `reduce` makes the
    scalar. Given the totals of the whole step it returns these rows' part, so that the parts of all micro-batches and
    processes add up to the loss of the whole batch.
    """

    def __call__(self, model: DiffusionGemma, batch: TrainBatch, *, seeds: Tensor) -> Terms: ...
    def total_counts(self, batch: TrainBatch, seeds: Tensor) -> Mapping[str, Tensor]: ...
    def reduce(self, terms: Terms, totals: Mapping[str, Tensor] | None = None) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A training step just taken, as `on_step` sees it; a denoising step's is `dgemma.StepRecord`.

    Tensors are on the device: reading one waits for the step to finish.
    """

    step: int  # steps taken, this one included
    lr: float
    loss: Tensor  # (), this process's part
    grad_norm: Tensor  # (), before clipping
    sums: Mapping[str, Tensor]  # of each term, by row of this process: (B,)
    counts: Mapping[str, Tensor]
    parts: list[Part]  # the micro-batches
    num_tokens: int


def make_lines(records: Sequence[StepRecord], parallel: Parallel) -> list[dict[str, Any]]:
    """What the log says of each step, summed over all processes: the one place where steps are waited for."""
    names = list(records[0].sums)
    numbers, norms = [], []
    for record in records:
        totals = [values[name].sum() for values in (record.sums, record.counts) for name in names]
        numbers.append(torch.stack([x.double() for x in (record.loss, *totals)]))
        norms.append(record.grad_norm.double())
    fetched = torch.cat((parallel.sum(torch.stack(numbers)), torch.stack(norms)[:, None]), dim=1).tolist()
    lines = []
    for record, (loss, *values, grad_norm) in zip(records, fetched, strict=True):
        sums, counts = values[: len(names)], values[len(names) :]
        means = {f"loss/{n}": s / c if c else s for n, s, c in zip(names, sums, counts, strict=True)}
        lines.append({"step": record.step, "loss": loss, **means, "grad_norm": grad_norm, "lr": record.lr})
    return lines


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A run that ended or was interrupted; the model holds its last weights, or their average if one was kept.

    Example: `train(...).plot("loss.png")`.
    """

    step: int  # steps taken in all
    num_new_steps: int  # of them, by this call: 0 if it found the run finished
    interrupted: bool
    checkpoint: Path  # the last one, from which the same call goes on
    final: Path | None  # what `from_pretrained` or `load_lora` reads; None if interrupted
    log: TrainLog
    averaged: bool  # whether the model now holds the average of its weights
    tokens_per_second: float  # of this call, over all processes, saving and evaluating left out
    evaluation: Mapping[str, float] = field(default_factory=dict)  # the last

    def plot(self, path: str | Path | None = None) -> Any:
        """The loss against the step, as a matplotlib figure."""
        return self.log.plot(path)
