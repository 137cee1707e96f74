"""Data to train on: generated Sudoku and streamed text, as `TrainBatch`es."""
