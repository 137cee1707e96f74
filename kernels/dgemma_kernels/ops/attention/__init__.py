"""Attention of new tokens over a cached prefix and themselves."""

from dgemma_kernels.ops.attention.kernel import AttentionTile, attention

__all__ = ["AttentionTile", "attention"]
