"""The record of a run: each step's numbers, the router load, the log file `log.jsonl`, and the result."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dgemma.checks import short_repr
from dgemma.files import open_file, write_text, writing
from dgemma.model.experts import Router, Routing
from dgemma.train.batch import MicroBatch
from dgemma.train.parallel import Parallel

if sys.platform != "win32":
    import resource


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """A training step, as `on_step` receives it.

    Tensors are on the device: reading one waits for the step to finish.

    Example: `train(..., on_step=lambda record: record.step == 100)` stops after 100 steps.
    """

    step: int  # number of steps taken, this one included
    lr: float
    loss: Tensor  # (), this process's part
    grad_norm: Tensor  # (), before clipping
    sums: Mapping[str, Tensor]  # per term, the sum of each row of this process (B,)
    counts: Mapping[str, Tensor]  # per term, the number of scored positions of each row (B,)
    parts: list[MicroBatch]  # the micro-batches

    __repr__ = short_repr

    @property
    def num_tokens(self) -> int:
        """Number of tokens of this process's rows, without padding."""
        return sum(length for part in self.parts for _, length in part.batch.spans or ())


OnTrainStep = Callable[[TrainStep], bool | Mapping[str, Any] | None]  # True stops the run; a mapping is logged


def make_lines(records: Sequence[TrainStep], parallel: Parallel) -> list[dict[str, Any]]:
    """Return the log line of each step, summed over all processes. The host waits for the device only here."""
    names = list(records[0].sums)
    numbers, norms = [], []
    for record in records:
        totals = [values[name].sum() for values in (record.sums, record.counts) for name in names]
        numbers.append(torch.stack([x.double() for x in (record.loss, *totals)]))
        norms.append(record.grad_norm.double())
    values_of_steps = torch.cat((parallel.sum(torch.stack(numbers)), torch.stack(norms)[:, None]), dim=1).tolist()
    lines = []
    for record, (loss, *values, grad_norm) in zip(records, values_of_steps, strict=True):
        sums, counts = values[: len(names)], values[len(names) :]
        columns = [name if "/" in name else f"loss/{name}" for name in names]  # "run/reward" is no loss
        means = {n: s / c if c else s for n, s, c in zip(columns, sums, counts, strict=True)}
        lines.append({"step": record.step, "loss": loss, **means, "grad_norm": grad_norm, "lr": record.lr})
    return lines


def peak_gb(device: torch.device) -> float:
    """Return the peak memory so far in GB: of tensors on a GPU, or of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    if sys.platform == "win32":
        return 0.0  # unknown
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


@dataclass(frozen=True)
class TrainLog:
    """The log of a run, one JSON object per line.

    Every step has a line with loss, "loss/TERM", gradient norm and learning rate. Every `log_every` steps it also has
    the throughput, the peak memory and the router load. The numbers of `evaluate` are lines with "evaluation/NAME".

    Example: `steps, losses = TrainLog(Path("run/log.jsonl")).column("loss")`.
    """

    path: Path

    def lines(self) -> list[dict[str, Any]]:
        """Return all lines up to the first damaged one, such as an incomplete one that a killed process left."""
        if not self.path.exists():
            return []
        lines = []
        with open_file(self.path) as file:
            for text in file:
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError):
                    break
                if not isinstance(line, dict) or type(line.get("step")) is not int:
                    break
                lines.append(line)
        return lines

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        with writing(self.path), self.path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def cut(self, last_step: int) -> None:
        """Remove the lines after `last_step`, because a resumed run writes them again."""
        lines = [line for line in self.lines() if line["step"] <= last_step]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in lines))

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps that have `name`, and its values there."""
        lines = [line for line in self.lines() if name in line]
        return [line["step"] for line in lines], [line[name] for line in lines]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A finished or interrupted run. The model has the last weights, or their average with `ema_decay`.

    Example: `steps, losses = train(...).log.column("loss")`.
    """

    step: int  # number of steps in total
    num_new_steps: int  # number of steps in this call; 0 if the run was finished before
    interrupted: bool
    checkpoint: Path  # the last one, from which the same call continues
    final: Path | None  # for `from_pretrained` or `load_lora`; None if interrupted
    log: TrainLog
    tokens_per_second: float  # in this call, over all processes, without saving and evaluating
    evaluation: Mapping[str, float] = field(default_factory=dict)  # the last one


class RouterLoad:
    """Counts how often each expert is chosen, per layer, also in compiled layers."""

    def __init__(self, model: nn.Module) -> None:
        self.routers: list[Any] = [module for module in model.modules() if isinstance(module, Router)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count within the context."""
        handles = []
        for router in self.routers:
            # The counts are a buffer and the hook is always the same function. So layers that were compiled in an
            # earlier context count in this one too.
            scale = router.per_expert_scale  # may be spread over processes; each process counts its own tokens
            counts = torch.zeros(scale.shape, dtype=torch.int64, device=scale.device)
            router.register_buffer("load", counts, persistent=False)
            handles.append(router.register_forward_hook(_count))
        self.loads = [router.load for router in self.routers]
        try:
            yield
        finally:
            for router, handle in zip(self.routers, handles, strict=True):
                handle.remove()
                del router.load

    def counts(self) -> Tensor:
        """Return the number of choices of each expert since the last reset: (L, E) int64."""
        return torch.stack(self.loads)

    def reset(self) -> None:
        """Set the counts to zero."""
        for load in self.loads:
            load.zero_()


def summary(counts: Tensor) -> list[dict[str, Any]]:
    """Return, per layer of counts (L, E), each expert's share of the choices, and the evenness.

    The evenness is the entropy of the shares over log E; it is 1 if all experts are chosen equally often.
    """
    shares = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
    most = math.log(counts.shape[1])
    evenness = torch.special.entr(shares).sum(1) / most if most else torch.ones(len(counts))
    return [{"evenness": one, "load": load} for one, load in zip(evenness.tolist(), shares.tolist(), strict=True)]


def _count(router: Any, inputs: Any, routing: Routing) -> None:
    if len(inputs) == 1:  # otherwise with known choices, which an earlier pass has counted
        expert = torch.arange(len(router.load), device=router.load.device)
        router.load.add_((routing.experts.reshape(1, -1) == expert[:, None]).sum(1))
