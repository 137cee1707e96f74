"""Checkpoints of a run: folders `step-000100` that are whole or not there, whenever the process dies."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dgemma.train.parallel import Parallel

_RUN_FILE = "run.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of one run, in `folder`; the last `keep_last` are kept.

    A checkpoint is written as `.step-000100.new`, brought to the disk and renamed; one that goes is renamed to
    `.step-000100.old` before it is deleted. So a folder called `step-…` is always whole.

    Example: `Checkpoints(folder=Path("run"), keep_last=2, parallel=Parallel()).latest()`.
    """

    folder: Path
    keep_last: int
    parallel: Parallel

    def steps(self) -> list[int]:
        """The steps saved, ascending."""
        found = (path.name.removeprefix("step-") for path in self.folder.glob("step-*") if path.is_dir())
        return sorted(int(step) for step in found if step.isdecimal())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def latest(self) -> Path | None:
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def clear_unfinished(self) -> None:
        """Remove what a killed process left half written or half deleted."""
        if self.parallel.is_main:
            for left in (*self.folder.glob(".step-*.new"), *self.folder.glob(".step-*.old")):
                shutil.rmtree(left)
        self.parallel.barrier()

    def save(self, step: int, state: Mapping[str, Tensor], run: Mapping[str, Any]) -> Path:
        """Write named tensors and a description of the run; called by every process."""
        final, new = self.path(step), self.folder / f".step-{step:06d}.new"
        if self.parallel.is_main:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
        self.parallel.barrier()
        self.parallel.save(new, state)
        self.parallel.barrier()
        if self.parallel.is_main:
            (new / _RUN_FILE).write_text(json.dumps(run, indent=2) + "\n")
            for path in (*new.rglob("*"), new):
                _flush(path)
            os.rename(new, final)
            _flush(self.folder)
            for old in self.steps()[: -self.keep_last]:
                self._delete(self.path(old))
        self.parallel.barrier()
        return final

    def _delete(self, path: Path) -> None:
        old = self.folder / f".{path.name}.old"
        os.rename(path, old)
        shutil.rmtree(old)

    def read_run(self, path: Path) -> dict[str, Any]:
        """The description saved with a checkpoint."""
        try:
            run = json.loads((path / _RUN_FILE).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(self._damaged(path, str(error))) from None
        if not isinstance(run, dict):
            raise ValueError(self._damaged(path, f"{_RUN_FILE} holds no object"))
        return run

    def names(self, path: Path) -> set[str]:
        """The tensors in a checkpoint."""
        try:
            return self.parallel.names(path)
        except ValueError as error:
            raise ValueError(self._damaged(path, str(error))) from None

    def load(self, path: Path, state: Mapping[str, Tensor]) -> None:
        """Overwrite these tensors with the checkpoint's, all of them or none."""
        missing = sorted(state.keys() - self.names(path))
        if missing:
            raise ValueError(
                f"{path} holds no {missing[0]} ({len(missing)} tensors are missing). Continue the run with the model "
                f"and the settings that it began with, or choose another folder."
            )
        try:
            self.parallel.load(path, state)
        except (ValueError, OSError) as error:
            raise ValueError(self._damaged(path, str(error))) from None

    def _damaged(self, path: Path, why: str) -> str:
        before = [step for step in self.steps() if self.path(step) < path]
        fallback = f"continue from {self.path(before[-1]).name}" if before else "begin again"
        return f"{path} is no whole checkpoint: {why}. Delete that folder to {fallback}."


def _flush(path: Path) -> None:
    """Bring a file's bytes, or a folder's list of names, to the disk."""
    if path.is_dir() and os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
