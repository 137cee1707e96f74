"""Sudoku: puzzles with one solution, their symmetries and splits, and their form as tokens."""

from dgemma.data.sudoku.completion import CompletedPuzzles, complete, is_solution, retry, sudoku_noise
from dgemma.data.sudoku.encoding import (
    DIGIT_TOKENS,
    MASK_TOKEN,
    NUM_CELLS,
    VOCAB_SIZE,
    SudokuSource,
    canvas_digits,
    canvas_tokens,
    prompt_tokens,
)
from dgemma.data.sudoku.puzzles import Puzzles, generate_puzzles, parse, split_of, to_text
from dgemma.data.sudoku.solver import solve
from dgemma.data.sudoku.symmetry import class_keys, equivalents, originals

__all__ = [
    "DIGIT_TOKENS",
    "MASK_TOKEN",
    "NUM_CELLS",
    "VOCAB_SIZE",
    "CompletedPuzzles",
    "Puzzles",
    "SudokuSource",
    "canvas_digits",
    "canvas_tokens",
    "class_keys",
    "complete",
    "equivalents",
    "generate_puzzles",
    "is_solution",
    "originals",
    "parse",
    "prompt_tokens",
    "retry",
    "solve",
    "split_of",
    "sudoku_noise",
    "to_text",
]
