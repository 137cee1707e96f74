"""Training: objectives, likelihood, adapters, the loop."""

from dgemma.train.batch import BatchSource, TrainBatch

__all__ = ["BatchSource", "TrainBatch"]
