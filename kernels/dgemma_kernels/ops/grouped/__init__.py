"""Products of tokens with the weights and adapters of their experts."""

from dgemma_kernels.ops.grouped.adapters import contract_and_outer
from dgemma_kernels.ops.grouped.kernel import ExpertProduct, calls_of_products, multiply_rows, multiply_tokens

__all__ = [
    "ExpertProduct",
    "calls_of_products",
    "contract_and_outer",
    "multiply_rows",
    "multiply_tokens",
]
