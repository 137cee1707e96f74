"""RMSNorm and the residual stream in plain PyTorch, the reference for `kernel`."""

import torch
from torch import Tensor

from dgemma_kernels.formats.float8 import Quantized, quantize
from dgemma_kernels.formats.fourbit import OrderedRows, order_rows
from dgemma_kernels.ops.norms.kernel import ResidualNorms, TailNorms


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x / rms(x), times `weight` unless None, in at least float32. x: (..., D), weight: (D,) → (..., D)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        wide = wide * weight.to(wide.dtype)
    return wide.to(x.dtype)


def round_rows(x: Tensor) -> Quantized:
    """Return rows (M, D) in float8, with one scale per row."""
    return quantize(x)


def scale_rows(
    x: Tensor,
    row_scale: Tensor,
    col_scale: Tensor | None = None,
    *,
    factor: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply x (M, D) by `factor`, by scales of its rows (M,), and by scales of its columns (D,) unless None."""
    scaled = x * (row_scale * factor)[:, None]
    return (scaled if col_scale is None else scaled * col_scale).to(dtype or x.dtype)


def attention_residual(
    attention: Tensor,
    residual: Tensor,
    norms: ResidualNorms,
    eps: float,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    float8: bool = False,
    float8_dense: bool = False,
    ordered: bool = False,
) -> tuple[Tensor, Tensor | Quantized, Tensor | Quantized | OrderedRows, Tensor]:
    """Return (x, dense input, expert input, router input) from the attention's output. All are (M, D)."""
    post_weight, dense_weight, expert_weight, router_scale = norms
    x = residual + rms_norm(_scale(attention, scales), post_weight, eps)
    router = rms_norm(x, None, eps) * router_scale * x.shape[-1] ** -0.5
    dense, expert = rms_norm(x, dense_weight, eps), rms_norm(x, expert_weight, eps)
    rows = order_rows(expert) if ordered else quantize(expert) if float8 else expert
    return x, quantize(dense) if float8_dense else dense, rows, router


def layer_tail(
    residual: Tensor,
    dense: Tensor,
    expert_rows: Tensor,
    norms: TailNorms,
    layer_scalar: Tensor,
    next_weight: Tensor,
    eps: float,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    float8: bool = False,
) -> tuple[Tensor, Tensor | Quantized]:
    """Return (x, next layer's normed input) from the dense output (M, D) and weighted expert rows (M, A, D)."""
    dense_weight, expert_weight, post_weight = norms
    wide = expert_rows.to(torch.promote_types(expert_rows.dtype, torch.float32))
    moe = wide.sum(-2).to(residual.dtype)
    both = rms_norm(_scale(dense, scales), dense_weight, eps) + rms_norm(moe, expert_weight, eps)
    x = (residual + rms_norm(both, post_weight, eps)) * layer_scalar[:, None]
    normed = rms_norm(x, next_weight, eps)
    return x, quantize(normed) if float8 else normed


def _scale(x: Tensor, scales: tuple[Tensor, Tensor] | None) -> Tensor:
    return x if scales is None else x * scales[0][:, None] * scales[1]
