"""The folder of a run: its lock, and checkpoints `step-000100` that are complete or absent, even after a kill.

Each checkpoint has a description of its run, which a resumed run must match.
"""

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from dgemma.checks import as_number, require, show
from dgemma.files import clear_temporaries, crc32_of, flush, read_json, write_json, writing
from dgemma.printing import printable
from dgemma.train.config import TrainConfig
from dgemma.train.parallel import Parallel, load_state, save_parts, stored_names
from dgemma.values import identify

_RUN_FILE = "run.json"
_LOCK_FILE = ".lock"
# Settings that may differ when a run is resumed, because they change no computed number.
_FREE_FIELDS = {"log_every", "checkpoint_every", "evaluate_every", "keep_last", "progress"}
_FREE_SWITCHES = {"foreach", "fused", "capturable", "differentiable"}  # of optimizers
_ABSENT = "absent"
_OTHER_MODEL = "Continue the run with the model and the settings that it began with, or choose another folder."


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make a folder and hold its lock, until the process ends for any reason; its thread may take the lock again."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with writing(folder / _LOCK_FILE):
            lock = FileLock(folder.resolve() / _LOCK_FILE, timeout=0, is_singleton=True).acquire()
    except Timeout:
        raise ValueError(
            f"train out must be a folder that no other run is using, got {folder}. Wait for that run, or choose "
            "another folder."
        ) from None
    with lock:
        yield


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of one run, in `folder`; only the last `keep_last` stay.

    A checkpoint is written as `.step-000100.new`, flushed to the disk and renamed. An old one is renamed to
    `.step-000100.old` before it is deleted. So a folder called `step-…` was complete when it got that name. `run.json`
    stores the CRC-32 of its files, which reveals later damage.
    """

    folder: Path
    keep_last: int
    parallel: Parallel

    def steps(self) -> list[int]:
        """Return the saved steps in ascending order."""
        names = (path.name.removeprefix("step-") for path in self.folder.glob("step-*") if path.is_dir())
        return sorted(int(name) for name in names if name.isdecimal())

    def path(self, step: int) -> Path:
        """Return the folder of a step."""
        return self.folder / f"step-{step:06d}"

    def latest(self) -> Path | None:
        """Return the folder of the last step, or None."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def clear_unfinished(self) -> None:
        """Remove folders that a killed process left half written or half deleted."""
        if self.parallel.is_main:
            clear_temporaries(self.folder)
            for remnant in (*self.folder.glob(".step-*.new"), *self.folder.glob(".step-*.old")):
                shutil.rmtree(remnant)
        self.parallel.barrier()

    def save(self, step: int, state: Mapping[str, Tensor], run: Mapping[str, Any]) -> Path:
        """Write named tensors and a description of the run; return the folder. All processes call this.

        If the disk is full, the unfinished folder is removed and the earlier checkpoints stay.
        """
        final, new = self.path(step), self.folder / f".step-{step:06d}.new"
        try:
            with writing(final):
                self._write(final, new, state, run)
        except OSError:
            if self.parallel.is_main:
                shutil.rmtree(new, ignore_errors=True)
            raise
        if self.parallel.is_main:
            for old in self.steps()[: -self.keep_last]:
                last = self.folder / f".{self.path(old).name}.old"
                os.rename(self.path(old), last)
                shutil.rmtree(last)
        self.parallel.barrier()
        return final

    def _write(self, final: Path, new: Path, state: Mapping[str, Tensor], run: Mapping[str, Any]) -> None:
        if self.parallel.is_main:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
        self.parallel.barrier()
        path = save_parts(new, state, rank=self.parallel.rank, world_size=self.parallel.world_size)
        files = self.parallel.collect({path.name: crc32_of(path)})
        if self.parallel.is_main:
            write_json(new / _RUN_FILE, {**run, "files": files})
            os.rename(new, final)
            flush(self.folder)

    def read_run(self, path: Path) -> dict[str, Any]:
        """Return the description saved with a checkpoint."""
        try:
            run = read_json(path / _RUN_FILE)
        except (OSError, ValueError) as error:
            raise ValueError(self._damaged(path, str(error).rstrip("."))) from None
        step, files, planned = run.get("step"), run.get("files"), run.get("planned steps")
        fits = type(step) is int and self.path(step).name == path.name and isinstance(planned, int | None)
        are_files = isinstance(files, dict) and all(Path(name).name == name == printable(name) for name in files)
        fits = fits and are_files and bool(files)
        seconds = as_number(run.get("seconds", 0.0))
        if not fits or seconds is None or not 0 <= seconds < math.inf:
            raise ValueError(self._damaged(path, f"{_RUN_FILE} has a wrong step, files or time plan"))
        return run

    def names(self, path: Path) -> set[str]:
        """Return the names of the tensors in a checkpoint."""
        try:
            return stored_names(path)
        except ValueError as error:
            raise ValueError(self._damaged(path, str(error))) from None

    def load(self, path: Path, state: Mapping[str, Tensor]) -> None:
        """Overwrite these tensors with the checkpoint's, all of them or none. All processes call this."""
        self._check_files(path)
        missing = sorted(state.keys() - self.names(path))
        if missing:
            raise ValueError(f"{path} has no tensor {missing[0]} ({len(missing)} are missing). {_OTHER_MODEL}")
        try:
            load_state(path, state)
        except OSError as error:
            raise ValueError(self._damaged(path, str(error))) from None
        except ValueError as error:  # a shape differs
            raise ValueError(f"{path} belongs to another model: {error}. {_OTHER_MODEL}") from None

    def _check_files(self, path: Path) -> None:
        """Raise ValueError if a file has changed since it was written. Each process reads its share of the files."""
        files = self.read_run(path)["files"]
        rank, world_size = self.parallel.rank, self.parallel.world_size
        changes = [
            number % world_size == rank and not _is_unchanged(path / name, crc32)
            for number, (name, crc32) in enumerate(files.items())
        ]
        num_changes = self.parallel.sum(torch.tensor(changes, dtype=torch.int64)).tolist()
        for name, num in zip(files, num_changes, strict=True):
            if num:
                raise ValueError(self._damaged(path, f"{name} has changed since it was written"))

    def _damaged(self, path: Path, why: str) -> str:
        before = [step for step in self.steps() if step < int(path.name.removeprefix("step-"))]
        fallback = f"continue from {self.path(before[-1]).name}" if before else "begin again"
        return f"{path} must be a complete checkpoint, but {why}. Delete that folder to {fallback}."


def _is_unchanged(path: Path, crc32: Any) -> bool:
    try:
        return crc32_of(path) == crc32
    except (OSError, ValueError):
        return False


def describe_config(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that a resumed run must keep."""
    return {name: value for name, value in identify(config).items() if name not in _FREE_FIELDS}


def refuse_changes(now: Mapping[str, Any], then: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError with the first difference between a resumed run's description and the one it began with."""
    before, after, field = {name: then.get(name, _ABSENT) for name in now}, now, "train"
    while isinstance(before, Mapping) and isinstance(after, Mapping) and before != after:
        name = next(key for key in {**before, **after} if before.get(key, _ABSENT) != after.get(key, _ABSENT))
        before, after, field = before.get(name, _ABSENT), after.get(name, _ABSENT), f"{field} {name}"
    fix = "Choose another folder, or pass allow_changes=True (--allow-changes)."
    require(before == after, field, f"stay {show(before)}, as in the run in {folder}", after, fix)


def describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the class and the settings of the groups. Call it before the first step changes their learning rates."""
    groups = [
        {name: identify(value) for name, value in group.items() if name not in _FREE_SWITCHES | {"params"}}
        for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__qualname__, **{f"group {n}": group for n, group in enumerate(groups)}}
