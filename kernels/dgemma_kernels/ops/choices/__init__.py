"""Routing in training: choices of experts, their weights and the gradient of these, and choices grouped by expert."""

from dgemma_kernels.ops.choices.kernel import choose_experts, fits, group_choices, weigh_choices, weigh_choices_gradient

__all__ = ["choose_experts", "fits", "group_choices", "weigh_choices", "weigh_choices_gradient"]
