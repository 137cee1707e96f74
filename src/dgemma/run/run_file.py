"""The file of a long run: JSON lines that survive a kill. A second run with the same settings continues it."""

import json
import os
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dgemma.files import open_file, writing

with suppress(ImportError):  # not on Windows
    import fcntl

_FORMAT = "dgemma run 1"
_ABSENT = -1
_LONGEST_HEADER = 1 << 24  # bytes
_MOST_MISSING = 1 << 20  # largest number of unfinished prompts before a finished one


class RunFile:
    """A file whose first line holds the settings of a run, and every other line the result of one prompt.

    A line is appended by one write and flushed to the disk. If the process is killed, only the last line can be
    incomplete; it is dropped when the file is opened again. Only one process can have the file open; Windows
    does not enforce this.

    Example: `with RunFile("run.jsonl", {"seed": 0}) as file: file.append({"index": 0, "text": "hi"})`.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = Path(path), json.loads(json.dumps(settings))
        self._places = array("q")  # the offset of each prompt's line; eight bytes per prompt
        with writing(self.path):
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115
        try:
            self._lock()
            self._end = self._read(self.settings)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, result: Mapping[str, Any]) -> None:
        """Append the result of prompt `result["index"]`. It is on the disk when this returns."""
        assert result["index"] not in self
        place = self._end
        self._write(result)
        self._note(result["index"], place)

    def __contains__(self, index: int) -> bool:
        return index < len(self._places) and self._places[index] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        """Yield the prompts that have a result."""
        return (index for index, place in enumerate(self._places) if place != _ABSENT)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read the result of a prompt."""
        self._file.seek(self._places[index])
        line: dict[str, Any] = json.loads(_read_line(self._file))
        return line

    def _lock(self) -> None:
        if os.name != "posix":
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"{self.path} must be written by one process, but another one has it open. Wait for it, or choose "
                "another file."
            ) from None

    def _read(self, settings: dict[str, Any]) -> int:
        """Check the settings, note the place of every result, drop an incomplete last line, and return the end."""
        with open_file(self.path) as lines:
            header = lines.readline(_LONGEST_HEADER)
            if not header.endswith(b"\n") and not _starts_header(header):
                raise ValueError(self._foreign())
            if not header.endswith(b"\n"):  # the file is new, or the process was killed in its first write
                self._file.truncate(0)
                self._end = 0
                self._write({"format": _FORMAT, "settings": settings})
                return self._end
            self._check(header, settings)
            end = len(header)
            for number, line in enumerate(lines, start=2):
                index = _index_of(line)
                if index is not None and index > number + _MOST_MISSING:  # no run has so many unfinished prompts
                    index = None
                if index is None and line.endswith(b"\n"):
                    raise ValueError(
                        f"{self.path} must hold one JSON object with an index per line, got something else in line "
                        f"{number}. Remove that line; its prompt is then done again."
                    )
                if index is None or not line.endswith(b"\n"):
                    break
                if index in self:
                    raise ValueError(
                        f"{self.path} must hold one result per prompt, got prompt {index} again in line {number}. "
                        "Remove one of its two lines."
                    )
                self._note(index, end)
                end += len(line)
        self._file.truncate(end)
        return end

    def _check(self, header: bytes, settings: dict[str, Any]) -> None:
        try:
            first = json.loads(header)
            before: dict[str, Any] = first["settings"]
            known = first["format"] == _FORMAT and isinstance(before, dict)
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise ValueError(self._foreign())
        for name in sorted(before.keys() | settings.keys()):
            if before.get(name) != settings.get(name):
                raise ValueError(
                    f"{self.path} must be continued with the settings that it began with, got {name} "
                    f"{settings.get(name)!r} instead of {before.get(name)!r}. Use the old setting, or another file."
                )

    def _foreign(self) -> str:
        return f"{self.path} must be a new file, or one that this run began. Choose another name."

    def _note(self, index: int, place: int) -> None:
        self._places.extend([_ABSENT] * (index + 1 - len(self._places)))
        self._places[index] = place

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


def _read_line(file: Any) -> bytes:
    """Read one line of an unbuffered file."""
    parts = []
    while True:
        part = file.read(1 << 16)
        line, newline, _ = part.partition(b"\n")
        parts.append(line)
        if newline or not part:
            return b"".join(parts)


def _index_of(line: bytes) -> int | None:
    """Return the index of a result, or None if the line holds none."""
    try:
        index = json.loads(line)["index"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return index if isinstance(index, int) and index >= 0 else None


def _starts_header(data: bytes) -> bool:
    start = json.dumps({"format": _FORMAT})[:-1].encode()
    return data.startswith(start) or start.startswith(data)
