"""Products in plain PyTorch, the reference for `kernel`."""

from torch import Tensor

from dgemma_kernels.formats.float8 import Quantized


def multiply_row(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T. (1, K), (N, K) → (1, N)."""
    return x @ weight.T


def multiply_beside(x: Quantized, weight: Quantized) -> Tensor:
    """Return the product of the values in float64, rounded. (M, K), (N, K) → (M, N)."""
    return (x.values.double() @ weight.values.double().T).to(x.dtype)
