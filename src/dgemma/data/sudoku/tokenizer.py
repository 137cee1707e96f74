"""Sudoku as text for tools that work on texts: 81 characters of the puzzle, then 81 digits of the solution."""

from pathlib import Path
from typing import Any, NoReturn

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import require
from dgemma.data.sudoku.encoding import (
    EOS_TOKEN,
    MASK_TOKEN,
    NUM_CELLS,
    PAD_TOKEN,
    VOCAB_SIZE,
    canvas_tokens,
    prompt_tokens,
    token_text,
)
from dgemma.model.config import DenoiserConfig


class SudokuTokenizer(Tokenizer):
    """The tokens of a Sudoku solver as text. White space is ignored, and there is no begin-of-text.

    The first 81 characters, digits or "." for a blank, are the clues of the puzzle. Digits after them are the solution.

    Example: `SudokuTokenizer().encode("53..7....6..195..." + "." * 63)` has 81 tokens.
    """

    vocab_size = VOCAB_SIZE
    pad_token_id = PAD_TOKEN
    eos_token_id = EOS_TOKEN
    bos_token_id = EOS_TOKEN  # never written: a puzzle comes first
    mask_token_id = MASK_TOKEN

    @staticmethod
    def fits(config: DenoiserConfig) -> bool:
        """Return True for the sizes of a Sudoku solver."""
        return (config.vocab_size, config.canvas_length) == (VOCAB_SIZE, NUM_CELLS)

    def encode(self, text: str, *, bos: bool = True, markers: bool = True) -> list[int]:
        cells = "".join(text.split()).replace(".", "0")
        is_text = all(cell in "0123456789" for cell in cells) and "0" not in cells[NUM_CELLS:]
        rule = f"be {NUM_CELLS} clues, with . for a blank, and then the digits of a solution"
        require(is_text and len(cells) <= 2 * NUM_CELLS, "SudokuTokenizer.encode text", rule, text)
        digits = [int(cell) for cell in cells]
        clues, solution = digits[:NUM_CELLS], digits[NUM_CELLS:]
        all_clues = prompt_tokens([clues + [0] * (NUM_CELLS - len(clues))])[0].tolist()
        return all_clues[: len(clues)] + (canvas_tokens([solution])[0].tolist() if solution else [])

    def token_id(self, token: str) -> int | None:
        return None

    @property
    def has_chat_template(self) -> bool:
        return False

    def save_pretrained(self, path: str | Path) -> NoReturn:
        raise ValueError("SudokuTokenizer has no files. A Sudoku solver is recognised by the sizes of its config.")

    def _decode(self, ids: list[int]) -> str:
        return "".join(map(token_text, ids))

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> NoReturn:
        raise ValueError("SudokuTokenizer.chat needs a chat template, got none. Pass a puzzle to encode.")
