"""Products that a library computes slowly: of one row, of a long inner dimension, or while other kernels run."""

from dgemma_kernels.ops.product.kernel import multiply_beside, multiply_deep, multiply_row

__all__ = ["multiply_beside", "multiply_deep", "multiply_row"]
