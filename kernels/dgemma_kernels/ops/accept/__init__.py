"""Entropy-bound acceptance, renoising and the stop rule, in one launch."""

from dgemma_kernels.ops.accept.kernel import MAX_CANVAS, Accepted, accept

__all__ = ["MAX_CANVAS", "Accepted", "accept"]
