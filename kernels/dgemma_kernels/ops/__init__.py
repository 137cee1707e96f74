"""Kernels by operation, each with its PyTorch reference, and the tile shapes that they share."""
