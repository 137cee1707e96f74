"""Head norms, rotation and cache write after the q, k, v product."""

from dgemma_kernels.ops.qkv.kernel import prepare_qkv

__all__ = ["prepare_qkv"]
