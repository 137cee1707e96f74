"""How evenly the routers load their experts, seen while the model runs."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dgemma.model.experts import Router, Routing


class RouterLoad:
    """Counts, per layer, how often each expert is chosen: `counts` (L, E).

    Example: `load = RouterLoad(model)`, then `with load.watching(): model.encode(tokens)`, then `load.summary()`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        self.counts = torch.zeros(0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count anew. Compiled layers run uncompiled meanwhile, since a compiled one calls no new hook."""
        counts = [torch.zeros(router.per_expert_scale.shape, device=router.scale.device) for router in self.routers]

        def count(total: Tensor) -> Any:
            def hook(router: nn.Module, inputs: Any, routing: Routing) -> None:
                expert = torch.arange(total.shape[0], device=total.device)
                total.add_((routing.experts.reshape(-1, 1) == expert).sum(0))

            return hook

        handles = [router.register_forward_hook(count(c)) for router, c in zip(self.routers, counts, strict=True)]
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for handle in handles:
                handle.remove()
        self.counts = torch.stack(counts)

    def summary(self) -> list[dict[str, Any]]:
        """Per layer: each expert's share of the choices, the least and the most, and their entropy over log E, 1 when
        all are equally busy."""
        layers = []
        for counts in self.counts.tolist():
            shares = [count / max(1.0, sum(counts)) for count in counts]
            entropy = -sum(share * math.log(share) for share in shares if share > 0)
            evenness = entropy / math.log(len(shares)) if len(shares) > 1 else 1.0
            layers.append({"min": min(shares), "max": max(shares), "evenness": evenness, "load": shares})
        return layers
