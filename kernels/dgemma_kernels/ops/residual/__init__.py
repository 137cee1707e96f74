"""Norms and the residual stream in training, with their gradients; the norms' weights are frozen."""

from dgemma_kernels.ops.residual.kernel import (
    after_attention_gradient,
    after_experts,
    after_experts_gradient,
    fits,
    rms_norm,
    rms_norm_gradient,
)

__all__ = [
    "after_attention_gradient",
    "after_experts",
    "after_experts_gradient",
    "fits",
    "rms_norm",
    "rms_norm_gradient",
]
