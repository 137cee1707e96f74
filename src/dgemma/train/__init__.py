"""Training: objectives, likelihood, adapters, optimizers, and a loop that resumes bit for bit.

Start with `loop.py` and `objective.py`.
"""

from dgemma.train import recipes
from dgemma.train.adapter_files import load_lora, save_lora
from dgemma.train.batch import BatchSource, TrainBatch
from dgemma.train.config import TrainConfig
from dgemma.train.likelihood import evaluate
from dgemma.train.log import TrainResult
from dgemma.train.loop import train
from dgemma.train.lora import LoRA, add_lora, drop_lora, merge_lora, share_weights
from dgemma.train.losses import Bound, CrossEntropy, LeaveOneOut, Loss
from dgemma.train.objective import Objective, RowMean, Terms
from dgemma.train.optimizer import muon
from dgemma.train.recipes import balanced_routers, soften_attention

__all__ = [
    "BatchSource",
    "Bound",
    "CrossEntropy",
    "LeaveOneOut",
    "LoRA",
    "Loss",
    "Objective",
    "RowMean",
    "Terms",
    "TrainBatch",
    "TrainConfig",
    "TrainResult",
    "add_lora",
    "balanced_routers",
    "drop_lora",
    "evaluate",
    "load_lora",
    "merge_lora",
    "muon",
    "recipes",
    "save_lora",
    "share_weights",
    "soften_attention",
    "train",
]
