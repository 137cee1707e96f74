"""Moves the newest tokens of a sliding layer to the front of its buffer."""

from dgemma_kernels.ops.prefix.kernel import forget

__all__ = ["forget"]
