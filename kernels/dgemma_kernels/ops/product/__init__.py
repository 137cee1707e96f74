"""Products of one row with a weight, and products with a very long inner dimension."""

from dgemma_kernels.ops.product.kernel import multiply_beside, multiply_deep, multiply_row

__all__ = ["multiply_beside", "multiply_deep", "multiply_row"]
