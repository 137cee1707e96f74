"""Products of one row with a weight, and of a great depth."""

from dgemma_kernels.ops.product.kernel import multiply_deep, multiply_row

__all__ = ["multiply_deep", "multiply_row"]
