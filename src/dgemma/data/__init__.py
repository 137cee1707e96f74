"""Data to train on: generated Sudoku and streamed text, as `TrainBatch`es."""

from dgemma.data import corpus, markov, sudoku, text

__all__ = ["corpus", "markov", "sudoku", "text"]
