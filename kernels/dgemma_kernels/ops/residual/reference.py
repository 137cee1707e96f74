"""The residual stream of `Layer.feed_forward` in plain PyTorch. `training.fused.gradient_of` gives the gradients."""

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
