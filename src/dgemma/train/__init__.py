"""Training: objectives, likelihood, adapters, the loop."""

from dgemma.train import recipes
from dgemma.train.batch import BatchSource, TrainBatch
from dgemma.train.budget import train_for
from dgemma.train.likelihood import evaluate
from dgemma.train.loop import TrainConfig, TrainResult, train
from dgemma.train.lora import LoRA, add_lora, drop_lora, load_lora, merge_lora, save_lora
from dgemma.train.muon import muon
from dgemma.train.objective import Objective, Terms

__all__ = [
    "BatchSource",
    "LoRA",
    "Objective",
    "Terms",
    "TrainBatch",
    "TrainConfig",
    "TrainResult",
    "add_lora",
    "drop_lora",
    "evaluate",
    "load_lora",
    "merge_lora",
    "muon",
    "recipes",
    "save_lora",
    "train",
    "train_for",
]
