"""The product of one row in plain PyTorch, the reference for `kernel`."""

from torch import Tensor


def multiply_row(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T. (1, K), (N, K) → (1, N)."""
    return x @ weight.T
