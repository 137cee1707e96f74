"""Products that are slow in cuBLAS: of one row, or next to other kernels."""
