"""Kernels by operation, each with its PyTorch reference, and the tile shapes and device functions that they share."""
