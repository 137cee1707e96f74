"""Training batches from text files, tokenised once and memory-mapped; a row's number determines its content.

`TextSource` packs running text into rows of whole canvases. `PromptSource` gives each prompt and answer its own row.
`scan` reads held-out text from beginning to end.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from dgemma.checks import Count, Words, at_least, check_types, require, require_field, typed
from dgemma.data.documents import Document, read_dataset, read_documents
from dgemma.data.token_file import TokenFile
from dgemma.diffusion import draws
from dgemma.train.batch import TrainBatch

__all__ = ["Document", "PromptSource", "TextSource", "TokenFile", "permute", "read_dataset", "read_documents", "scan"]

_Number = TypeVar("_Number", int, Tensor)


@dataclass(frozen=True, kw_only=True, eq=False)
class TextSource:
    """Packed running text: a `BatchSource` whose rows are a short context and up to `num_canvases` canvases.

    An epoch scores every token of every document exactly once, except begin-of-text, which is never a target. A
    document of L tokens has ⌈L / canvas_len⌉ canvases. The last is filled with end-of-text. No canvas holds or sees two
    documents.

    The canvases of all documents form a ring. Each epoch starts at a random canvas and cuts the ring into rows. Two
    kinds of rows alternate. The first kind has one token of context and `num_canvases` canvases. The second has 1 to
    `canvas_len` tokens of context and one canvas less. So the model sees prompts of all these lengths in batches of one
    shape. Each epoch shuffles its rows.

    If a document starts a row, its begin-of-text is the context, unless its last canvas would then be empty. Otherwise
    begin-of-text is the first token of its canvas, and frozen. If a document needs several rows, its second row repeats
    the last tokens of its first, and they are frozen there, because the first row has scored them. Later rows follow
    without overlap. The number of repeated tokens is drawn anew in each epoch. It is at most the number of fill tokens
    in the document's last canvas.

    Example: `TextSource(file=file, canvas_len=64, num_canvases=8, batch_size=128)(0, range(128)).tokens` is (128, 513).
    """

    file: TokenFile
    canvas_len: Count
    num_canvases: Annotated[int, at_least(2)]
    batch_size: Count
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        num_prompts = int((self.file.prompt_len > 1).sum())  # more than begin-of-text
        rule = "hold running text, without prompts, which would be trained on"
        require(not num_prompts, "TextSource.file", rule, Words(f"{num_prompts} prompts"), "Use PromptSource.")

    @property
    def stride(self) -> int:
        """The number of tokens in a row's canvases."""
        return self.canvas_len * self.num_canvases

    @cached_property
    def _canvases(self) -> np.ndarray:
        """The first canvas of each document on the ring, and the ring's length: (D + 1,)."""
        return np.concatenate(([0], (-(-np.diff(self.file.starts) // self.canvas_len)).cumsum()))

    @property
    def _ring_len(self) -> int:
        return int(self._canvases[-1])

    @property
    def num_rows(self) -> int:
        """The number of rows in an epoch."""
        pairs, rest = divmod(self._ring_len, 2 * self.num_canvases - 1)
        return 2 * pairs + (rest > 0) + (rest > self.num_canvases)

    @typed
    def __call__(self, step: int, rows: range) -> TrainBatch:
        row = _row_numbers(self, step, rows)
        epoch = row // self.num_rows
        place = permute(row % self.num_rows, self.num_rows, seed=self.seed, epoch=epoch)

        def draw(block: Tensor, step: Tensor, purpose: str) -> Tensor:
            return draws.uniform(torch.full_like(row, self.seed), block, step, 1, purpose)[:, 0]

        zeros = torch.zeros_like(row)
        ring_start = draws.integers(draw(zeros, epoch, "turn"), self._ring_len)
        context = 1 + place % 2 * draws.integers(draw(zeros, row, "context"), self.canvas_len)
        canvas = (self._first(place) + ring_start).numpy() % self._ring_len
        number = np.searchsorted(self._canvases, canvas, side="right") - 1
        room = torch.from_numpy((self.file.starts[number] - self.file.starts[number + 1]) % self.canvas_len)
        shift = draws.integers(draw(torch.from_numpy(number), epoch, "shift"), room + 1)
        built_rows = [self._row(*values) for values in torch.stack((place, ring_start, context, shift), dim=1).tolist()]
        columns = zip(_PackedRow._fields, zip(*built_rows, strict=True), strict=True)
        packed: dict[str, Any] = {name: torch.from_numpy(np.stack(values)) for name, values in columns}
        return TrainBatch(**packed)

    def _first(self, place: _Number) -> _Number:
        """Return the start of a row, in canvases from the epoch's start."""
        return place // 2 * (2 * self.num_canvases - 1) + place % 2 * self.num_canvases

    def _row(self, place: int, ring_start: int, context: int, shift: int) -> "_PackedRow":
        """Build a row from pieces of documents, of which the first starts `shift` tokens early.

        The epoch starts at canvas `ring_start`.
        """
        first, end = self._first(place), min(self._first(place + 1), self._ring_len)
        # Number of canvases in the previous row; the ring's last row precedes its first.
        before = first - self._first(place - 1) if place else self._ring_len - self._first(self.num_rows - 1)
        tokens, documents = np.full((2, 1 + self.stride), [[self.file.eos_token_id], [0]], dtype=np.int64)
        row = _PackedRow(tokens, np.zeros_like(tokens, bool), documents, np.zeros_like(tokens, bool))
        prompt_len = at = document = 0
        position = first
        while position < end:
            canvas = (position + ring_start) % self._ring_len
            number = int(np.searchsorted(self._canvases, canvas, side="right")) - 1
            text = self.file.document(number)
            index = canvas - int(self._canvases[number])  # within the document
            count = min(int(self._canvases[number + 1]) - canvas, end - position)
            # If the document starts a row, its begin-of-text is context and in no canvas, unless its last canvas would
            # then be empty.
            begins = (position - index) % self._ring_len % (2 * self.num_canvases - 1)
            lead = int(begins in (0, self.num_canvases) and (len(text) - 1) % self.canvas_len > 0)
            if index == 0:
                start, read, num_frozen = lead, lead, 1 - lead
            else:  # Continues a document. Its second row starts `shift` tokens early, so all later rows do as well.
                start = lead + index * self.canvas_len - shift
                read, num_frozen = min(context, start), shift if index <= before else 0
            piece = text[start - read : start + count * self.canvas_len]
            row.tokens[at : at + len(piece)] = piece
            row.frozen[at + read : at + read + num_frozen] = True
            row.documents[at:] = document
            row.fill[at + len(piece) : at + read + count * self.canvas_len] = True
            prompt_len += read  # 0 except for the first piece
            at += read + count * self.canvas_len
            position, document = position + count, document + 1
        return row._replace(prompt_len=prompt_len, length=at)


class _PackedRow(NamedTuple):
    tokens: np.ndarray  # (T,) int64
    frozen: np.ndarray  # (T,) bool
    documents: np.ndarray  # (T,) int64
    fill: np.ndarray  # (T,) bool
    prompt_len: int = 0
    length: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptSource:
    """Prompts and answers, one per row, in a new order every epoch: a `BatchSource` for fine-tuning.

    Prompt and answer share `max_len` tokens. A longer answer is cut and marked `truncated`. A prompt that leaves no
    room for an answer is an error.

    Example: `PromptSource(file=TokenFile.open("chats"), max_len=512, batch_size=16)(0, range(16))`.
    """

    file: TokenFile
    max_len: int
    batch_size: Count
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        longest = int(self.file.prompt_len.max())
        rule, fix = f"exceed the longest prompt, {longest} tokens", "Raise it, or leave such prompts out."
        require_field(self.max_len > longest, self, "max_len", rule, fix)

    @typed
    def __call__(self, step: int, rows: range) -> TrainBatch:
        row = _row_numbers(self, step, rows)
        count = self.file.num_documents
        numbers = permute(row % count, count, seed=self.seed, epoch=row // count).tolist()
        documents = [self.file.document(number) for number in numbers]
        prompt_len = [int(self.file.prompt_len[number]) for number in numbers]
        cut = torch.tensor([len(document) > self.max_len for document in documents])
        pieces = [document[: self.max_len] for document in documents]
        batch = TrainBatch.of_rows(pieces, prompt_len, self.file.eos_token_id, truncated=cut)
        files = self.file.images
        if files is None:
            return batch
        images = tuple(files.read(number) for number in numbers)
        return replace(batch, images=images, frozen=batch.tokens == files.image_token_id)


def _row_numbers(source: TextSource | PromptSource, step: int, rows: range) -> Tensor:
    """Return the numbers of a step's rows, (B,). Rows beyond the batch belong to the next step and are refused."""
    owner, is_range = type(source).__name__, rows.start >= 0 and rows.step == 1 and len(rows) > 0
    require(0 <= step < 2**31, f"{owner} step", "be in [0, 2**31)", step)
    require(is_range, f"{owner} rows", "be a range of rows of the batch", rows)
    rule = f"equal TrainConfig.batch_size, with row {rows.stop - 1} requested"
    require_field(rows.stop <= source.batch_size, source, "batch_size", rule)
    return step * source.batch_size + torch.arange(rows.start, rows.stop)


@typed
def scan(file: TokenFile, *, row_len: Count, context: Count) -> TrainBatch:
    """Return whole held-out documents, for likelihood: each token is in the answer of exactly one row.

    Each row scores `row_len` tokens, which should be a multiple of the canvas length, after up to `context` tokens of
    prompt. The last row of a document is shorter and ends with end-of-text.

    Example: `evaluate(model, scan(file, row_len=512, context=512), noise, num_bytes=file.num_bytes)`.
    """
    pieces, prompt_len, cut, text = [], [], [], []
    require(file.images is None, "scan file", "have no images, whose prompts cannot be cut", file, "Use PromptSource.")
    for number in range(file.num_documents):
        tokens = file.document(number)
        for start in range(int(file.prompt_len[number]), len(tokens), row_len):
            first = max(0, start - context)
            pieces.append(tokens[first : start + row_len])
            prompt_len.append(start - first)
            cut.append(start + row_len < len(tokens))
            text.append(number)
    others = {"truncated": torch.tensor(cut), "text": torch.tensor(text)}
    return TrainBatch.of_rows(pieces, prompt_len, file.eos_token_id, **others)


def permute(index: Tensor, size: int, *, seed: int, epoch: Tensor) -> Tensor:
    """Permute indices (B,) below `size`, each by the permutation of its epoch (B,). No permutation is stored.

    A Feistel network over the next power of 4, repeated until the result is below `size` (Black and Rogaway, 2002).

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
