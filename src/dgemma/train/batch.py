"""What a training step is given: rows of text, each a prompt and an answer, with nothing about noise yet."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor


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
