"""GeGLU and the dense MLP."""

from dgemma_kernels.ops.mlp.kernel import dense_mlp, gate_up_geglu, geglu, geglu_float8

__all__ = ["dense_mlp", "gate_up_geglu", "geglu", "geglu_float8"]
