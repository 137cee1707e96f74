"""Documents from .txt files, whole or split at a separator, and from .jsonl files, read one at a time."""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dgemma.checks import show
from dgemma.files import open_file

_CHUNK = 1 << 20  # characters per read


class Document(NamedTuple):
    """A document: the model writes `text` after reading `prompt`."""

    text: str
    prompt: str = ""


def read_documents(paths: str | Path | Sequence[str | Path], *, separator: str | None = None) -> Iterator[Document]:
    """Yield the documents of .txt and .jsonl files; a folder means all such files in it, sorted.

    A .txt file is one document, or several with `separator` between them. A line of a .jsonl file is an object with
    "text", or with "prompt" and "answer".

    Example: `read_documents("stories.txt", separator="<|endoftext|>")`.
    """
    for path in list_files([paths] if isinstance(paths, str | Path) else paths):
        has_text = False
        try:
            for document in _read_jsonl(path) if path.suffix == ".jsonl" else _read_text(path, separator):
                has_text = True
                _check_unicode(path, document)
                yield document
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} must be UTF-8, got {error.reason}. Convert it.") from None
        if not has_text:
            raise ValueError(f"{path} must hold text, got only white space. Remove it.")


def _check_unicode(path: Path, document: Document) -> None:
    try:
        (document.prompt + document.text).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{path} must hold whole characters, got half of a surrogate pair ({error.reason}).") from None


def list_files(paths: Iterable[str | Path]) -> list[Path]:
    """Return the files of paths and folders, in reading order."""
    files: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".jsonl")) if path.is_dir() else [path]
        if not inside or not all(p.is_file() for p in inside):
            raise FileNotFoundError(
                f"{path} must be a .txt or .jsonl file or a folder of them, got none. Check the path."
            )
        files += inside
    return files


def _read_text(path: Path, separator: str | None) -> Iterator[Document]:
    if separator == "":
        raise ValueError("read_documents separator must be a non-empty string or None, got ''.")
    pieces: list[str] = []  # parts of the current document, without separators
    tail = ""  # end of the text read so far, which may be part of a separator
    with io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as file:  # drops a byte-order mark
        while chunk := file.read(_CHUNK):
            chunk = tail + chunk
            *whole, rest = [chunk] if separator is None else chunk.split(separator)
            for text in whole:
                yield from _document([*pieces, text])
                pieces = []
            cut = max(0, len(rest) - len(separator or "x") + 1)
            pieces.append(rest[:cut])
            tail = rest[cut:]
    yield from _document([*pieces, tail])


def _document(pieces: list[str]) -> Iterator[Document]:
    text = "".join(pieces)
    if text.strip():
        yield Document(text)


def _read_jsonl(path: Path) -> Iterator[Document]:
    with io.TextIOWrapper(open_file(path), encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                item = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number} must be a JSON object, got {error}.") from None
            keys = ("text",) if isinstance(item, dict) and "text" in item else ("prompt", "answer")
            if not isinstance(item, dict) or not all(isinstance(item.get(key), str) for key in keys):
                raise ValueError(
                    f'{path}:{number} must be an object with "text", or with "prompt" and "answer", all strings, '
                    f"got {show(line.strip())}."
                )
            yield Document(item[keys[-1]], item.get("prompt", ""))
