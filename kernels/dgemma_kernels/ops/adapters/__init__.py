"""Products of the adapters of linear layers, in training."""

from dgemma_kernels.ops.adapters.kernel import expand, fits

__all__ = ["expand", "fits"]
