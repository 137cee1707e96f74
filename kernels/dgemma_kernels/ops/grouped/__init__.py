"""Products of tokens with the weights and adapters of their experts, and the groups of tokens by expert."""

from dgemma_kernels.ops.grouped.groups import fits_groups, group_choices
from dgemma_kernels.ops.grouped.kernel import fits_product, multiply

__all__ = ["fits_groups", "fits_product", "group_choices", "multiply"]
