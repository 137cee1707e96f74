"""The mixture of experts: a router that reads the raw residual, and the experts it chooses."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.doors import replaceable
from dgemma.model.config import ModelConfig
from dgemma.model.layers import gated_gelu, rms_norm, wide_dtype
from dgemma.quantization.weights import QuantizedWeight, Weight, decoded_product


class Routing(NamedTuple):
    """The routing of M tokens: probabilities (M, E) of all experts; weights and ids (M, A) of the chosen experts."""

    probabilities: Tensor
    weights: Tensor
    experts: Tensor


class Groups(NamedTuple):
    """The R = M·A choices of M tokens, sorted by expert, so that the rows of an expert are neighbours."""

    experts: Tensor  # (M, A): the choices themselves
    order: Tensor  # (R,): the choice of each row, counted as token · A + a
    back: Tensor  # (M, A): the row of each choice
    ends: Tensor  # (E,) int32: where the rows of each expert end


class Router(nn.Module):
    """Scaleless norm → scale → linear → float32 softmax → top A, renormalised → per-expert scale."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k, self.eps = config.top_k_experts, config.rms_norm_eps
        self.proj = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(config.num_experts))

    def forward(self, residual: Tensor) -> Routing:
        """Route the residual (M, D), before any norm. A normed input would break the routing without an error."""
        logits = self.proj(router_input(residual, self.scale, self.eps))
        return choose_experts(logits, self.per_expert_scale, self.top_k)


@replaceable
def router_input(residual: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return the normalised and scaled residual (M, D), the input of the router's product."""
    return rms_norm(residual, None, eps) * scale * residual.shape[-1] ** -0.5


@replaceable
def choose_experts(logits: Tensor, scales: Tensor, top_k: int) -> Routing:
    """Choose the `top_k` most likely experts of each token; logits (M, E), scales (E,) of the experts' weights."""
    probabilities = logits.softmax(-1, dtype=wide_dtype(logits))
    return weigh_choices(probabilities, scales, probabilities.detach().topk(top_k, dim=-1).indices)


def weigh_choices(probabilities: Tensor, scales: Tensor, experts: Tensor) -> Routing:
    """Return the routing to chosen experts (M, A)."""
    weights = probabilities.gather(-1, experts)
    scale = scales.expand_as(probabilities).gather(-1, experts)
    return Routing(probabilities, weights / weights.sum(-1, keepdim=True) * scale, experts)


class Experts(nn.Module):
    """E gated MLPs as two 3-D tensors, or as two quantised weights."""

    gate_up_proj: Weight  # (E, 2F, D)
    down_proj: Weight  # (E, D, F)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Return Σ_a weight · expert_a(x) over each token's chosen experts: x (M, D) → (M, D)."""
        groups = group_by_expert(routing.experts, self.gate_up_proj.shape[0])
        gate_up = self.gate_up(dispatch(x, groups), groups.ends)
        outputs = self.down(gated_gelu(*gate_up.chunk(2, dim=-1)), groups.ends)
        return combine(outputs, routing.weights, groups, x.dtype)

    def gate_up(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return gate and up (R, 2F) of rows (R, D) grouped by expert; the group of expert e ends at ends[e]."""
        return product_by_group(rows, self.gate_up_proj, ends)

    def down(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return the outputs (R, D) of rows (R, F) grouped by expert."""
        return product_by_group(rows, self.down_proj, ends)


@replaceable
def group_by_expert(experts: Tensor, num_experts: int) -> Groups:
    """Sort choices (M, A) by expert. Nothing is counted on the host."""
    sorted_experts, order = experts.flatten().sort(stable=True)
    expert = torch.arange(num_experts, dtype=experts.dtype, device=experts.device)
    ends = torch.searchsorted(sorted_experts, expert, right=True, out_int32=True)
    return Groups(experts, order, order.argsort().view_as(experts), ends)


@replaceable
def dispatch(tokens: Tensor, groups: Groups) -> Tensor:
    """Copy every token once per chosen expert, grouped by expert: (M, D) → (R, D)."""
    # Not tokens[order // A], whose backward adds rows in any order on a GPU. This one sums a token's choices in order.
    return tokens.repeat_interleave(groups.experts.shape[1], dim=0).index_select(0, groups.order)


@replaceable
def combine(rows: Tensor, weights: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    """Return the weighted sum of the rows of each token's experts: (R, D) and weights (M, A) → (M, D).

    The sum is in float32 and in the order of choice, so that the result does not depend on scheduling.
    """
    of_choices = rows.index_select(0, groups.back.flatten()).unflatten(0, groups.back.shape)  # (M, A, D)
    return (of_choices.to(wide_dtype(rows)) * weights[..., None]).sum(1).to(dtype)


@replaceable
def product_by_group(rows: Tensor, weights: Weight, ends: Tensor) -> Tensor:
    """Multiply the rows of group e by weights[e]ᵀ: rows (R, I), weights (E, O, I), ends (E,) → (R, O)."""
    if isinstance(weights, QuantizedWeight):
        return decoded_product(rows, weights, lambda rows, decoded: product_by_group(rows, decoded, ends))
    if torch.is_autocast_enabled(rows.device.type):  # autocast does not cover the grouped product
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weights = rows.to(dtype), weights.to(dtype)
    if not supports_grouped(weights.shape[1:], weights.dtype):
        return looped_product(rows, weights, ends)
    if torch.compiler.is_compiling():
        return grouped_product(rows, weights, ends)
    return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


@torch.library.custom_op("dgemma::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Compute torch's grouped product as an operator. torch traces its own in bfloat16 only, but runs it in float32."""
    return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


@grouped_product.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


def looped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Compute `product_by_group` by a loop over groups: its definition, and the fallback of torch's grouped product."""
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.cat([group @ weight.T for group, weight in zip(rows.split(sizes), weights, strict=True)])


def supports_grouped(widths: torch.Size, dtype: torch.dtype) -> bool:
    """Return True if torch's grouped product supports weights with sides of these widths in this dtype.

    The dtype must have 16 or 32 bits. Both sides must have a multiple of 16 bytes.
    """
    return dtype in (torch.float32, torch.bfloat16, torch.float16) and all(
        size * dtype.itemsize % 16 == 0 for size in widths
    )
