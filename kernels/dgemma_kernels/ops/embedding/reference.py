"""Token embedding in plain PyTorch, the reference for `kernel`."""

from torch import Tensor

from dgemma_kernels.ops.norms.reference import rms_norm


def embed(
    tokens: Tensor, table: Tensor, next_weight: Tensor, update: Tensor | None, *, scale: float, norm: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x = table[tokens] * scale + update, normed if `norm`, and norm(x) * next_weight. (M,) → (M, D) twice."""
    x = table[tokens] * scale
    if update is not None:
        x = x + update
    if norm:
        x = rms_norm(x, None, eps)
    return x, rms_norm(x, next_weight, eps)
