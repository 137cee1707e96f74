"""The record of a run: each step's numbers, the router load, the log file `log.jsonl`, and the result."""

import csv
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dgemma.model.experts import Router, Routing
from dgemma.train.batch import Part
from dgemma.train.parallel import Parallel

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """A training step just taken, as `on_step` sees it; a denoising step's is `dgemma.TrainStep`.

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


OnTrainStep = Callable[[TrainStep], bool | None]  # returning True stops the run


def make_lines(records: Sequence[TrainStep], parallel: Parallel) -> list[dict[str, Any]]:
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


@dataclass(frozen=True)
class TrainLog:
    """A run's log. Every step has a line with loss, "loss/TERM", gradient norm and learning rate; every so often also
    the throughput and how evenly the routers load their experts. What `evaluate` said is a line of "evaluation/NAME".

    Example: `steps, losses = TrainLog(Path("run/log.jsonl")).column("loss")`.
    """

    path: Path

    def lines(self) -> list[dict[str, Any]]:
        """All lines; one that a killed process left unfinished does not count."""
        if not self.path.is_file():
            return []
        lines = []
        for text in self.path.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
        return lines

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        with self.path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def sync(self) -> None:
        """Bring what was written to the disk."""
        if self.path.is_file():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def cut(self, last_step: int) -> None:
        """Forget what came after `last_step`: a resumed run writes it again."""
        kept = [line for line in self.lines() if line["step"] <= last_step]
        new = self.path.with_suffix(".new")
        new.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(new, self.path)

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """The steps that have `name`, and its values there."""
        lines = [line for line in self.lines() if name in line]
        return [line["step"] for line in lines], [line[name] for line in lines]

    def to_csv(self, path: str | Path) -> None:
        """The numbers as CSV, a row a step, empty where a step has none. The routers' load is in the JSON alone.

        Example: `result.log.to_csv("run.csv")`.
        """
        rows: dict[int, dict[str, Any]] = {}  # by step: what was evaluated after it is a line of its own
        for line in self.lines():
            rows.setdefault(line["step"], {}).update(
                {k: v for k, v in line.items() if isinstance(v, int | float | str)}
            )
        names = list(dict.fromkeys(name for row in rows.values() for name in row))
        with Path(path).open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows.values())

    def plot(self, path: str | Path | None = None, *, smooth: int = 50) -> "Figure":
        """Loss and terms against the step, means over `smooth` steps; saved to `path` if one is given.

        Example: `result.log.plot("loss.png")`.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError("TrainLog.plot needs matplotlib. Install it with `pip install dgemma[plots]`.") from None
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="loss")
        names = dict.fromkeys(name for line in self.lines() for name in line if name.split("/")[0] == "loss")
        for name in names:
            steps, values = self.column(name)
            windows = (values[max(0, end - smooth) : end] for end in range(1, len(values) + 1))
            axes.plot(steps, [sum(window) / len(window) for window in windows], label=name)
        axes.legend()
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


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


class RouterLoad:
    """Counts, per layer, how often each expert is chosen; compiled layers count too.

    Example: `load = RouterLoad(model)`, then `with load.watching(): model.encode(tokens); load.counts()`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routers = [module for module in model.modules() if isinstance(module, Router)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count while inside."""
        handles = []
        for router in self.routers:
            # A buffer of the module and one function for all: what was compiled in one run then counts in the next.
            scale = router.per_expert_scale  # may be spread over processes; each counts its own tokens
            counts = torch.zeros(scale.shape, dtype=torch.int64, device=scale.device)
            router.register_buffer("load", counts, persistent=False)
            handles.append(router.register_forward_hook(_count))
        try:
            yield
        finally:
            for router, handle in zip(self.routers, handles, strict=True):
                handle.remove()
                del router.load

    def counts(self) -> Tensor:
        """Choices of each expert since the last reset: (L, E) int64."""
        return torch.stack([_load(router) for router in self.routers])

    def reset(self) -> None:
        for router in self.routers:
            _load(router).zero_()


def summary(counts: Tensor) -> list[dict[str, Any]]:
    """Of counts (L, E), per layer: each expert's share of the choices, the least and the most, and their entropy over
    log E, which is 1 when all are equally busy."""
    layers = []
    for choices in counts.tolist():
        shares = [count / max(1, sum(choices)) for count in choices]
        entropy = -sum(share * math.log(share) for share in shares if share > 0)
        evenness = entropy / math.log(len(shares)) if len(shares) > 1 else 1.0
        layers.append({"min": min(shares), "max": max(shares), "evenness": evenness, "load": shares})
    return layers


def _count(router: nn.Module, inputs: Any, routing: Routing) -> None:
    load = _load(router)
    expert = torch.arange(load.shape[0], device=load.device)
    load.add_((routing.experts.reshape(-1, 1) == expert).sum(0))


def _load(router: nn.Module) -> Tensor:
    load = router.load
    assert isinstance(load, Tensor)
    return load
