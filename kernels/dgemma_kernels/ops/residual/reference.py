"""Norms and the residual stream of `Layer.feed_forward`, and their gradients by automatic differentiation."""

import torch
from torch import Tensor

from dgemma.model.experts import router_input
from dgemma.model.layers import rms_norm


def after_attention(
    x: Tensor,
    attended: Tensor,
    post_norm: Tensor,
    dense_norm: Tensor,
    experts_norm: Tensor,
    router_scale: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the residual and the inputs of the dense MLP, of the experts and of the router, (M, D) each."""
    residual = x + rms_norm(attended, post_norm, eps)
    dense, experts = (rms_norm(residual, norm, eps) for norm in (dense_norm, experts_norm))
    return residual, dense, experts, router_input(residual, router_scale, eps)


def after_experts(
    residual: Tensor,
    dense: Tensor,
    mixed: Tensor,
    dense_norm: Tensor,
    experts_norm: Tensor,
    post_norm: Tensor,
    scalar: Tensor,
    eps: float,
) -> Tensor:
    """Return the layer's output (M, D) from the residual and the outputs of the dense MLP and of the experts."""
    both = rms_norm(dense, dense_norm, eps) + rms_norm(mixed, experts_norm, eps)
    return (residual + rms_norm(both, post_norm, eps)) * scalar


def rms_norm_gradient(
    grad: Tensor, x: Tensor, weight: Tensor | None, eps: float, added: Tensor | None = None
) -> tuple[Tensor]:
    """Differentiate `rms_norm`."""
    (of_x,) = torch.func.vjp(lambda x: rms_norm(x, weight, eps), x)[1](grad)
    return (of_x if added is None else of_x + added,)


def after_attention_gradient(
    of_residual: Tensor,
    of_dense: Tensor,
    of_experts: Tensor,
    of_routed: Tensor,
    x: Tensor,
    attended: Tensor,
    post_norm: Tensor,
    dense_norm: Tensor,
    experts_norm: Tensor,
    router_scale: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Differentiate the function after attention."""
    weights = post_norm, dense_norm, experts_norm, router_scale

    def run(x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return after_attention(x, attended, *weights, eps)

    found: tuple[Tensor, Tensor] = torch.func.vjp(run, x, attended)[1]((of_residual, of_dense, of_experts, of_routed))
    return found


def after_experts_gradient(
    grad: Tensor,
    residual: Tensor,
    dense: Tensor,
    mixed: Tensor,
    dense_norm: Tensor,
    experts_norm: Tensor,
    post_norm: Tensor,
    scalar: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate the function after the experts."""

    def run(residual: Tensor, dense: Tensor, mixed: Tensor) -> Tensor:
        return after_experts(residual, dense, mixed, dense_norm, experts_norm, post_norm, scalar, eps)

    found: tuple[Tensor, Tensor, Tensor] = torch.func.vjp(run, residual, dense, mixed)[1](grad)
    return found
