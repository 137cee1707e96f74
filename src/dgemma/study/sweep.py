"""Comparison of samplers on one task: quality, speed, paired differences, and the area under a curve of quality."""

import csv
import io
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgemma.checks import require
from dgemma.files import write_text
from dgemma.intervals import Estimate, mean_of
from dgemma.many.run_file import RunFile
from dgemma.printing import progress_bar
from dgemma.sampling.base import Sampler
from dgemma.values import identify, label

# (sampler, seed) → (quality, result); `sweep` describes both
Task = Callable[[Any, int], tuple[float | Tensor, Any]]

_COLUMNS = ("sampler", "quality", "± error", "tokens/forward", "forwards", "seconds", "runs")


class SweepExample(NamedTuple):
    """One example of one run: `example` is its place among the values that the task returned."""

    label: str
    seed: int
    example: int
    quality: float
    tokens_per_forward: float
    forwards: float


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """Means of one sampler over all rows of all runs; `error` is the standard error of quality, NaN for one value.

    tokens_per_forward is new tokens without padding, divided by the forwards of a row until it finished. `forwards` is
    the mean per row, `seconds` the mean per run. `examples` holds the values that the means are over.
    """

    label: str
    quality: float
    error: float
    tokens_per_forward: float
    forwards: float
    seconds: float
    runs: int
    examples: tuple[SweepExample, ...] = field(default=(), repr=False)

    @property
    def family(self) -> str:
        """The label up to its first comma or bracket: rows that share it differ in settings only."""
        return re.split(r"[,(]", self.label, maxsplit=1)[0].strip()

    @property
    def setting(self) -> str:
        """The label after its family, without brackets."""
        return self.label[len(self.family) :].strip(" ,").removeprefix("(").removesuffix(")")

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a Markdown table."""
        error = "" if self.error != self.error else f"{self.error:.4f}"
        numbers = (f"{self.quality:.4f}", error, f"{self.tokens_per_forward:.2f}", f"{self.forwards:.1f}")
        label = self.label.replace("|", "\\|").replace("<", "&lt;")
        return (label, *numbers, f"{self.seconds:.2f}", str(self.runs))


@dataclass(frozen=True)
class Sweep:
    """The result of `sweep`: rows in the order of the samplers. A notebook shows it as a table."""

    rows: tuple[SweepRow, ...]

    def __getitem__(self, name: str) -> SweepRow:
        """Return the row with this label."""
        return {row.label: row for row in self.rows}[name]

    @property
    def frontier(self) -> tuple[SweepRow, ...]:
        """The Pareto frontier of quality and tokens per forward, fastest last."""
        best: list[SweepRow] = []
        for row in sorted(self.rows, key=lambda row: (-row.tokens_per_forward, -row.quality)):
            if not best or row.quality > best[-1].quality:
                best.append(row)
        return tuple(reversed(best))

    @property
    def families(self) -> dict[str, tuple[SweepRow, ...]]:
        """The rows of each family, slowest first."""
        found: dict[str, list[SweepRow]] = {}
        for row in self.rows:
            found.setdefault(row.family, []).append(row)
        return {name: tuple(sorted(rows, key=lambda row: row.tokens_per_forward)) for name, rows in found.items()}

    def compare(self, first: str, second: str, *, confidence: float = 0.95) -> Estimate:
        """Return the quality of `first` minus that of `second`, paired by example, with an interval.

        An example is a row of the task's result. Its quality is the mean over seeds, and the interval is over examples.
        A task that returns one number per run is paired by seed. Pairing removes the spread between examples, so the
        interval is usually narrower than without pairs.

        Example: `print(result.compare("Threshold(tau=0.9)", "Confidence()"))` is "-0.0156 ± 0.0312".
        """
        pairs = [_by_example(self[name].examples) for name in (first, second)]
        fits = pairs[0].keys() == pairs[1].keys() and len(pairs[0]) > 0
        require(fits, "Sweep.compare", "get two samplers that ran on the same examples", [first, second])
        return mean_of([pairs[0][example] - pairs[1][example] for example in pairs[0]], confidence)

    def aup(self, *, alpha: float = 3.0, drop: float = 0.05) -> dict[str, float]:
        """Return the accuracy under parallelism of each family (AUP, arXiv:2601.07568), in tokens per forward.

        It is the area under the curve of quality (a share in [0, 1]) against tokens per forward. From 0 to the slowest
        point, the curve is flat at that point's unweighted quality. After it, quality y is weighted by
        exp(-alpha (1 - y / best)), where `best` is the highest quality of the sweep. Points whose quality is more than
        `drop` below that of the slowest do not count. The paper counts in percent: multiply by 100.

        Example: `result.aup()["EntropyBound"]`.
        """
        qualities = [row.quality for row in self.rows]
        best, fits = max(qualities), min(qualities) >= 0 and 0 < max(qualities) <= 1
        fix = "Let the task return shares."
        require(fits, "Sweep.aup", "have qualities in [0, 1], and one above 0", qualities, fix)
        areas = {}
        for name, rows in self.families.items():
            kept = [row for row in rows if row.quality >= rows[0].quality - drop]
            weighed = [row.quality * math.exp(-alpha * (1 - row.quality / best)) for row in kept]
            speeds = [row.tokens_per_forward for row in kept]
            trapezoids = ((speeds[i] - speeds[i - 1]) * (weighed[i] + weighed[i - 1]) / 2 for i in range(1, len(kept)))
            areas[name] = speeds[0] * kept[0].quality + sum(trapezoids)
        return areas

    def to_markdown(self) -> str:
        """Return a Markdown table."""
        lines = [_COLUMNS, ("---",) * len(_COLUMNS), *(row.cells() for row in self.rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def to_csv(self, path: str | Path | None = None, *, per_example: bool = False) -> str:
        """Return the numbers in full precision, one line per sampler or per example; write them to `path` if given."""
        names: Sequence[str] = [f.name for f in fields(SweepRow) if f.name != "examples"]
        lines: list[Any] = [[getattr(row, name) for name in names] for row in self.rows]
        if per_example:
            names, lines = SweepExample._fields, [example for row in self.rows for example in row.examples]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(lines)
        if path is not None:
            write_text(path, text.getvalue())
        return text.getvalue()

    _repr_markdown_ = to_markdown


def sweep(
    task: Task,
    samplers: Mapping[str, Any] | Sequence[Any],
    *,
    seeds: Iterable[int] = (0,),
    out: str | Path | None = None,
    progress: bool = True,
) -> Sweep:
    """Run `task(sampler, seed)` for every sampler and seed. A task returns a quality and the result of its run.

    Quality is one number, or one per example (B,). The result is that of `generate`, `infill`, or anything with `steps`
    and `tokens_per_forward`; or a list of such results, as from `generate_many`. `samplers` is a list, or a dictionary
    by name. In a list, the name is the class with the fields that differ from their defaults. The task gets a sampler
    unchanged, so any value works.

    `out` is a file of JSON lines, one per run. A second call with the same arguments continues after a kill.

    Example:
        def task(sampler, seed):
            out = dgemma.generate(model, prompts, sampler=sampler, seed=seed)
            return (out.new_tokens == answers).all(1).float(), out
        sweep(task, [EntropyBound(bound=b) for b in (0.05, 0.1, 0.5)], seeds=range(4))
    """
    require(not isinstance(samplers, Sampler), "sweep samplers", "be a list", samplers, "Write [sampler].")
    named = dict(samplers) if isinstance(samplers, Mapping) else {label(sampler): sampler for sampler in samplers}
    fix = "Pass a dictionary with names as keys."
    require(len(named) == len(samplers), "sweep samplers", "differ from one another", list(named), fix)
    seeds = list(seeds)
    fits = len(named) > 0 and len(seeds) > 0
    require(fits, "sweep", "get at least one sampler and one seed", (len(named), len(seeds)))
    settings = {"samplers": {name: identify(sampler) for name, sampler in named.items()}, "seeds": seeds}
    rows = []
    runs = progress_bar(total=len(named) * len(seeds), desc="sweep", unit="run", show=progress)
    with runs, nullcontext() if out is None else RunFile(out, settings) as file:
        for place, (name, sampler) in enumerate(named.items()):
            outcomes = []
            for seed_place, seed in enumerate(seeds):
                index = place * len(seeds) + seed_place
                if file is not None and index in file:
                    outcome = file.read(index, lambda line: _RunOutcome(**line["outcome"]))
                else:
                    outcome = _run(task, sampler, seed)
                    if file is not None:
                        file.append({"index": index, "sampler": name, "outcome": outcome._asdict()})
                outcomes.append(outcome)
                runs.update()
            rows.append(_summarise(name, outcomes))
    return Sweep(tuple(rows))


class _RunOutcome(NamedTuple):
    seed: int
    quality: list[float]
    tokens_per_forward: list[float]
    forwards: list[float]
    seconds: float


def _run(task: Task, sampler: Any, seed: int) -> _RunOutcome:
    start = time.perf_counter()
    result = task(sampler, seed)
    is_pair = isinstance(result, tuple) and len(result) == 2
    parts = [] if not is_pair else list(result[1]) if isinstance(result[1], list) else [result[1]]
    fits = len(parts) > 0 and all(hasattr(part, "tokens_per_forward") and hasattr(part, "steps") for part in parts)
    require(fits, "sweep task", "return (quality, generation)", result, "Return the result of generate.")
    speeds = [torch.as_tensor(part.tokens_per_forward, dtype=torch.float64).reshape(-1) for part in parts]
    steps = [torch.as_tensor(part.steps, dtype=torch.float64) for part in parts]
    forwards = [count.reshape(len(speed), -1).sum(1) for count, speed in zip(steps, speeds, strict=True)]
    return _RunOutcome(
        seed=seed,
        quality=torch.as_tensor(result[0], dtype=torch.float64).reshape(-1).tolist(),
        tokens_per_forward=torch.cat(speeds).tolist(),
        forwards=torch.cat(forwards).tolist(),
        seconds=time.perf_counter() - start,
    )


def _summarise(name: str, outcomes: Sequence[_RunOutcome]) -> SweepRow:
    quality = [value for outcome in outcomes for value in outcome.quality]
    return SweepRow(
        label=name,
        quality=fmean(quality),
        error=stdev(quality) / len(quality) ** 0.5 if len(quality) > 1 else float("nan"),
        tokens_per_forward=fmean(value for outcome in outcomes for value in outcome.tokens_per_forward),
        forwards=fmean(value for outcome in outcomes for value in outcome.forwards),
        seconds=fmean(outcome.seconds for outcome in outcomes),
        runs=len(outcomes),
        examples=tuple(example for outcome in outcomes for example in _examples(name, outcome)),
    )


def _examples(name: str, outcome: _RunOutcome) -> list[SweepExample]:
    """The values of each example. A task with one quality for all rows has one example, with their mean speed."""
    speeds, forwards = outcome.tokens_per_forward, outcome.forwards
    if len(outcome.quality) != len(speeds):
        speeds, forwards = [fmean(speeds)] * len(outcome.quality), [fmean(forwards)] * len(outcome.quality)
    values = zip(outcome.quality, speeds, forwards, strict=True)
    return [SweepExample(name, outcome.seed, number, *each) for number, each in enumerate(values)]


def _by_example(examples: Sequence[SweepExample]) -> dict[tuple[int, int], float]:
    """The mean quality of each example over seeds; a task with one value per run has one example per seed."""
    single = max((example.example for example in examples), default=0) == 0
    found: dict[tuple[int, int], list[float]] = {}
    for example in examples:
        found.setdefault((example.seed if single else 0, example.example), []).append(example.quality)
    return {key: fmean(values) for key, values in found.items()}
