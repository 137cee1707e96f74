"""Tokenised documents on disk, written once and memory-mapped."""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.data.documents import Document, list_files

_FORMAT = 1
_CHUNK = 1 << 24  # bytes per read
_BATCH = 256  # documents encoded in parallel
_SAMPLE = 10_000  # characters that identify a tokenizer


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenFile:
    """D tokenised documents on disk, each begin-of-text, prompt, text, end-of-text. Memory-mapped.

    Example: `TokenFile.open("corpus/train").num_tokens`.
    """

    tokens: np.ndarray  # (N,) uint16 or uint32, memory-mapped
    starts: np.ndarray  # (D + 1,) int64
    prompt_len: np.ndarray  # (D,) int64, begin-of-text included
    num_bytes: int  # of all text, without prompts
    vocab_size: int
    eos_token_id: int
    crc32: int | None = None  # of the content, if `write` computed it
    made_from: Mapping[str, Any] | None = None  # the argument of `write`

    @classmethod
    def write(
        cls,
        documents: Iterable[Document],
        tokenizer: Tokenizer,
        folder: str | Path,
        *,
        made_from: Mapping[str, Any] | None = None,
    ) -> "TokenFile":
        """Tokenise documents into a folder and open it. `made_from` describes their origin.

        Example: `TokenFile.write(read_documents("stories.txt"), tokenizer, "corpus/train")`.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "about.json").unlink(missing_ok=True)  # written last, so that it marks a complete folder
        dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
        lengths, prompt_len, num_bytes = [], [], 0
        with (folder / "tokens.bin").open("wb") as file:
            for number, (document, prompt, text) in enumerate(_encode(documents, tokenizer)):
                _refuse_markers(number, [*prompt[1:], *text], tokenizer)
                row = np.array([*prompt, *text, tokenizer.eos_token_id], dtype=dtype)
                row.tofile(file)
                lengths.append(len(row))
                prompt_len.append(len(prompt))
                num_bytes += len(document.text.encode())
        if not lengths:
            raise ValueError("TokenFile.write documents must hold at least one, got none.")
        sizes = np.array([lengths, prompt_len], dtype=np.int64)
        np.save(folder / "lengths.npy", sizes)
        about = {
            "format": _FORMAT,
            "dtype": np.dtype(dtype).name,
            "num_bytes": num_bytes,
            "vocab_size": tokenizer.vocab_size,
            "eos_token_id": tokenizer.eos_token_id,
            "crc32": _crc32(np.memmap(folder / "tokens.bin", dtype=dtype, mode="r"), sizes),
            "made_from": made_from,
        }
        (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
        return cls.open(folder)

    @classmethod
    def open(cls, folder: str | Path) -> "TokenFile":
        """Open a folder that `write` wrote."""
        folder = Path(folder)
        if not (folder / "about.json").is_file():
            raise FileNotFoundError(f"{folder / 'about.json'} does not exist. Make the folder with TokenFile.write.")
        about = json.loads((folder / "about.json").read_text())
        if about["format"] != _FORMAT:
            raise ValueError(f"{folder} must have format {_FORMAT}, got {about['format']}. Write it again.")
        lengths, prompt_len = np.load(folder / "lengths.npy")
        starts = np.concatenate(([0], lengths.cumsum()))
        tokens = np.memmap(folder / "tokens.bin", dtype=about["dtype"], mode="r")
        if len(tokens) != starts[-1]:
            raise ValueError(f"{folder} must hold {starts[-1]} tokens, got {len(tokens)}. Write it again.")
        return cls(
            tokens=tokens,
            starts=starts,
            prompt_len=prompt_len,
            crc32=about.get("crc32"),
            made_from=about.get("made_from"),
            **{name: about[name] for name in ("num_bytes", "vocab_size", "eos_token_id")},
        )

    @property
    def num_documents(self) -> int:
        return len(self.prompt_len)

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def fingerprint(self) -> str:
        """A line that identifies documents and tokenizer, for the description of a run."""
        crc32 = self.crc32
        if crc32 is None:
            crc32 = _crc32(self.tokens, np.stack((np.diff(self.starts), self.prompt_len)))
        return f"TokenFile({self.num_documents} documents, {self.num_tokens} tokens, crc32 {crc32:08x})"

    def document(self, number: int) -> np.ndarray:
        """Return the tokens of one document."""
        return self.tokens[self.starts[number] : self.starts[number + 1]]


def describe_files(
    paths: Sequence[str | Path], tokenizer: Tokenizer, *, separator: str | None = None
) -> dict[str, Any]:
    """Describe what the tokens of text files depend on: the files' bytes, the separator and the tokenizer.

    Example: `TokenFile.write(documents, tokenizer, folder, made_from=describe_files(["a.txt"], tokenizer))`.
    """
    files = list_files(paths)
    made_from: dict[str, Any] = {"separator": separator}
    for number, path in enumerate(files, start=1):
        crc32 = 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                crc32 = zlib.crc32(chunk, crc32)
        made_from[f"file {number}, {path.name}"] = crc32
    with files[0].open(encoding="utf-8", errors="replace") as text:
        cut = (tokenizer.vocab_size, tokenizer.encode(text.read(_SAMPLE)))
    return made_from | {"tokenizer": zlib.crc32(repr(cut).encode())}


def _crc32(tokens: np.ndarray, sizes: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(sizes).data, zlib.crc32(tokens.data))


def _encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, list[int], list[int]]]:
    """Yield each document with the tokens of its prompt and of its text, in order; encode on all cores."""

    def encode(document: Document) -> tuple[Document, list[int], list[int]]:
        return document, tokenizer.encode(document.prompt), tokenizer.encode(document.text, bos=False)

    rest = iter(documents)
    with ThreadPoolExecutor() as pool:
        while chunk := list(islice(rest, _BATCH)):
            yield from pool.map(encode, chunk)


def _refuse_markers(number: int, ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """Raise ValueError for a text that contains a marker: the model would read it as an end or as noise."""
    markers = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}
    if tokenizer.mask_token_id is not None:
        markers.add(tokenizer.mask_token_id)
    found = markers.intersection(ids)
    if found:
        marker = tokenizer.decode([min(found)], skip_special=False)
        raise ValueError(
            f"TokenFile.write documents must not contain the special token {marker}, but document "
            f"{number} does. Remove it, or write it another way."
        )
