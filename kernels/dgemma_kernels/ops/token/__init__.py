"""Launches of a single token that replace several of those for many tokens."""

from dgemma_kernels.ops.token.kernel import choose_token, score_token, settle_token

__all__ = ["choose_token", "score_token", "settle_token"]
