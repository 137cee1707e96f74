"""GeGLU and the dense MLP."""

from dgemma_kernels.ops.mlp.kernel import dense_mlp, geglu, geglu_float8

__all__ = ["dense_mlp", "geglu", "geglu_float8"]
