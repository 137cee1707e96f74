"""The router's choices, their weights and groups in plain PyTorch, the reference for `kernel`."""

import torch
from torch import Tensor


def choose_experts(logits: Tensor, scales: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities, and the weights and ids of the most likely experts."""
    experts = logits.softmax(-1).topk(top_k, dim=-1).indices
    return *weigh_choices(logits, experts, scales), experts


def weigh_choices(logits: Tensor, experts: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities, and the weights of given experts."""
    probabilities = logits.softmax(-1)
    chosen = probabilities.gather(-1, experts)
    return probabilities, chosen / chosen.sum(-1, keepdim=True) * scales[experts]


def weigh_choices_gradient(
    grad: Tensor, of_probabilities: Tensor | None, logits: Tensor, experts: Tensor, scales: Tensor
) -> Tensor:
    """Differentiate `weigh_choices`."""
    results, pull_back = torch.func.vjp(lambda logits: weigh_choices(logits, experts, scales), logits)  # type: ignore[misc]
    zeros = torch.zeros_like(results[0]) if of_probabilities is None else of_probabilities
    of_logits: Tensor = pull_back((zeros, grad))[0]
    return of_logits


def group_choices(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort by a stable sort, and count."""
    order = experts.flatten().sort(stable=True).indices
    back = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
    ends = experts.flatten().bincount(minlength=num_experts).cumsum(0).to(torch.int32)
    return order, back.view_as(experts), ends
