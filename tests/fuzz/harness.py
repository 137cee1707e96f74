"""Runs seeded cases in forked workers and counts their outcomes.

Bad outcomes are crashes, hangs, excessive memory, executed code of a file, errors that the library did not raise on
purpose, damaged files that it accepted, and unsafe output.

A case is a family's name and a seed. A worker that dies or hangs costs one case; the next worker continues after it.
"""

import ast
import faulthandler
import functools
import gc
import inspect
import mmap
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import dgemma

HANG_SECONDS = 60.0  # of one case; the slowest takes about one second on an idle core
BATCH = 500  # cases of a worker
MEMORY_FACTOR = 10  # a case may allocate this many times its file
MEMORY_SLACK = 128 << 20  # bytes for a tiny model and for the imports of a worker's first command
ADDRESS_SLACK = 3 << 30  # bytes of address space for a worker beyond what it has after its fork
PYTHONS_OWN = ("missing a required argument", "unexpected keyword argument", "required keyword", "positional argument")

LIBRARY = str(Path(dgemma.__file__).parent) + os.sep
BAD = ("crash", "hang", "memory", "executed", "raw", "silent", "unsafe output")


class Silent(Exception):
    """Raised by a family if a damaged file was accepted although its checksum must reveal it."""


class UnsafeOutput(Exception):
    """Raised by a family if a command printed a traceback or a raw control character."""


@dataclass(frozen=True)
class Family:
    """A kind of case. `prepare(folder)` makes what all cases share; `attempt(context, random, folder)` is one case.

    `attempt` may return the number of bytes of the file that it loaded, which bounds the memory it may take.
    """

    name: str
    prepare: Callable[[Path], Any]
    attempt: Callable[[Any, random.Random, Path], int | None]
    weight: int = 1  # relative number of cases
    others_errors: tuple[type[BaseException], ...] = ()  # errors of Python and torch that are clear enough for users


@dataclass
class Counts:
    """Outcomes by family, and the cases of every bad kind."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    examples: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def add(self, family: str, seed: int, outcome: str, note: str) -> None:
        self.outcomes.setdefault(family, Counter())[outcome] += 1
        if outcome in BAD:
            self.examples.setdefault((family, outcome), []).append(f"seed {seed}: {note}")

    def total(self, outcome: str) -> int:
        return sum(counter[outcome] for counter in self.outcomes.values())

    def table(self) -> str:
        kinds = ["accepted", "refused", *BAD]
        rows = [["family", "cases", *kinds]]
        for name, counter in sorted(self.outcomes.items()):
            rows.append([name, str(counter.total()), *(str(counter[kind]) for kind in kinds)])
        total = sum(counter.total() for counter in self.outcomes.values())
        rows.append(["all", str(total), *(str(self.total(kind)) for kind in kinds)])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def run_families(families: list[Family], num_cases: int, *, first_seed: int = 0) -> Counts:
    """Run `num_cases` cases, shared among the families by weight."""
    counts = Counts()
    total_weight = sum(family.weight for family in families)
    for family in families:
        share = max(1, round(num_cases * family.weight / total_weight))
        with tempfile.TemporaryDirectory(prefix="dgemma-fuzz-") as folder:
            shared = Path(folder) / "shared"
            shared.mkdir()
            context = family.prepare(shared)
            seed, end = first_seed, first_seed + share
            while seed < end:
                seed = _run_worker(family, context, Path(folder), seed, min(seed + BATCH, end), counts)
        print(f"{family.name}: {dict(counts.outcomes[family.name])}", file=sys.stderr, flush=True)
    return counts


def _run_worker(family: Family, context: Any, folder: Path, seed: int, end: int, counts: Counts) -> int:
    """Run cases in a forked process until `end`, or until it dies; return the next seed."""
    fork = multiprocessing.get_context("fork")
    reader, writer = fork.Pipe(duplex=False)
    process = fork.Process(target=_work, args=(family, context, folder, range(seed, end), writer))
    process.start()
    writer.close()
    what = "crash"
    try:
        while seed < end:
            if not reader.poll(HANG_SECONDS):
                what = "hang"
                break
            counts.add(family.name, *reader.recv())
            seed += 1
    except EOFError:  # the process has ended
        process.join()
    process.kill()
    process.join()
    if seed == end:
        return end
    counts.add(family.name, seed, what, f"exit status {process.exitcode}")
    return seed + 1


def _work(family: Family, context: Any, folder: Path, seeds: range, results: Connection) -> None:
    faulthandler.disable()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SLACK,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    canary = folder / "executed"
    os.environ["DGEMMA_FUZZ_CANARY"] = str(canary)
    for seed in seeds:
        own = folder / "case"
        os.chdir(folder)
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        os.chdir(own)  # so that an odd relative path such as "x" leads into this folder
        outcome, note = _attempt(family, context, random.Random(f"{family.name} {seed}"), own)
        if canary.exists():
            canary.unlink()
            outcome = "executed"
        results.send((seed, outcome, note[:300]))


def _attempt(family: Family, context: Any, source: random.Random, folder: Path) -> tuple[str, str]:
    before = _peak_bytes()
    size, outcome, note = 0, "accepted", ""
    try:
        size = family.attempt(context, source, folder) or 0
    except Silent as error:
        outcome, note = "silent", str(error)
    except UnsafeOutput as error:
        outcome, note = "unsafe output", str(error)
    except MemoryError as error:
        outcome, note = "memory", f"MemoryError: {error}"
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        if "can't allocate memory" in text or "not enough memory" in text:
            outcome, note = "memory", text
        elif is_sentence(error) or isinstance(error, family.others_errors):
            outcome, note = "refused", text
        else:
            *_, place = frames = traceback.extract_tb(error.__traceback__)
            calls = [frame.name for frame in frames if frame.filename.startswith(LIBRARY)]
            note = f"{text} | {'>'.join(calls[-4:])} | {Path(place.filename).name}:{place.lineno}"
            outcome = "raw"
        size = getattr(error, "num_bytes", 0)
    grown = _peak_bytes() - before
    if outcome in ("accepted", "refused") and grown > MEMORY_SLACK + MEMORY_FACTOR * size:
        outcome, note = "memory", f"{grown >> 20} MiB"
        gc.collect()
    return outcome, note


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def is_sentence(error: BaseException) -> bool:
    """Return True if dgemma raised the error on purpose, or if Python refused arguments that do not fit a signature."""
    if isinstance(error, SystemExit):
        return True
    if isinstance(error, TypeError) and any(words in str(error) for words in PYTHONS_OWN):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return False
    frame, line = frames[-1]
    path = frame.f_code.co_filename
    return path.startswith(LIBRARY) and line in _raise_lines(path) and not isinstance(error, AssertionError)


@functools.cache
def _raise_lines(path: str) -> frozenset[int]:
    """Return the lines of a source that belong to raise statements."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, ast.Raise) and node.exc is not None:
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return frozenset(lines)


def signature_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters, without *args and **kwargs."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind not in kinds]
