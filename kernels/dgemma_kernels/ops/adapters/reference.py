"""Products of the adapters of linear layers in plain PyTorch, the reference for `kernel`."""

from collections.abc import Sequence

import torch
from torch import Tensor


def expand(narrow: Tensor, b: Tensor, widths: Sequence[int]) -> Tensor:
    """Multiply and concatenate."""
    parts = zip(narrow.chunk(len(widths), 1), b.split(list(widths)), strict=True)
    return torch.cat([part @ of_layer.T for part, of_layer in parts], 1)


def expand_gradient(
    grad: Tensor, narrow: Tensor, b: Tensor, widths: Sequence[int], *, scale: float
) -> tuple[Tensor, Tensor]:
    """Differentiate `expand`."""
    pull_back = torch.func.vjp(lambda narrow, b: expand(narrow, b, widths), narrow, b)[1]
    of_narrow, of_b = pull_back(grad)
    return scale * of_narrow, of_b
