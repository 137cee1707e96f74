"""Text files as training batches: tokenised once, memory-mapped after, every row a function of its number.

Rows are cut as the objective wants them: `TextSource` packs running text into rows of whole canvases, `PromptSource`
gives each prompt and answer a row of its own, `scan` reads held-out text from its beginning to its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dgemma import draws
from dgemma.data.documents import Document, read_documents
from dgemma.data.token_file import TokenFile
from dgemma.train.batch import TrainBatch

__all__ = ["Document", "PromptSource", "TextSource", "TokenFile", "permute", "read_documents", "scan"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TextSource:
    """Running text, packed: a `BatchSource` whose rows are a short context and `num_canvases` canvases.

    An epoch's rows start `canvas_len * num_canvases` tokens apart, in an order and from an offset of its own; a row
    whose first canvas would meet a document's beginning starts there. When a document ends, its canvas is filled with
    end-of-text and the next begins on the next one (its begin-of-text pinned): no canvas holds two documents, and none
    sees another. Every other row reads 1 to `canvas_len` tokens of context instead of 1, and has a canvas less, so that
    a model meets prompts of all lengths in batches of one shape.

    Example: `TextSource(file=file, canvas_len=64, num_canvases=8, batch_size=128)(0, range(128)).tokens` is (128, 513).
    """

    file: TokenFile
    canvas_len: int
    num_canvases: int
    batch_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("canvas_len", 1), ("num_canvases", 2), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"TextSource.{name} must be at least {least}, got {getattr(self, name)}.")
        if self.num_rows == 0:
            raise ValueError(
                f"TextSource.file must hold at least one row of {self.stride} tokens, got {self.file.num_tokens}. Give "
                "more text, or fewer or shorter canvases."
            )

    @property
    def stride(self) -> int:
        return self.canvas_len * self.num_canvases

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return self.file.num_tokens // self.stride

    def __call__(self, step: int, rows: range) -> TrainBatch:
        _check_rows(self, rows)
        row = step * self.batch_size + torch.arange(rows.start, rows.stop)
        epoch, place = row // self.num_rows, row % self.num_rows
        seeds, zeros = torch.full_like(row, self.seed), torch.zeros_like(row)
        offset = draws.integers(draws.uniform(seeds, zeros, epoch, 1, "epoch offset")[:, 0], self.stride)
        context = draws.integers(draws.uniform(seeds, zeros, row, 1, "context")[:, 0], self.canvas_len)
        context = torch.where(row % 2 == 0, 0, context) + 1
        starts = (permute(place, self.num_rows, seed=self.seed, epoch=epoch) * self.stride + offset).tolist()
        made = [self._row(start, length) for start, length in zip(starts, context.tolist(), strict=True)]
        return TrainBatch(
            tokens=torch.from_numpy(np.stack([m.tokens for m in made])),
            prompt_len=torch.tensor([m.prompt_len for m in made]),
            length=torch.tensor([m.length for m in made]),
            pinned=torch.from_numpy(np.stack([m.pinned for m in made])),
            documents=torch.from_numpy(np.stack([m.documents for m in made])),
        )

    def _row(self, start: int, prompt_len: int) -> "_Row":
        starts = self.file.starts
        start %= self.file.num_tokens
        number = int(np.searchsorted(starts, start, side="right")) - 1
        if starts[number] < start and starts[number + 1] < min(start + self.canvas_len, self.file.num_tokens):
            number, start = number + 1, int(starts[number + 1])
        if start == starts[number]:
            prompt_len = 1
        end = prompt_len + self.canvas_len * (self.num_canvases if prompt_len == 1 else self.num_canvases - 1)
        row = _Row.empty(1 + self.stride, prompt_len, end, fill=self.file.eos_token_id)
        at = 0
        for document in range(end):
            piece = self.file.tokens[start : min(int(starts[number + 1]), start + end - at)]
            row.tokens[at : at + len(piece)] = piece
            row.documents[at:] = document  # what fills its last canvas is its own
            row.pinned[at] = at > 0
            at += len(piece)
            at = max(prompt_len, at + (prompt_len - at) % self.canvas_len)  # where the next canvas starts
            if at >= end:
                break
            number = (number + 1) % self.file.num_documents
            start = int(starts[number])
        return row


class _Row(NamedTuple):
    tokens: np.ndarray  # (T,) int64
    pinned: np.ndarray  # (T,) bool
    documents: np.ndarray  # (T,) int64
    prompt_len: int
    length: int

    @classmethod
    def empty(cls, num_tokens: int, prompt_len: int, length: int, *, fill: int) -> "_Row":
        tokens = np.full(num_tokens, fill, dtype=np.int64)
        return cls(tokens, np.zeros(num_tokens, dtype=bool), np.zeros(num_tokens, dtype=np.int64), prompt_len, length)


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptSource:
    """Prompts and answers, a row each, in an order of its own every epoch: a `BatchSource` for fine-tuning.

    An answer longer than `max_len` leaves room for is cut and marked `truncated`; a prompt that leaves no room for
    an answer is an error.

    Example: `PromptSource(file=TokenFile.open("chats"), max_len=512, batch_size=16)(0, range(16))`.
    """

    file: TokenFile
    max_len: int
    batch_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        longest = int(self.file.prompt_len.max())
        if self.max_len <= longest:
            raise ValueError(
                f"PromptSource.max_len must exceed the longest prompt, {longest} tokens, got {self.max_len}. Raise it, "
                "or leave such prompts out."
            )

    def __call__(self, step: int, rows: range) -> TrainBatch:
        _check_rows(self, rows)
        row = step * self.batch_size + torch.arange(rows.start, rows.stop)
        count = self.file.num_documents
        numbers = permute(row % count, count, seed=self.seed, epoch=row // count).tolist()
        return _pad([self.file.document(number) for number in numbers], self.file, numbers, self.max_len)


def _check_rows(source: TextSource | PromptSource, rows: range) -> None:
    """Rows beyond the source's batch would be those of the next step, and be seen twice."""
    if rows.stop > source.batch_size:
        raise ValueError(
            f"{type(source).__name__}.batch_size must be that of the training, got {source.batch_size} where rows up "
            f"to {rows.stop} are asked for. Give both the same."
        )


def scan(file: TokenFile, *, row_len: int, context: int, documents: Sequence[int] | None = None) -> TrainBatch:
    """Held-out documents from beginning to end, for likelihood: each token is in the answer of exactly one row.

    Rows answer for `row_len` tokens each (take whole canvases) and read up to `context` tokens before them; the last of
    a document is shorter and ends with end-of-text.

    Example: `evaluate(model, scan(file, row_len=512, context=512), noise, num_bytes=file.num_bytes)`.
    """
    if row_len < 1 or context < 1:
        raise ValueError(f"scan row_len and context must be at least 1, got {row_len} and {context}.")
    pieces, prompt_len, cut = [], [], []
    for number in range(file.num_documents) if documents is None else documents:
        tokens = file.document(number)
        for start in range(int(file.prompt_len[number]), len(tokens), row_len):
            first = max(0, start - context)
            pieces.append(tokens[first : start + row_len])
            prompt_len.append(start - first)
            cut.append(start + row_len < len(tokens))
    return _stack(pieces, prompt_len, cut, file.eos_token_id)


def _pad(pieces: list[np.ndarray], file: TokenFile, numbers: list[int], max_len: int) -> TrainBatch:
    kept = [piece[:max_len] for piece in pieces]
    cut = [len(piece) > max_len for piece in pieces]
    return _stack(kept, [int(file.prompt_len[number]) for number in numbers], cut, file.eos_token_id)


def _stack(pieces: list[np.ndarray], prompt_len: list[int], cut: list[bool], fill: int) -> TrainBatch:
    """Rows of different lengths, padded on the right."""
    tokens = np.full((len(pieces), max(map(len, pieces))), fill, dtype=np.int64)
    for row, piece in zip(tokens, pieces, strict=True):
        row[: len(piece)] = piece
    return TrainBatch(
        tokens=torch.from_numpy(tokens),
        prompt_len=torch.tensor(prompt_len),
        length=torch.tensor([len(piece) for piece in pieces]),
        truncated=torch.tensor(cut),
    )


def permute(index: Tensor, size: int, *, seed: int, epoch: Tensor) -> Tensor:
    """Where each index (B,) below `size` goes in the epoch's (B,) order, without the order ever being written down.

    A Feistel network over the next power of 4, walked until it lands below `size` (Black and Rogaway, 2002).

    Example: `permute(torch.arange(10), 10, seed=0, epoch=torch.zeros(10, dtype=torch.int64)).sort().values` is 0 … 9.
    """
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    low = (1 << half_bits) - 1
    word = torch.tensor(draws.purpose_word("order"))

    def shuffle(value: Tensor) -> Tensor:
        left, right = value >> half_bits, value & low
        for round_number in range(4):
            mixed = draws.philox(torch.tensor(seed), right, epoch, torch.tensor(round_number), word)[0]
            left, right = right, left ^ (mixed & low)
        return (left << half_bits) | right

    value = shuffle(index)
    while bool((outside := value >= size).any()):
        value = torch.where(outside, shuffle(value), value)
    return value
