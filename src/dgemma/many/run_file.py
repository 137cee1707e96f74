"""The file of a long run: JSON lines that survive a kill. A second run with the same settings continues it."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from dgemma.checks import Words, require
from dgemma.files import open_file, writing

with suppress(ImportError):  # not on Windows
    import fcntl

_Result = TypeVar("_Result")
_FORMAT = "dgemma run 1"
_LONGEST_HEADER = 1 << 24  # bytes


class RunFile:
    """A file whose first line holds the settings of a run, and every other line the result of one prompt.

    A line is appended by one write and flushed to the disk. If the process is killed, only the last line can be
    incomplete; it is dropped when the file is opened again. Only one process can have the file open; Windows
    does not enforce this.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = Path(path), json.loads(json.dumps(settings))
        self._places: dict[int, int] = {}  # the offset of each result
        self._end = 0
        with writing(self.path):
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def __contains__(self, index: int) -> bool:
        return index in self._places

    def append(self, result: Mapping[str, Any]) -> None:
        """Append the result of prompt `result["index"]`. It is on the disk when this returns."""
        assert result["index"] not in self
        place = self._end
        self._write(result)
        self._places[result["index"]] = place

    def read(self, index: int, build: Callable[[dict[str, Any]], _Result]) -> _Result:
        """Return `build` of a stored result. If that raises, the line is damaged, and the error says so."""
        with open_file(self.path) as file:
            file.seek(self._places[index])
            line = file.readline()
        try:
            return build(json.loads(line))
        except (KeyError, TypeError, ValueError):
            rule = f"hold complete results, got something else for index {index}"
            raise ValueError(f"{self.path} must {rule}. Remove its line; it is then done again.") from None

    def _lock(self) -> None:
        if os.name != "posix":
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{self.path} must be written by one process, but another one has it open.") from None

    def _read(self) -> None:
        """Check the settings, note the place of every result, and drop an incomplete last line."""
        start = json.dumps({"format": _FORMAT})[:-1].encode()
        with open_file(self.path) as lines:
            header = lines.readline(_LONGEST_HEADER)
            if not header or (header.startswith(start) and not header.endswith(b"\n")):
                self._file.truncate(0)  # the file is new, or the process was killed in its first write
                self._write({"format": _FORMAT, "settings": self.settings})
                return
            self._check(header)
            self._end = len(header)
            for number, line in enumerate(lines, start=2):
                if not line.endswith(b"\n"):
                    break
                index = _index_of(line)
                rule, fix = "hold one result per line, each with its own index", "Remove it; its prompt is done again."
                fits = index is not None and index not in self
                require(fits, str(self.path), rule, Words(f"something else in line {number}"), fix)
                self._places[cast(int, index)] = self._end
                self._end += len(line)
        self._file.truncate(self._end)

    def _check(self, header: bytes) -> None:
        try:
            first = json.loads(header)
            known, before = first["format"] == _FORMAT, dict(first["settings"])
        except (ValueError, KeyError, TypeError, RecursionError):
            known = False
        if not known:
            raise ValueError(f"{self.path} must be a new file, or one that this run began. Choose another name.")
        for name in sorted(before.keys() | self.settings.keys()):
            old, new = before.get(name), self.settings.get(name)
            if old != new:
                rule = f"be continued with the settings that it began with, got {name} {new!r} instead of {old!r}"
                raise ValueError(f"{self.path} must {rule}. Use the old setting, or another file.")

    def _write(self, line: Mapping[str, Any]) -> None:
        data = json.dumps(line, ensure_ascii=False).encode("utf-8", errors="replace") + b"\n"
        written = 0
        with writing(self.path):
            try:
                while written < len(data):
                    written += self._file.write(data[written:]) or 0
                os.fsync(self._file.fileno())
            except OSError:  # a full disk
                self._file.truncate(self._end)
                raise
        self._end += len(data)


def _index_of(line: bytes) -> int | None:
    """Return the index of a result, or None if the line holds none."""
    try:
        index = json.loads(line)["index"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return index if isinstance(index, int) and index >= 0 else None
