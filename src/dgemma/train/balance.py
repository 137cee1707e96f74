"""A loss that makes the experts' loads equal (Switch Transformers, arXiv:2101.03961).

Without it, a router soon prefers the experts that happened to learn first, and the others are never trained.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dgemma.model.experts import Router, Routing


@contextmanager
def balanced_routers(model: nn.Module, weight: float) -> Iterator[None]:
    """Add the gradient of weight · E · Σ_e (share of e) · (mean probability of e) per router to every backward pass.

    The share counts the choices of a forward pass and has no gradient. The sum is smallest when all E experts are
    chosen equally often. The reported losses do not contain it.

    Example: `with balanced_routers(model, 0.01): train(model, objective, source, config, out="run")`.
    """
    if not weight >= 0:
        raise ValueError(f"balanced_routers weight must be at least 0, got {weight}. 0.01 is usual.")
    hook = partial(_balance, weight=weight)
    handles = [
        module.register_forward_hook(hook) for module in model.modules() if isinstance(module, Router) and weight
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _balance(router: nn.Module, inputs: Any, routing: Routing, *, weight: float) -> Routing:
    num_tokens, num_experts = routing.probabilities.shape
    expert = torch.arange(num_experts, device=routing.experts.device)
    share = (routing.experts.reshape(-1, 1) == expert).to(routing.probabilities.dtype).mean(0)  # (E,)
    slope = (share * (weight * num_experts / max(1, num_tokens))).expand(num_tokens, num_experts)
    weights = _WithSlope.apply(routing.weights, routing.probabilities, slope)
    return routing._replace(weights=weights)


class _WithSlope(torch.autograd.Function):
    """Return the weights unchanged; in the backward pass, add `slope` to the gradient of the probabilities."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, probabilities: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return weights.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (slope,) = ctx.saved_tensors
        return grad, slope, None
