"""Memory layout of the weights, for speed on a CPU."""

import torch
from torch import nn

from dgemma.model.experts import Experts


@torch.no_grad()
def lay_out_by_column(model: nn.Module) -> None:
    """Make the columns of every matrix contiguous, in place. Values and shapes do not change. For inference only.

    A layer multiplies by Wᵀ, and OpenBLAS copies W into that order at every call. On an ARM core this copy takes a
    fifth of a small model's step. The embedding is not changed, because tokens are looked up by row.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | Experts):
            for weight in module.parameters(recurse=False):
                weight.data = weight.mT.contiguous().mT
