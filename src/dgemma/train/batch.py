"""Batches of training text: prompts and answers without noise, their sources, and the thread that prepares them."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dgemma.diffusion import draws

_DEPTH = 2  # steps that the feed prepares ahead


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """B rows of tokens, right-padded to one length T: `prompt_len` tokens that are only read, then the answer.

    The answer is what canvases cover, from the prompt's end in steps of the canvas length; the objective fills the last
    one with end-of-text. A `truncated` answer was cut by whoever made the batch, so its end says nothing. `pinned`
    tokens are never noised and never scored: Sudoku's clues. `documents` numbers the texts packed into a row; with it
    no token sees another document's. `fill` marks the end-of-text that whoever packed the row put behind its texts.
    """

    tokens: Tensor  # (B, T) int64
    prompt_len: Tensor  # (B,) int64
    length: Tensor  # (B,) int64: prompt and answer; what lies beyond is padding
    truncated: Tensor | None = None  # (B,) bool
    pinned: Tensor | None = None  # (B, T) bool
    documents: Tensor | None = None  # (B, T) int64
    text: Tensor | None = None  # (B,) int64: which text a row is a part of; `evaluate`'s intervals are over texts
    fill: Tensor | None = None  # (B, T) bool; what lies beyond `length` is none of it
    # (prompt_len, length) of each row, known to the host: shapes follow from them without waiting for a device.
    spans: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2 or not len(self.tokens):
            raise ValueError(f"TrainBatch.tokens must have shape (B, T), B at least 1, got {tuple(self.tokens.shape)}.")
        batch_size, num_tokens = self.tokens.shape
        shapes = {
            "prompt_len": (batch_size,),
            "length": (batch_size,),
            "truncated": (batch_size,),
            "text": (batch_size,),
            "pinned": (batch_size, num_tokens),
            "documents": (batch_size, num_tokens),
            "fill": (batch_size, num_tokens),
        }
        for name, shape in shapes.items():
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != shape:
                raise ValueError(
                    f"TrainBatch.{name} must have shape {shape}, got {tuple(value.shape)}. Give one value per "
                    f"{'row' if len(shape) == 1 else 'token'} of tokens {tuple(self.tokens.shape)}."
                )
        # On the host they are read anew: `replace(batch, length=...)` brings those of the batch it is made from.
        if self.spans is None or (type(self.length) is Tensor and self.length.device.type == "cpu"):
            spans = tuple(zip(self.prompt_len.tolist(), self.length.tolist(), strict=True))
            object.__setattr__(self, "spans", spans)
        assert self.spans is not None
        for row, (prompt_len, length) in enumerate(self.spans):
            if not 0 <= prompt_len <= length <= num_tokens:
                raise ValueError(
                    f"TrainBatch must satisfy 0 <= prompt_len <= length <= {num_tokens} tokens, got prompt_len "
                    f"{prompt_len} and length {length} in row {row}. Pad the tokens, or cut the lengths."
                )

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def has_answer(self) -> bool:
        """Whether any row has a token to be written; the host knows."""
        assert self.spans is not None
        return any(length > prompt for prompt, length in self.spans)

    def to(self, device: torch.device | str) -> "TrainBatch":
        """The same batch on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def select(self, rows: Tensor | slice) -> "TrainBatch":
        """Some rows, in the given order.

        Example: `batch.select(slice(0, 8))`.
        """
        assert self.spans is not None
        spans = self.spans[rows] if isinstance(rows, slice) else tuple(self.spans[row] for row in rows.tolist())
        return replace(self._map(lambda tensor: tensor[rows]), spans=spans)

    def _map(self, transform: Callable[[Tensor], Tensor]) -> "TrainBatch":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        changes: dict[str, Any] = {name: transform(v) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **changes)


class BatchSource(Protocol):
    """Where batches come from: a pure function of (step, rows), so that a resumed run sees what it would have seen.

    `rows` are indices into the global batch of that step. A process, or an accumulation, asks for its own part, and the
    whole never depends on how it was cut.
    """

    def __call__(self, step: int, rows: range) -> TrainBatch: ...


class Part(NamedTuple):
    """A micro-batch: some rows of a step, and the seed of each row's noise (B,)."""

    batch: TrainBatch
    seeds: Tensor

    def to(self, device: torch.device) -> "Part":
        return Part(self.batch.to(device), self.seeds.to(device, non_blocking=True))


class StepInput(NamedTuple):
    """A step's micro-batches on this process, and how many tokens they hold, padding left out."""

    parts: list[Part]
    num_tokens: int


def row_seeds(seed: int, step: int, rows: range) -> Tensor:
    """A seed for each row (B,) of a step's global batch: a function of the run's seed, the step and the row alone.

    Example: `row_seeds(0, 7, range(4, 8))` is the second half of `row_seeds(0, 7, range(8))`.
    """
    row = torch.arange(rows.start, rows.stop)
    words = draws.philox(
        torch.tensor(seed), row, torch.tensor(step), torch.tensor(0), torch.tensor(draws.purpose_word("row"))
    )
    return (words[0] >> 1 << 32) | words[1]


def feed(
    source: BatchSource, *, seed: int, rows: range, micro_batch_size: int, steps: range, device: torch.device
) -> Generator[StepInput, None, None]:
    """For each of `steps`, this process's `rows` in micro-batches, on `device`."""

    def make(step: int) -> StepInput:
        parts = []
        for start in range(rows.start, rows.stop, micro_batch_size):
            some = range(start, min(start + micro_batch_size, rows.stop))
            batch = source(step, some)
            if batch.batch_size != len(some):
                raise ValueError(
                    f"train source must give a row for each of rows {some.start}..{some.stop - 1} it is asked for, "
                    f"got {batch.batch_size}."
                )
            parts.append(_pin(Part(batch, row_seeds(seed, step, some)), device))
        return StepInput(parts, sum(int(part.batch.length.sum()) for part in parts))

    with ThreadPoolExecutor(1, thread_name_prefix="dgemma-feed") as pool:
        ahead = deque(pool.submit(make, step) for step in steps[:_DEPTH])
        try:
            for step in steps:
                made = ahead.popleft().result()
                if step + _DEPTH in steps:
                    ahead.append(pool.submit(make, step + _DEPTH))
                yield StepInput([part.to(device) for part in made.parts], made.num_tokens)
        finally:
            pool.shutdown(cancel_futures=True)


def _pin(part: Part, device: torch.device) -> Part:
    """Page-locked memory, from which a copy to the GPU need not be waited for."""
    if device.type != "cuda":
        return part
    names = [field.name for field in fields(part.batch)]
    on_host = [name for name in names if isinstance(t := getattr(part.batch, name), Tensor) and not t.is_cuda]
    pinned: dict[str, Any] = {name: getattr(part.batch, name).pin_memory() for name in on_host}
    return Part(replace(part.batch, **pinned), part.seeds.pin_memory())
