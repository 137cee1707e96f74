"""Products of tokens with the weights and adapters of their experts."""

from dgemma_kernels.ops.grouped.gates import gated_gradient
from dgemma_kernels.ops.grouped.kernel import multiply_rows, multiply_tokens

__all__ = ["gated_gradient", "multiply_rows", "multiply_tokens"]
