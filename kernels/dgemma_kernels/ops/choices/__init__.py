"""The router's choices of experts, their weights with the gradient, and their groups by expert, in training."""

from dgemma_kernels.ops.choices.kernel import choose_experts, fits, group_choices, weigh_choices, weigh_choices_gradient

__all__ = ["choose_experts", "fits", "group_choices", "weigh_choices", "weigh_choices_gradient"]
