"""GeGLU and the dense MLP."""

from dgemma_kernels.ops.mlp.kernel import dense_mlp, gate_up_geglu, geglu

__all__ = ["dense_mlp", "gate_up_geglu", "geglu"]
