"""Products of the adapters of linear layers, in training."""

from dgemma_kernels.ops.adapters.kernel import contract, contract_gradient, expand, expand_gradient, fits

__all__ = ["contract", "contract_gradient", "expand", "expand_gradient", "fits"]
