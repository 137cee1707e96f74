"""Norms and rotations of heads, with their gradient, in training."""

from dgemma_kernels.ops.heads.kernel import HeadInputs, norm_heads, norm_heads_gradient

__all__ = ["HeadInputs", "norm_heads", "norm_heads_gradient"]
