"""Kernels for a single token. Each replaces several launches that many tokens need."""

from dgemma_kernels.ops.token.kernel import choose_token, score_token, settle_token

__all__ = ["choose_token", "score_token", "settle_token"]
