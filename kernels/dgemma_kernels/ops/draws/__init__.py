"""Counter-based uniform random numbers."""

from dgemma_kernels.ops.draws.kernel import uniform

__all__ = ["uniform"]
