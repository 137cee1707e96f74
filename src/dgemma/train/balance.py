"""How evenly the routers load their experts, counted while the model runs."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dgemma.model.experts import Router, Routing


class RouterLoad:
    """Counts, per layer, how often each expert is chosen; compiled layers count too.

    Example: `load = RouterLoad(model)`, then `with load.watching(): model.encode(tokens); load.counts()`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routers = [module for module in model.modules() if isinstance(module, Router)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count while inside."""
        handles = []
        for router in self.routers:
            # A buffer of the module and one function for all: what was compiled in one run then counts in the next.
            scale = router.per_expert_scale  # may be spread over processes; each counts its own tokens
            counts = torch.zeros(scale.shape, dtype=torch.int64, device=scale.device)
            router.register_buffer("load", counts, persistent=False)
            handles.append(router.register_forward_hook(_count))
        try:
            yield
        finally:
            for router, handle in zip(self.routers, handles, strict=True):
                handle.remove()
                del router.load

    def counts(self) -> Tensor:
        """Choices of each expert since the last reset: (L, E) int64."""
        return torch.stack([_load(router) for router in self.routers])

    def reset(self) -> None:
        for router in self.routers:
            _load(router).zero_()


def summary(counts: Tensor) -> list[dict[str, Any]]:
    """Of counts (L, E), per layer: each expert's share of the choices, the least and the most, and their entropy over
    log E, which is 1 when all are equally busy."""
    layers = []
    for choices in counts.tolist():
        shares = [count / max(1, sum(choices)) for count in choices]
        entropy = -sum(share * math.log(share) for share in shares if share > 0)
        evenness = entropy / math.log(len(shares)) if len(shares) > 1 else 1.0
        layers.append({"min": min(shares), "max": max(shares), "evenness": evenness, "load": shares})
    return layers


def _count(router: nn.Module, inputs: Any, routing: Routing) -> None:
    load = _load(router)
    expert = torch.arange(load.shape[0], device=load.device)
    load.add_((routing.experts.reshape(-1, 1) == expert).sum(0))


def _load(router: nn.Module) -> Tensor:
    load = router.load
    assert isinstance(load, Tensor)
    return load
