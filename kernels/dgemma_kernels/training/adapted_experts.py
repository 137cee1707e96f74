"""Experts with adapters in training. The backward pass computes hidden values again, and not the output.

Reference: `AdaptedExperts.forward`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dgemma.doors import plain
from dgemma.model.experts import Routing
from dgemma.model.layers import gated_gelu, wide_dtype
from dgemma.quantization.weights import Weight
from dgemma.train.lora import AdaptedExperts
from dgemma_kernels.ops import grouped
from dgemma_kernels.training.adapted_linear import product_dtype, scaled_product
from dgemma_kernels.training.experts import (
    TiledGroups,
    combine,
    dispatch,
    group_by_expert,
    outer_by_group,
    product_by_group,
    sum_choices,
)
from dgemma_kernels.training.fused import fused, runs_kernels


@dataclass
class Kept:
    """Results of a layer's first pass that the recomputation uses. All are None until the first pass has set them."""

    experts: Tensor | None = None  # (M, A): the choices
    mixed: Tensor | None = None  # (M, D): the output of the experts
    narrow: Tensor | None = None  # (M, A, rank): the tokens times the first matrix of their experts' adapters
    attended: Tensor | None = None  # (M, D): the output of attention


def keeps_output(experts: nn.Module) -> bool:
    """Return True if a layer with these experts keeps results for its recomputation.

    Quantised weights are chosen to save memory, so nothing more is kept next to them. Weights spread over processes are
    there only during the forward.
    """
    if not isinstance(experts, AdaptedExperts):
        return False
    return type(experts.gate_up_proj) is type(experts.down_proj) is nn.Parameter


def forward(experts: AdaptedExperts, x: Tensor, routing: Routing, kept: Kept | None = None) -> Tensor:
    """Return the output of the experts; with `kept`, only its gradient is computed if it is known."""
    if not keeps_output(experts):
        return plain(AdaptedExperts.forward)(experts, x, routing)
    trained = trained_weights(experts)
    mixed: Tensor = _KeptOutput.apply(experts, kept or Kept(), x, routing.weights, routing.experts, *trained)
    return mixed


def narrow_of(experts: AdaptedExperts, x: Tensor, groups: TiledGroups) -> Tensor:
    """Return scale · A_e x of gate_up's adapter, for each expert e that a token chose: x (M, D) → (M, A, rank)."""
    # For small ranks, one product of all tokens with all experts' A is faster than thin products by expert.
    a = _all_experts(experts.gate_up_lora_a.to(x.dtype))
    return take(scaled_product(x, a.T, experts.lora.scale), groups)


def hidden_of(experts: AdaptedExperts, x: Tensor, narrow: Tensor, groups: TiledGroups) -> Tensor:
    """Return the hidden values (R, F) of tokens x (M, D), one row per choice, grouped by expert."""
    b = experts.gate_up_lora_b.to(x.dtype)
    return product_of_tokens(x, experts.gate_up_proj, _in_rows(narrow, groups), b, groups, gated=True)


def mix(experts: AdaptedExperts, hidden: Tensor, weights: Tensor, groups: TiledGroups, dtype: torch.dtype) -> Tensor:
    """Return the weighted sum (M, D) of each token's outputs, from hidden values (R, F) and weights (M, A)."""
    scale, down_a, down_b = (
        experts.lora.scale,
        *(each.to(hidden.dtype) for each in (experts.down_lora_a, experts.down_lora_b)),
    )
    narrow = product_by_group(hidden, down_a, groups.ends)
    rows = _product(hidden, experts.down_proj, (narrow * scale).to(hidden.dtype), down_b, groups)
    if rows is not None:
        return combine(rows, weights, groups, dtype)
    mixed = combine(product_by_group(hidden, experts.down_proj, groups.ends), weights, groups, dtype)
    narrow = (narrow * (_in_rows(weights, groups)[:, None] * scale)).to(hidden.dtype)
    # The other experts get zeros. So one product with the B of all experts gives the sum over a token's experts.
    spread = put(narrow, groups)  # (M, E · rank)
    b = _all_experts(down_b.mT)
    return mixed.addmm_(spread, b) if mixed.dtype == spread.dtype else mixed + spread @ b


class _KeptOutput(torch.autograd.Function):
    """The experts' output, whose gradient computes the hidden values again. The output itself is computed once."""

    @staticmethod
    def forward(
        ctx: Any, module: AdaptedExperts, kept: Kept, x: Tensor, weights: Tensor, experts: Tensor, *_: Tensor
    ) -> Tensor:
        groups = group_by_expert(experts, module.gate_up_proj.shape[0])
        if kept.mixed is None or kept.narrow is None:
            kept.narrow = narrow_of(module, x, groups)
            kept.mixed = mix(module, hidden_of(module, x, kept.narrow, groups), weights, groups, x.dtype)
        ctx.module, ctx.dtype = module, product_dtype(x)
        ctx.save_for_backward(x, kept.narrow, weights, *groups)
        return kept.mixed.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow, weights, *groups = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            of_x, of_weights, found = _gradients(ctx.module, grad, x, narrow, weights, TiledGroups(*groups), ctx.dtype)
        trained = [(name, weight) for name, weight in ctx.module.named_parameters() if weight.requires_grad]
        of_trained = [found[name].to(weight.dtype) for name, weight in trained]
        return None, None, of_x.to(x.dtype), of_weights, None, *of_trained


class _Narrow(NamedTuple):
    """Values between A and B of the adapters, (R, rank) each, and the routing weights (R,), grouped by expert.

    A name with `of_` is the gradient of what it names. `of_down` lacks the factor of the routing weights.
    """

    weights: Tensor
    up: Tensor
    of_down: Tensor
    weighted_of_down: Tensor


def _gradients(
    experts: AdaptedExperts,
    grad: Tensor,
    x: Tensor,
    narrow: Tensor,
    weights: Tensor,
    groups: TiledGroups,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the gradients of x (M, D), of the routing weights (M, A) and of the parameters that require one.

    grad: that of the experts' output (M, D). Hidden values are recomputed. The output is not needed: the gradient of
    the routing weights comes from `grad` times the transposed down weights. narrow: as from `narrow_of`. dtype: that of
    products. Each of the R rows is a choice; rows are grouped by expert.
    """
    x, grad = x.to(dtype), grad.to(dtype)
    weight = {name: value.to(dtype) for name, value in experts.named_parameters(recurse=False)}
    low, of_hidden = _down_gradient(experts, weight, grad, narrow.to(dtype), weights, groups)
    gate_and_up = product_of_tokens(x, weight["gate_up_proj"], low.up, weight["gate_up_lora_b"], groups)  # (R, 2F)
    hidden, of_gate_and_up, of_weights = geglu_gradient(gate_and_up, of_hidden, weights, groups.order)
    del gate_and_up, of_hidden
    of_x, found = _gate_up_gradient(experts, weight, of_gate_and_up, x, low.up, groups)
    found |= _down_adapter_gradient(experts, weight, grad, hidden, low, groups)
    if experts.gate_up_proj.requires_grad:
        found["gate_up_proj"] = outer_by_group(of_gate_and_up, dispatch(x, groups), groups.ends)
    if experts.down_proj.requires_grad:
        of_outputs = dispatch(grad, groups) * low.weights[:, None]
        found["down_proj"] = outer_by_group(of_outputs.to(dtype), hidden, groups.ends)
    return of_x, of_weights[groups.back], found


def _down_gradient(
    experts: AdaptedExperts,
    weight: dict[str, Tensor],
    grad: Tensor,
    narrow: Tensor,
    weights: Tensor,
    groups: TiledGroups,
) -> tuple[_Narrow, Tensor]:
    """Return narrow values, and the gradient of hidden values (R, F) without the factor of the routing weights."""
    product = scaled_product(grad, _all_experts(weight["down_lora_b"].mT).T, experts.lora.scale)
    of_choices = take(product, groups)  # (M, A, rank)
    low = _Narrow(*narrow_by_row(weights, narrow.flatten(0, 1), of_choices.flatten(0, 1), groups.order))
    down, a = weight["down_proj"].mT, weight["down_lora_a"].mT
    return low, product_of_tokens(grad, down, low.of_down, a, groups)


def _gate_up_gradient(
    experts: AdaptedExperts,
    weight: dict[str, Tensor],
    grad: Tensor,
    x: Tensor,
    narrow: Tensor,
    groups: TiledGroups,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the gradients of x (M, D) and of the adapter's A and B, from that of gate and up (R, 2F)."""
    a, b, gate_up = weight["gate_up_lora_a"], weight["gate_up_lora_b"], weight["gate_up_proj"]
    of_narrow = (product_by_group(grad, b.mT.contiguous(), groups.ends) * experts.lora.scale).to(grad.dtype)
    of_b = outer_by_group(grad, narrow, groups.ends)
    spread = put(of_narrow, groups)  # (M, E · rank)
    of_rows = _product(grad, gate_up.mT, of_narrow, a.mT, groups)
    if of_rows is not None:
        of_x = sum_choices(of_rows, groups.back)
    else:
        of_x = sum_choices(product_by_group(grad, gate_up.mT, groups.ends), groups.back)
        of_x.addmm_(spread, _all_experts(a))
    return of_x, {"gate_up_lora_a": (spread.T @ x).view_as(a), "gate_up_lora_b": of_b}


def _down_adapter_gradient(
    experts: AdaptedExperts,
    weight: dict[str, Tensor],
    grad: Tensor,
    hidden: Tensor,
    low: _Narrow,
    groups: TiledGroups,
) -> dict[str, Tensor]:
    """Return the gradients of A and B of the adapter of `down`."""
    a, b = weight["down_lora_a"], weight["down_lora_b"]
    factor = experts.lora.scale * low.weights[:, None]
    narrow = (product_by_group(hidden, a, groups.ends) * factor).to(hidden.dtype)
    of_a = outer_by_group(low.weighted_of_down, hidden, groups.ends)
    return {"down_lora_a": of_a, "down_lora_b": (put(narrow, groups).T @ grad).view_as(b.mT).mT}


def _all_experts(weights: Tensor) -> Tensor:
    """Return the rows (E · rank, D) of all experts' matrices (E, rank, D)."""
    return weights.flatten(0, 1)


def trained_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the module's parameters that require gradients.

    Example: `trained_weights(model.layers[0])`.
    """
    return [weight for weight in module.parameters() if weight.requires_grad]


def product_of_tokens(
    x: Tensor, weights: Weight, narrow: Tensor, b: Tensor, groups: TiledGroups, *, gated: bool = False
) -> Tensor:
    """Return x W_eᵀ + narrow B_eᵀ for each choice of an expert e by a token, in rows grouped by expert: (R, O).

    x (M, I), weights (E, O, I), b (E, O, rank); narrow (R, rank) is grouped by expert, too. If gated, `gated_gelu`
    makes the result (R, O / 2). On a Hopper GPU, one kernel computes it. It does not copy the tokens.
    """
    out = _product(x.contiguous(), weights, narrow, b, groups, groups.order, gated=gated)
    if out is not None:
        return out
    out = product_by_group(dispatch(x, groups), weights, groups.ends) + product_by_group(narrow, b, groups.ends)
    return gated_gelu(*out.chunk(2, dim=-1)) if gated else out


def _product(
    x: Tensor,
    weights: Weight,
    narrow: Tensor,
    b: Tensor,
    groups: TiledGroups,
    order: Tensor | None = None,
    *,
    gated: bool = False,
) -> Tensor | None:
    """Return `grouped.multiply`, or None while autograd is on, or if it does not support the GPU, dtypes or sizes."""
    if torch.is_grad_enabled() or not runs_kernels(x) or not isinstance(weights, Tensor) or groups.tiles is None:
        return None
    if not grouped.fits_product(x, weights, narrow, b):
        return None
    return grouped.multiply(x, weights, narrow, b, groups.tiles, order, gated=gated)


@fused
def geglu_gradient(wide: Tensor, pulled: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden values (R, F), gradients of gate and up (R, 2F), and those of the routing weights by row, (R,).

    pulled: the gradient of the hidden values (R, F), before it is multiplied by the routing weights (M, A).
    """
    hidden, pull_back = torch.func.vjp(plain(gated_gelu), *wide.chunk(2, dim=-1))  # type: ignore[misc]
    by_row, exact = weights.flatten()[order][:, None], pulled.to(wide_dtype(pulled))
    return hidden, torch.cat(pull_back((by_row * exact).to(hidden.dtype)), -1), (hidden * exact).sum(-1)


@fused
def narrow_by_row(
    weights: Tensor, narrow: Tensor, along: Tensor, order: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reorder the inputs from the order of the choices to the order of the rows.

    Return the routing weights (R,), then `narrow`, `along` and routing weights · `along`, each (R, rank).
    """
    by_row, along = weights.flatten()[order], along[order]
    return by_row, narrow[order], along, (along * by_row[:, None]).to(along.dtype)


def take(x: Tensor, groups: TiledGroups) -> Tensor:
    """From the values of all experts, (M, E · rank), return those of the chosen experts, (M, A, rank)."""
    return _take_choices(x.unflatten(1, (groups.ends.shape[0], -1)), groups.experts)


def put(rows: Tensor, groups: TiledGroups) -> Tensor:
    """Return (M, E · rank): each of the rows (R, rank) is copied to its token and the columns of its expert.

    All other values are 0. The rows are grouped by expert.
    """
    return _put_rows(rows, groups.experts, groups.order, groups.ends.shape[0]).flatten(1)


@fused
def _take_choices(x: Tensor, experts: Tensor) -> Tensor:
    return x[torch.arange(x.shape[0], device=x.device)[:, None], experts]


@fused
def _put_rows(rows: Tensor, experts: Tensor, order: Tensor, num_experts: int) -> Tensor:
    zeros = rows.new_zeros(experts.shape[0], num_experts, rows.shape[1])
    return zeros.index_put((order // experts.shape[1], experts.flatten()[order]), rows)


def _in_rows(values: Tensor, groups: TiledGroups) -> Tensor:
    """Return the values (M, A, …) of the choices in the order of the rows, (R, …)."""
    return values.flatten(0, 1)[groups.order]
