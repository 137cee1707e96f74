"""Products of the adapters of linear layers, with their gradients."""

from dgemma_kernels.ops.adapters.kernel import expand, expand_gradient, fits

__all__ = ["expand", "expand_gradient", "fits"]
