"""The two products of the mixture of experts."""

from dgemma_kernels.ops.experts.kernel import (
    expert_down,
    expert_gate_up,
    fits_many,
    float8_obstacle,
    multiply_experts,
)

__all__ = ["expert_down", "expert_gate_up", "fits_many", "float8_obstacle", "multiply_experts"]
