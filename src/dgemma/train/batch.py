"""Batches of training text: prompts and answers without noise, their sources, and the thread that prepares them."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dgemma.checks import in_range, require, require_field, require_tensor
from dgemma.diffusion import draws
from dgemma.model.vision.images import Images

_DEPTH = 2  # steps that the feed prepares ahead


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """B rows of tokens, right-padded to one length T: a prompt of `prompt_len` tokens, then the answer.

    Canvases cover the answer, starting where the prompt ends. The objective fills the rest of the last canvas with
    end-of-text. A `truncated` answer was cut to fit, so its end does not mean end-of-text. `frozen` tokens, such as the
    clues of a Sudoku, are never noised and never scored. `documents` numbers the texts packed into a row; tokens of
    different documents do not see each other. `fill` marks end-of-text tokens that packing appended to a text. `images`
    belong to the image tokens of the prompts. Freeze these tokens, so that the causal term does not score them.

    Example: `TrainBatch(tokens=tokens, prompt_len=torch.tensor([4]), length=torch.tensor([20]))`.
    """

    tokens: Tensor  # (B, T) int64
    prompt_len: Tensor  # (B,) int64
    length: Tensor  # (B,) int64: prompt and answer; tokens after it are padding
    truncated: Tensor | None = None  # (B,) bool
    frozen: Tensor | None = None  # (B, T) bool
    documents: Tensor | None = None  # (B, T) int64
    text: Tensor | None = None  # (B,) int64: the text that a row belongs to; `evaluate` computes intervals over texts
    fill: Tensor | None = None  # (B, T) bool, within `length`
    images: tuple[Images | None, ...] | None = None  # of each row, in the order of their tokens
    # (prompt_len, length) of each row on the host: shapes follow from them without waiting for a device.
    spans: tuple[tuple[int, int], ...] | None = None
    # `frozen` on the host, for the same reason; None if the batch was made on a device.
    host_frozen: np.ndarray | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        tokens, fix = self.tokens, "Give one value per row or per token."
        require_tensor(tokens, "TrainBatch.tokens", "be ids (B, T)", shape=(None, None), dtypes=(torch.int64,))
        require_field(len(tokens) > 0, self, "tokens", "have at least one row")
        for name in ("prompt_len", "length", "truncated", "text", "frozen", "documents", "fill"):
            shape = tokens.shape if name in ("frozen", "documents", "fill") else tokens.shape[:1]
            dtype = torch.bool if name in ("truncated", "frozen", "fill") else torch.int64
            value, rule = getattr(self, name), f"be {dtype} of shape {tuple(shape)} on {tokens.device}"
            if value is not None or name in ("prompt_len", "length"):
                require_tensor(value, f"TrainBatch.{name}", rule, shape=shape, dtypes=(dtype,), fix=fix)
                require_field(value.device == tokens.device, self, name, rule)
        fits = self.images is None or len(self.images) == len(tokens)
        require_field(fits, self, "images", f"have one entry per row, {len(tokens)}")
        # `replace(batch, length=...)` passes the spans of the old batch. So on a CPU, spans are always computed again.
        on_host = type(self.length) is Tensor and self.length.device.type == "cpu"
        if on_host and self.frozen is not None:
            object.__setattr__(self, "host_frozen", self.frozen.numpy())
        if self.spans is None or on_host:
            spans = tuple(zip(self.prompt_len.tolist(), self.length.tolist(), strict=True))
            object.__setattr__(self, "spans", spans)
        assert self.spans is not None
        num_tokens, fix = tokens.shape[1], "Pad the tokens, or cut the lengths."
        for prompt_len, length in self.spans:
            fits, rule = 0 <= prompt_len <= length <= num_tokens, f"satisfy 0 <= prompt_len <= length <= {num_tokens}"
            require(fits, "TrainBatch", rule, (prompt_len, length), fix)

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @classmethod
    def of_rows(
        cls, rows: Sequence[Sequence[int] | np.ndarray], prompt_len: Sequence[int], fill: int, **others: Tensor
    ) -> "TrainBatch":
        """Return rows of different lengths, padded with `fill`; others: the other fields.

        Example: `TrainBatch.of_rows([[2, 7, 9], [2, 8]], prompt_len=[1, 1], fill=1).length`.
        """
        tokens = [torch.from_numpy(np.array(row, dtype=np.int64)) for row in rows]
        return cls(
            tokens=pad_sequence(tokens, batch_first=True, padding_value=fill),
            prompt_len=torch.tensor(prompt_len),
            length=torch.tensor([len(row) for row in rows]),
            **others,  # type: ignore[arg-type]
        )

    def to(self, device: torch.device | str) -> "TrainBatch":
        """Return the batch on another device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def select(self, rows: Tensor | slice) -> "TrainBatch":
        """Return the selected rows, in the order of `rows`.

        Example: `batch.select(slice(0, 8))`.
        """
        numbers = torch.arange(self.batch_size)[rows if isinstance(rows, slice) else rows.cpu()].tolist()
        listed = {"spans": self.spans, "images": self.images}
        picked: dict[str, Any] = {name: tuple(v[row] for row in numbers) for name, v in listed.items() if v is not None}
        return replace(self, **self._map_tensors(lambda tensor: tensor[rows]), **picked)

    def map(self, transform: Callable[[Tensor], Tensor]) -> "TrainBatch":
        images = self.images and tuple(
            None if row is None else replace(row, patches=transform(row.patches)) for row in self.images
        )
        batch = replace(self, **self._map_tensors(transform), images=images)
        if batch.host_frozen is None:  # it is on a device now
            object.__setattr__(batch, "host_frozen", self.host_frozen)
        return batch

    def _map_tensors(self, transform: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: transform(value) for name, value in values.items() if isinstance(value, Tensor)}


@runtime_checkable
class BatchSource(Protocol):
    """A pure function of (step, rows) that returns a batch, so that a resumed run sees the same batches.

    `rows` are indices into the global batch of that step. Each process and each micro-batch requests its own rows. The
    global batch must not depend on how it is split.

    Example: `def source(step, rows): return batch_of([texts[step * 64 + row] for row in rows])`.
    """

    def __call__(self, step: int, rows: range) -> TrainBatch: ...


class MicroBatch(NamedTuple):
    """A micro-batch: some rows of a step, and the seed of each row's noise (B,)."""

    batch: TrainBatch
    seeds: Tensor

    def map(self, transform: Callable[[Tensor], Tensor]) -> "MicroBatch":
        return MicroBatch(self.batch.map(transform), transform(self.seeds))


def row_seeds(seed: int, step: int | Tensor, rows: range, purpose: str = "row") -> Tensor:
    """Return a seed (B,) for each row of a step's global batch, from the run's seed, the step and the row alone.

    Several steps (S, 1) give seeds (S, B).
    """
    row, word = torch.arange(rows.start, rows.stop), torch.tensor(draws.purpose_word(purpose))
    high, low, _, _ = draws.philox(torch.tensor(seed), row, torch.as_tensor(step), torch.tensor(0), word)
    return (high >> 1 << 32) | low


def check_ids(batch: TrainBatch, vocab_size: int, owner: str) -> None:
    """Raise unless every token is in the vocabulary. On a GPU an unknown id would end the process."""
    fits, rule = in_range(batch.tokens, vocab_size), f"return ids in [0, {vocab_size})"
    require(fits, f"{owner} source", rule, batch.tokens, "Check the tokenizer.")


def feed(
    source: BatchSource,
    *,
    seed: int,
    rows: range,
    micro_batch_size: int,
    steps: range,
    vocab_size: int,
    device: torch.device,
) -> Generator[list[MicroBatch], None, None]:
    """Yield this process's `rows` for each of `steps`, in micro-batches, on `device`.

    A thread makes and pins the next steps' rows while the current step computes.
    """

    def make(step: int) -> list[MicroBatch]:
        parts = []
        for start in range(rows.start, rows.stop, micro_batch_size):
            part_rows = range(start, min(start + micro_batch_size, rows.stop))
            batch = source(step, part_rows)
            require(isinstance(batch, TrainBatch), "train source", "return a TrainBatch", batch)
            rule = f"return one row for each of rows {part_rows.start}..{part_rows.stop - 1}"
            require(batch.batch_size == len(part_rows), "train source", rule, batch.batch_size)
            check_ids(batch, vocab_size, "train")
            part = MicroBatch(batch, row_seeds(seed, step, part_rows))
            # From page-locked memory, copies to the GPU are asynchronous.
            parts.append(part.map(lambda t: t if t.is_cuda else t.pin_memory()) if device.type == "cuda" else part)
        return parts

    with ThreadPoolExecutor(1, thread_name_prefix="dgemma-feed") as pool:
        ahead = deque(pool.submit(make, step) for step in steps[:_DEPTH])
        try:
            for step in steps:
                parts = ahead.popleft().result()
                if step + _DEPTH in steps:
                    ahead.append(pool.submit(make, step + _DEPTH))
                yield [part.map(lambda tensor: tensor.to(device, non_blocking=True)) for part in parts]
        finally:
            pool.shutdown(cancel_futures=True)
