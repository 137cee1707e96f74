"""The product of one row."""

from dgemma_kernels.ops.product.kernel import multiply_row

__all__ = ["multiply_row"]
