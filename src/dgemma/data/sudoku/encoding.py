"""Sudoku as tokens: the puzzle is the prompt and the solution is the canvas, with one token per cell in both.

A prompt token encodes its cell and its clue, because the model has no absolute positions. Cell i of the canvas is 81
tokens after cell i of the prompt. The canvas uses nine digit tokens, and clues may be frozen on it. For tools that work
on texts, `SudokuTokenizer` writes 81 characters of the puzzle, then 81 digits of the solution.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import Probability, above, check_types, require, require_field, typed
from dgemma.data.sudoku.puzzles import Puzzles
from dgemma.data.sudoku.solver import read_digits
from dgemma.data.sudoku.symmetry import NUM_UNIFORMS, equivalents
from dgemma.diffusion import draws
from dgemma.model.config import DenoiserConfig
from dgemma.train.batch import TrainBatch

NUM_CELLS = 81
PAD_TOKEN, EOS_TOKEN, MASK_TOKEN = 0, 1, 4  # as in the published vocabulary
_FIRST_DIGIT = 4  # the digit d is token 4 + d
_FIRST_CLUE = 14  # cell c with the clue d (0 for none) is token 14 + 10 c + d
VOCAB_SIZE = _FIRST_CLUE + 10 * NUM_CELLS
DIGIT_TOKENS = tuple(range(_FIRST_DIGIT + 1, _FIRST_DIGIT + 10))


def prompt_tokens(puzzles: Any) -> Tensor:
    """Return the prompts (B, 81) of puzzles (B, 81), 0 for a blank."""
    puzzles = read_digits("prompt_tokens puzzles", puzzles)
    return _FIRST_CLUE + 10 * torch.arange(NUM_CELLS, device=puzzles.device) + puzzles


def canvas_tokens(digits: Any) -> Tensor:
    """Return canvas tokens (B, 81) of digits (B, 81); a blank is -1, which `generate` fills with noise."""
    digits = read_digits("canvas_tokens digits", digits)
    return torch.where(digits > 0, _FIRST_DIGIT + digits, -1)


@typed
def canvas_digits(tokens: Tensor) -> Tensor:
    """Return the digits 1 to 9 of canvas tokens (B, 81), 0 for any other token."""
    require(tokens.dtype != torch.bool, "canvas_digits tokens", "be token ids", tokens)
    digits = tokens - _FIRST_DIGIT
    return torch.where((digits >= 1) & (digits <= 9), digits, 0)


def token_text(token: int) -> str:
    """Return a token as text: a digit, "." for a blank clue, or ""; a space follows each row of the prompt."""
    if token < _FIRST_CLUE:
        return str(token - _FIRST_DIGIT) if token in DIGIT_TOKENS else ""
    cell, clue = divmod(token - _FIRST_CLUE, 10)
    return (str(clue) if clue else ".") + (" " if cell % 9 == 8 else "")


@dataclass(frozen=True, kw_only=True)
class SudokuSource:
    """Endless training batches from a pool of puzzles: a `BatchSource`, a pure function of (seed, step, row).

    Each row is a random equivalent of a puzzle from the pool. The number of clues is drawn from `givens` as lowest +
    span · u^skew, so a larger `skew` gives fewer clues. If the puzzle has fewer, digits of its solution become clues.
    In a share `frozen_share` of the rows, clues are frozen on the canvas; in the others the model must write them as
    well.

    Example: `SudokuSource(pool=generate_puzzles(1024, givens=24, exact=False))(0, range(256)).tokens`.
    """

    pool: Puzzles
    seed: int = 0
    givens: tuple[int, int] = (24, 45)
    skew: Annotated[float, above(0)] = 2.0
    frozen_share: Probability = 0.8

    def __post_init__(self) -> None:
        check_types(self)
        low, high = self.givens
        require_field(17 <= low <= high <= NUM_CELLS, self, "givens", "be (lowest, highest) within 17 to 81")

    def __call__(self, step: int, rows: range) -> TrainBatch:
        sample = self.sample(step, rows)
        return TrainBatch(
            tokens=torch.cat([prompt_tokens(sample.puzzle), canvas_tokens(sample.solution)], dim=1),
            prompt_len=torch.full((len(rows),), NUM_CELLS),
            length=torch.full((len(rows),), 2 * NUM_CELLS),
            frozen=torch.cat([torch.zeros_like(sample.frozen), sample.frozen], dim=1),
            spans=((NUM_CELLS, 2 * NUM_CELLS),) * len(rows),
        )

    def sample(self, step: int, rows: range) -> "Sample":
        """Return the rows as digits, for callers that encode them as other tokens.

        Example: `source.sample(0, range(8)).puzzle`.
        """
        row = torch.arange(rows.start, rows.stop, rows.step)
        seeds, clock = torch.full_like(row, self.seed), torch.full_like(row, step)
        pick, more, freeze = draws.uniform(seeds, clock, row, 3, "puzzle").unbind(1)
        chosen = draws.integers(pick, len(self.pool)).numpy()
        both = torch.stack([torch.from_numpy(a[chosen]) for a in (self.pool.puzzles, self.pool.solutions)], dim=1)
        moves = draws.uniform(seeds, clock, row, NUM_UNIFORMS, "symmetry")
        puzzle, solution = equivalents(both, moves).long().unbind(1)  # (B, 81) each
        low, high = self.givens
        num_givens = low + draws.integers(more**self.skew, high - low + 1)
        # The solution stays unique with more clues.
        order = draws.uniform(seeds, clock, row, NUM_CELLS, "clues").masked_fill(puzzle > 0, -1.0)
        is_clue = (order.argsort(1).argsort(1) < num_givens[:, None]) | (puzzle > 0)
        return Sample(torch.where(is_clue, solution, 0), solution, is_clue & (freeze < self.frozen_share)[:, None])


class Sample(NamedTuple):
    """Puzzles (B, 81), 0 for a blank, their solutions (B, 81), and which cells of the canvas are frozen (B, 81)."""

    puzzle: Tensor
    solution: Tensor
    frozen: Tensor


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

    def save_pretrained(self, path: str | Path) -> None:
        """Write nothing: a Sudoku solver is recognised by the sizes of its config."""

    def _decode(self, ids: list[int]) -> str:
        return "".join(map(token_text, ids))

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> NoReturn:
        raise ValueError("SudokuTokenizer.chat needs a chat template, got none. Pass a puzzle to encode.")


def load_tokenizer(path_or_repo: str | Path, config: DenoiserConfig) -> Tokenizer:
    """Return the tokenizer of a checkpoint with this config, also of a Sudoku solver, which has no tokenizer files."""
    return SudokuTokenizer() if SudokuTokenizer.fits(config) else Tokenizer.from_pretrained(path_or_repo)
