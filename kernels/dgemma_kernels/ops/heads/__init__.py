"""Norms and rotations of heads in training, with their gradient."""

from dgemma_kernels.ops.heads.kernel import norm_heads, norm_heads_gradient

__all__ = ["norm_heads", "norm_heads_gradient"]
