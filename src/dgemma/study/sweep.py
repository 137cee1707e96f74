"""Comparison of samplers on one task: a table of quality, speed and forwards."""

import csv
import html
import io
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from dgemma.files import write_text
from dgemma.progress import progress_bar
from dgemma.run.trajectory import Generation
from dgemma.sampling.base import Sampler
from dgemma.values import label

Task = Callable[[Any, int], tuple[float | Tensor, Generation]]

_COLUMNS = ("sampler", "quality", "± error", "tokens/forward", "forwards", "seconds", "runs")


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """Means of one sampler over all rows of all runs; `error` is the standard error of quality, NaN for one value.

    tokens_per_forward is new tokens without padding, divided by the forwards of a row until it finished. `forwards` is
    the mean per row, `seconds` the mean per run.
    """

    label: str
    quality: float
    error: float
    tokens_per_forward: float
    forwards: float
    seconds: float
    runs: int

    def cells(self) -> tuple[str, ...]:
        error = "" if self.error != self.error else f"{self.error:.4f}"
        numbers = (f"{self.quality:.4f}", error, f"{self.tokens_per_forward:.2f}", f"{self.forwards:.1f}")
        return (self.label, *numbers, f"{self.seconds:.2f}", str(self.runs))


@dataclass(frozen=True)
class Sweep:
    """The result of `sweep`: rows in the order of the samplers. A notebook shows it as a table."""

    rows: tuple[SweepRow, ...]

    @property
    def frontier(self) -> tuple[SweepRow, ...]:
        """The rows that no other row beats in both quality and tokens per forward, fastest last."""
        best: list[SweepRow] = []
        for row in sorted(self.rows, key=lambda row: (-row.tokens_per_forward, -row.quality)):
            if not best or row.quality > best[-1].quality:
                best.append(row)
        return tuple(reversed(best))

    def to_markdown(self) -> str:
        """Return a Markdown table."""
        lines = [_COLUMNS, ("---",) * len(_COLUMNS), *(row.cells() for row in self.rows)]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return the numbers in full precision, one line per sampler; write them to `path` if given."""
        text = io.StringIO()
        names = [field.name for field in fields(SweepRow)]
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in self.rows)
        if path is not None:
            write_text(path, text.getvalue())
        return text.getvalue()

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in _COLUMNS)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row.cells()) + "</tr>" for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def sweep(
    task: Task, samplers: Mapping[str, Any] | Sequence[Any], *, seeds: Iterable[int] = (0,), progress: bool = True
) -> Sweep:
    """Run `task(sampler, seed)` for every sampler and seed. A task returns a quality and the result of `generate`.

    Quality is one number, or one per row (B,). `samplers` is a list, or a dictionary by name. In a list, the name is
    the class with the fields that differ from their defaults. The task gets a sampler unchanged, so any value works.

    Example:
        def task(sampler, seed):
            out = dgemma.generate(model, prompts, sampler=sampler, seed=seed)
            return (out.new_tokens == answers).all(1).float(), out
        sweep(task, [EntropyBound(bound=b) for b in (0.05, 0.1, 0.5)], seeds=range(4))
    """
    if isinstance(samplers, Sampler):
        raise ValueError(f"sweep samplers must be a list, got one {type(samplers).__name__}. Write [sampler].")
    named = dict(samplers) if isinstance(samplers, Mapping) else _name(samplers)
    seeds = list(seeds)
    if not named or not seeds:
        raise ValueError(f"sweep needs at least one sampler and one seed, got {len(named)} and {len(seeds)}.")
    rows = []
    runs = progress_bar(total=len(named) * len(seeds), desc="sweep", unit="run", show=progress)
    with runs:
        for name, sampler in named.items():
            outcomes = []
            for seed in seeds:
                outcomes.append(_run(task, sampler, seed))
                runs.update()
            rows.append(_summarise(name, outcomes))
    return Sweep(tuple(rows))


@dataclass(frozen=True)
class _Outcome:
    quality: list[float]
    tokens_per_forward: list[float]
    forwards: list[float]
    seconds: float


def _run(task: Task, sampler: Any, seed: int) -> _Outcome:
    start = time.perf_counter()
    result = task(sampler, seed)
    if not (isinstance(result, tuple) and len(result) == 2 and hasattr(result[1], "tokens_per_forward")):
        raise ValueError(
            f"sweep task must return (quality, generation), got {type(result).__name__}. Return the result of generate."
        )
    quality = torch.as_tensor(result[0], dtype=torch.float64).reshape(-1).tolist()
    generation = result[1]
    return _Outcome(
        quality=quality,
        tokens_per_forward=generation.tokens_per_forward.tolist(),
        forwards=generation.steps.reshape(len(generation.tokens_per_forward), -1).sum(1).tolist(),
        seconds=time.perf_counter() - start,
    )


def _summarise(name: str, outcomes: Sequence[_Outcome]) -> SweepRow:
    quality = [value for outcome in outcomes for value in outcome.quality]
    return SweepRow(
        label=name,
        quality=fmean(quality),
        error=stdev(quality) / len(quality) ** 0.5 if len(quality) > 1 else float("nan"),
        tokens_per_forward=fmean(value for outcome in outcomes for value in outcome.tokens_per_forward),
        forwards=fmean(value for outcome in outcomes for value in outcome.forwards),
        seconds=fmean(outcome.seconds for outcome in outcomes),
        runs=len(outcomes),
    )


def _name(samplers: Sequence[Any]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for sampler in samplers:
        name = label(sampler)
        if name in named:
            raise ValueError(
                f"sweep samplers must differ from one another, got {name} twice. Pass a dictionary with names as keys."
            )
        named[name] = sampler
    return named
