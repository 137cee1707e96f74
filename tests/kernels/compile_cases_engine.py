"""The other kernels of the engine: embedding, draws, and the move of a window's newest tokens."""

import torch

from dgemma_kernels.ops.draws.kernel import uniform
from dgemma_kernels.ops.embedding.kernel import embed
from dgemma_kernels.ops.prefix.kernel import forget

WGMMA: set[str] = set()


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


def run_embed(update: torch.Tensor | None) -> None:
    tokens = empty(256, dtype=torch.int64)
    embed(tokens, empty(1024, 2816), empty(2816), update, scale=53.0, norm=update is not None, eps=1e-6)


def run_uniform() -> None:
    row = empty(2, dtype=torch.int64)
    uniform(row, row, row, 256, "token")


def run_forget() -> None:
    cache = empty(25, 1, 8, 2047, 256)
    forget(cache, cache, empty(1, dtype=torch.int64), 1023)


CALLS = {
    "embed": lambda: run_embed(None),
    "embed, self-conditioned": lambda: run_embed(empty(256, 2816)),
    "uniform": run_uniform,
    "forget": run_forget,
}
