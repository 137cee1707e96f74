"""Token embedding, self-conditioning and the first norms."""

from dgemma_kernels.ops.embedding.kernel import embed

__all__ = ["embed"]
