"""Sudoku as text for a text model: a start token, 81 digits of the puzzle, then 81 digits of the solution."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.data.sudoku.encoding import NUM_CELLS, SudokuSource
from dgemma.train.batch import TrainBatch


@dataclass(frozen=True)
class TextSudoku:
    """The rows of a `SudokuSource` as text, for fine-tuning: a `BatchSource`. Nothing on the canvas is frozen.

    Example: `TextSudoku(SudokuSource(pool=pool), tokenizer)(0, range(8)).tokens` is (8, 163).
    """

    source: SudokuSource
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        if len(self.digits) != 10 or len(self.digits.unique()) != 10:
            raise ValueError(
                f"TextSudoku.tokenizer must have one token per digit, got {self.digits.tolist()} for the "
                f"ten. Use a tokenizer that never merges digits, as `train_tokenizer` makes them."
            )

    @property
    def digits(self) -> Tensor:
        """The tokens of the digits, (10,)."""
        return torch.tensor(self.tokenizer.encode("0123456789", bos=False))

    def prompt_tokens(self, puzzles: Any) -> Tensor:
        """Return the prompts (B, 82) of puzzles (B, 81), 0 for a blank."""
        return F.pad(self.digits[torch.as_tensor(puzzles).long()], (1, 0), value=self.tokenizer.bos_token_id)

    def canvas_digits(self, tokens: Tensor) -> Tensor:
        """Return the digits of canvas tokens (B, 81), 0 for any other token."""
        return (tokens[..., None] == self.digits.to(tokens.device)).int().argmax(-1)

    def __call__(self, step: int, rows: range) -> TrainBatch:
        sample = self.source.sample(step, rows)
        prompt = self.prompt_tokens(sample.puzzle)
        prompt_len = prompt.shape[1]
        return TrainBatch(
            tokens=torch.cat([prompt, self.digits[sample.solution]], dim=1),
            prompt_len=torch.full((len(rows),), prompt_len),
            length=torch.full((len(rows),), prompt_len + NUM_CELLS),
            spans=((prompt_len, prompt_len + NUM_CELLS),) * len(rows),
        )
