"""Training data: Sudoku and text files, as `TrainBatch`es."""

from dgemma.data import corpus, sudoku, text

__all__ = ["corpus", "sudoku", "text"]
