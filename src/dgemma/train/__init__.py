"""Training: objectives, likelihood, adapters, optimizers, and a loop that resumes bit for bit.

| file | subject |
|---|---|
| `batch.py` | batches of text, their sources, and the thread that prepares them |
| `canvases.py` | cuts answers into canvases and adds noise |
| `one_pass.py` | predicts all canvases of a row in one pass |
| `own_tokens.py` | canvases that show tokens of the model in place of noise |
| `predictors.py` | predicts canvases for `evaluate`, of any denoiser |
| `head.py` | the tied head and its losses, one slice of tokens at a time |
| `losses.py` | the losses of a canvas: `CrossEntropy`, `LeaveOneOut`, `Bound`, and the base class of your own |
| `objective.py` | the objective as a value: `Objective` |
| `recipes.py` | the objectives of public recipes and papers; models prepared for training, balanced routers |
| `likelihood.py`, `estimates.py` | `evaluate`: the bound on text, with intervals and curves |
| `lora.py` | low-rank adapters: settings, adapted modules, files |
| `adapter_files.py` | adapters in PEFT's format |
| `learning` | learning from runs: rewards, reinforcement learning, distillation |
| `optimizer.py` | AdamW, Muon, the learning rate, averaged weights |
| `config.py` | `TrainConfig` |
| `loop.py` | `train` |
| `stopping.py` | Ctrl-C, and runs limited by minutes |
| `update.py` | one update of the weights |
| `log.py` | numbers per step, router load, `log.jsonl`, `TrainResult` |
| `trackers.py` | the log in TensorBoard, Weights & Biases or trackio |
| `checkpoints.py` | the folder of a run: lock, checkpoints, the description that a resumed run must match |
| `parallel.py` | training in one process, and the files of a checkpoint |
| `distributed.py` | training in many processes, with `FullySharded` |
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
