"""Attention of new tokens over a cached prefix and themselves."""

from dgemma_kernels.ops.attention.float8 import attention_float8, float8_factor, float8_obstacle
from dgemma_kernels.ops.attention.kernel import AttentionTile, KernelChoice, KernelName, attention, choose_kernel

__all__ = [
    "AttentionTile",
    "KernelChoice",
    "KernelName",
    "attention",
    "attention_float8",
    "choose_kernel",
    "float8_factor",
    "float8_obstacle",
]
