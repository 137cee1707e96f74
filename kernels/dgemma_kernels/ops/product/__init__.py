"""Products that are slow in cuBLAS: of one row, or next to other kernels."""

from dgemma_kernels.ops.product.kernel import multiply_beside, multiply_row

__all__ = ["multiply_beside", "multiply_row"]
