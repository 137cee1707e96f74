"""Training data: Sudoku, text files and a Markov chain, as `TrainBatch`es."""

from dgemma.data import corpus, markov, sudoku, text

__all__ = ["corpus", "markov", "sudoku", "text"]
