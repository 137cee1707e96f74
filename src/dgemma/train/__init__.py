"""Training: objectives, likelihood, adapters, the loop."""

from dgemma.train.batch import BatchSource, TrainBatch
from dgemma.train.objective import Objective, Terms

__all__ = ["BatchSource", "Objective", "Terms", "TrainBatch"]
