"""Kernels for a single token. Each replaces several launches of the path for many tokens."""

from dgemma_kernels.ops.token.kernel import choose_token, score_token

__all__ = ["choose_token", "score_token"]
