"""Low-rank adapters (LoRA, arXiv:2106.09685), which can be merged into the weights.

A weight W (out, in) acts as W + scale · B A. A (rank, in) is random and B (out, rank) is zero, so training starts from
the unchanged model. Experts are 3-D weights, with an A and a B for each. The adapted modules keep their names and their
base weights. Adapters are additional parameters of those modules, saved separately. The base weights may be quantised
(QLoRA, arXiv:2305.14314).
"""

from dgemma.train.lora.adapters import (
    adapters_of,
    add_lora,
    drop_lora,
    is_adapted,
    load_lora,
    merge_lora,
    save_lora,
    without_adapters,
)
from dgemma.train.lora.experts import AdaptedExperts
from dgemma.train.lora.linear import AdaptedLinear, LoRA

__all__ = [
    "AdaptedExperts",
    "AdaptedLinear",
    "LoRA",
    "adapters_of",
    "add_lora",
    "drop_lora",
    "is_adapted",
    "load_lora",
    "merge_lora",
    "save_lora",
    "without_adapters",
]
