"""Each token's experts, and the (token, expert) pairs sorted into tiles."""

from dgemma_kernels.ops.router.kernel import ExpertTiles, route, sort_by_expert

__all__ = ["ExpertTiles", "route", "sort_by_expert"]
