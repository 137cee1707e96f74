"""Attention of new tokens over a cached prefix and themselves."""

from dgemma_kernels.ops.attention.kernel import AttentionTile, KernelChoice, KernelName, attention, choose_kernel

__all__ = ["AttentionTile", "KernelChoice", "KernelName", "attention", "choose_kernel"]
