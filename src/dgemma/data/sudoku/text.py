"""Sudoku as text for a text model: a start token and the puzzle, then the solution; a letter begins each row.

A model without absolute positions cannot see where row 4 begins in 81 bare digits. The letters show it. A board is 90
tokens, so each cell of the solution is 90 tokens after the same cell of the puzzle.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.data.sudoku.encoding import SudokuSource
from dgemma.train.batch import TrainBatch

_ROW_NAMES = "ABCDEFGHI"


@dataclass(frozen=True)
class TextSudoku:
    """The rows of a `SudokuSource` as text, for fine-tuning: a `BatchSource`. Nothing on the canvas is frozen.

    The text of a board is "A530070000B600195000C098000060" and so on, with 0 for a blank.

    Example: `TextSudoku(SudokuSource(pool=pool), tokenizer)(0, range(8)).tokens` is (8, 181).
    """

    source: SudokuSource
    tokenizer: Tokenizer

    board_len = 90  # tokens of a puzzle, and of a canvas

    def __post_init__(self) -> None:
        text = "".join(name + "0123456789" for name in _ROW_NAMES)
        whole = self.tokenizer.encode(text, bos=False)
        if len(set(whole)) != 19 or whole != [self.tokenizer.encode(c, bos=False)[0] for c in text]:
            raise ValueError(
                f"TextSudoku.tokenizer must have one token per digit and per letter before a digit, got {len(whole)} "
                f"tokens for {len(text)} characters. Use a tokenizer that never merges digits, as `train_tokenizer` "
                "makes them."
            )

    @cached_property
    def digits(self) -> Tensor:
        """The tokens of the digits, (10,)."""
        return torch.tensor(self.tokenizer.encode("0123456789", bos=False))

    @cached_property
    def row_names(self) -> Tensor:
        """The tokens of the letters that begin the rows, (9,)."""
        return torch.tensor([self.tokenizer.encode(name, bos=False)[0] for name in _ROW_NAMES])

    def board_tokens(self, digits: Any) -> Tensor:
        """Return boards (B, 90) of digits (B, 81), 0 for a blank."""
        cells = self.digits[torch.as_tensor(digits).long()].unflatten(-1, (9, 9))
        names = self.row_names[:, None].expand(*cells.shape[:-1], 1)
        return torch.cat([names, cells], dim=-1).flatten(-2)

    def prompt_tokens(self, puzzles: Any) -> Tensor:
        """Return the prompts (B, 91) of puzzles (B, 81), 0 for a blank."""
        return F.pad(self.board_tokens(puzzles), (1, 0), value=self.tokenizer.bos_token_id)

    def canvas_digits(self, tokens: Tensor) -> Tensor:
        """Return the digits (B, 81) of canvas tokens (B, 90), 0 for any other token."""
        cells = tokens.unflatten(-1, (9, 10))[..., 1:].flatten(-2)
        return (cells[..., None] == self.digits.to(tokens.device)).int().argmax(-1)

    def __call__(self, step: int, rows: range) -> TrainBatch:
        sample = self.source.sample(step, rows)
        prompt = self.prompt_tokens(sample.puzzle)
        prompt_len, length = prompt.shape[1], prompt.shape[1] + self.board_len
        return TrainBatch(
            tokens=torch.cat([prompt, self.board_tokens(sample.solution)], dim=1),
            prompt_len=torch.full((len(rows),), prompt_len),
            length=torch.full((len(rows),), length),
            spans=((prompt_len, length),) * len(rows),
        )
