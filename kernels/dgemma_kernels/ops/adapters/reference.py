"""Products of the adapters of linear layers in plain PyTorch, the reference for `kernel`."""

from collections.abc import Sequence

import torch
from torch import Tensor


def expand(narrow: Tensor, b: Tensor, widths: Sequence[int]) -> Tensor:
    """Multiply and concatenate."""
    parts = zip(narrow.chunk(len(widths), 1), b.split(list(widths)), strict=True)
    return torch.cat([part @ of_layer.T for part, of_layer in parts], 1)
