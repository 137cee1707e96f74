"""Routing, rows grouped by expert and their products in training. Reference: `dgemma.model.experts`."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.doors import plain
from dgemma.model import experts as reference
from dgemma.model.experts import Experts, Groups, Routing, grouped_product, looped_product, supports_grouped
from dgemma.model.layers import wide_dtype
from dgemma.quantization.weights import QuantizedWeight, Weight, decoded_product
from dgemma_kernels.ops import grouped
from dgemma_kernels.training.fused import fused, runs_kernels

_FEW = 16  # experts; for so few, comparing all of them is faster than sorting


class TiledGroups(NamedTuple):
    """`Groups`, and tiles for kernels: each tile is some rows of one expert, see `ops.grouped.group_choices`."""

    experts: Tensor
    order: Tensor
    back: Tensor
    ends: Tensor
    tiles: Tensor | None = None


class _Known(NamedTuple):
    """Results that a router need not compute: its input (M, D), and in a recomputation the experts (M, A) it chose."""

    routed: Tensor
    chosen: Tensor | None


_known: ContextVar[_Known | None] = ContextVar("_known", default=None)


@contextmanager
def known(routed: Tensor, chosen: Tensor | None) -> Iterator[None]:
    """Let a router use these values within the context. It is still called as a module, because it may have hooks.

    Example: `with known(routed, None): routing = layer.router(residual)`.
    """
    token = _known.set(_Known(routed, chosen))
    try:
        yield
    finally:
        _known.reset(token)


def router_input(residual: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return the input that `known` has, or compute it."""
    now = None if torch.compiler.is_compiling() else _known.get()
    return _router_input(residual, scale, eps) if now is None else now.routed


_router_input = fused(plain(reference.router_input))


def choose_experts(logits: Tensor, scales: Tensor, top_k: int) -> Routing:
    """Choose experts, unless `known` has them, and weigh them by one function with its own gradient."""
    now = None if torch.compiler.is_compiling() else _known.get()
    experts = now.chosen if now is not None and now.chosen is not None else _most_likely(logits.detach(), top_k)
    return Routing(*_weigh(logits, experts, scales), experts)


def _most_likely(logits: Tensor, top_k: int) -> Tensor:
    num_experts = logits.shape[-1]
    if num_experts > _FEW or not torch.compiler.is_compiling():
        return logits.topk(top_k, dim=-1).indices
    # Compiled layers contain these comparisons; `topk` takes five kernels.
    expert, chosen = torch.arange(num_experts, device=logits.device), []
    for _ in range(top_k):
        chosen.append(logits.argmax(-1, keepdim=True))
        logits = logits.masked_fill(chosen[-1] == expert, -torch.inf)
    return torch.cat(chosen, -1)


@fused
def _weigh(logits: Tensor, experts: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities (M, E) and the weights (M, A) of chosen experts (M, A).

    Comparisons and sums fuse into one kernel, and those of the gradient into another; `gather` would not.
    """
    probabilities = logits.softmax(-1, dtype=wide_dtype(logits))
    is_chosen = experts[..., None] == torch.arange(logits.shape[-1], device=logits.device)  # (M, A, E)
    weights, scale = (
        torch.where(is_chosen, of_all, 0.0).sum(-1)
        for of_all in (probabilities[:, None], scales.to(probabilities.dtype))
    )
    return probabilities, weights / weights.sum(-1, keepdim=True) * scale


def group_by_expert(experts: Tensor, num_experts: int) -> TiledGroups:
    """Sort choices by a kernel; in compiled layers, by counting if there are few experts."""
    if runs_kernels(experts) and grouped.fits_groups(num_experts) and experts.numel():
        return TiledGroups(experts, *grouped.group_choices(experts.contiguous(), num_experts))
    count = torch.arange(experts.numel(), device=experts.device)
    if num_experts == 1:  # nothing to sort
        ends = torch.full((1,), experts.numel(), dtype=torch.int32, device=experts.device)
        return TiledGroups(experts, count, count.view_as(experts), ends)
    if not experts.numel() or num_experts > _FEW:
        return TiledGroups(*plain(reference.group_by_expert)(experts, num_experts))
    chosen, expert = experts.flatten(), torch.arange(num_experts, device=experts.device)
    is_chosen = chosen == expert[:, None]  # (E, R)
    # A running count over the choices of expert 0, then of expert 1 and so on, gives each choice its row.
    counted = is_chosen.flatten().cumsum(0, dtype=torch.int32)
    back = counted[chosen * chosen.shape[0] + count].long() - 1
    order = torch.empty_like(back).scatter(0, back, count)
    return TiledGroups(experts, order, back.view_as(experts), counted.view_as(is_chosen)[:, -1].contiguous())


def dispatch(tokens: Tensor, groups: Groups | TiledGroups) -> Tensor:
    """Copy tokens by a function with its own gradient; no copy if there is one expert."""
    if groups.ends.shape[0] == 1 and groups.back.shape[1] == 1:
        return tokens
    rows: Tensor = _Dispatch.apply(tokens, groups.order, groups.back)
    return rows


def combine(rows: Tensor, weights: Tensor, groups: Groups | TiledGroups, dtype: torch.dtype) -> Tensor:
    """Add rows by a function with its own gradient."""
    mixed: Tensor = _Combine.apply(rows, weights, groups.order, groups.back, dtype)
    return mixed


class _Dispatch(torch.autograd.Function):
    """Defines its own gradient, because the gradient of indexing would sort the rows again and add them one by one."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return _copy_rows(tokens, order, back.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return sum_choices(grad, *ctx.saved_tensors), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, back: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(rows, weights, order, back)
        return _sum_weighted(rows, weights, back, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        return *_grad_of_weighted(grad, *ctx.saved_tensors), None, None, None


@fused
def _copy_rows(tokens: Tensor, order: Tensor, top_k: int) -> Tensor:
    return tokens[order // top_k]


@fused
def sum_choices(rows: Tensor, back: Tensor) -> Tensor:
    return rows[back].sum(1)


@fused
def _sum_weighted(rows: Tensor, weights: Tensor, back: Tensor, dtype: torch.dtype) -> Tensor:
    mixed = (rows[back].to(wide_dtype(rows)) * weights[..., None]).sum(1)
    # torch 2.11 compiles a function that ends with a cast to the same dtype with a gradient of zero.
    return mixed if mixed.dtype == dtype else mixed.to(dtype)


@fused
def _grad_of_weighted(
    grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor, back: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows (R, D) and of the weights (M, A), from that of the sums (M, D)."""
    spread = grad[order // back.shape[1]].to(wide_dtype(rows))
    of_rows = spread * weights.flatten()[order][:, None]
    return of_rows.to(rows.dtype), (spread * rows).sum(1)[back].to(weights.dtype)


def waits(experts: Experts, dtype: torch.dtype) -> bool:
    """Return True if products in this dtype read the groups' sizes on the host, which a CUDA graph cannot capture.

    Example: `waits(model.layers[0].experts, torch.bfloat16)`.
    """
    weights = experts.gate_up_proj, experts.down_proj
    return weights[0].shape[0] > 1 and not all(supports_grouped(weight.shape[1:], dtype) for weight in weights)


def product_by_group(rows: Tensor, weights: Weight, ends: Tensor) -> Tensor:
    """Multiply by an operator that torch can trace, and that keeps no rows for frozen weights."""
    if isinstance(weights, QuantizedWeight):
        return decoded_product(rows, weights, lambda rows, decoded: product_by_group(rows, decoded, ends))
    if torch.is_autocast_enabled(rows.device.type):  # autocast does not cover our operator
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weights = rows.to(dtype), weights.to(dtype)
    if weights.shape[0] == 1:
        return F.linear(rows, weights[0])
    if not supports_grouped(weights.shape[1:], weights.dtype):
        return looped_product(rows, weights, ends)
    if type(rows) is Tensor and not torch.compiler.is_compiling():
        # A custom operator costs 0.2 ms per call, and its first call imports torch's compiler, which takes seconds.
        out: Tensor = _GroupedProduct.apply(rows, weights, ends)
        return out
    return grouped_product(rows, weights, ends)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        _keep_for_backward(ctx, (rows, weights, ends), rows)
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        return _grouped_product_backward(ctx, grad)


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    rows, weights, ends = inputs
    ctx.save_for_backward(rows if weights.requires_grad else None, weights, ends)  # frozen weights need no rows


def _grouped_product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weights, ends = ctx.saved_tensors
    grad = grad.contiguous()
    needs_rows, needs_weights, _ = ctx.needs_input_grad
    grad_rows = product_by_group(grad, weights.transpose(1, 2), ends) if needs_rows else None
    return grad_rows, outer_by_group(grad, rows, ends) if needs_weights else None, None


grouped_product.register_autograd(_grouped_product_backward, setup_context=_keep_for_backward)


def outer_by_group(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return leftᵀ right of each group, the gradient of its weights: (R, O), (R, I), ends (E,) → (E, O, I)."""
    widths = left.shape[1], right.shape[1]
    if ends.shape[0] > 1 and supports_grouped(torch.Size(widths), left.dtype):
        return grouped_outer(left, right, ends)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.stack([one.T @ other for one, other in zip(left.split(sizes), right.split(sizes), strict=True)])


@torch.library.custom_op("dgemma::grouped_outer", mutates_args=())
def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Compute `outer_by_group` of all groups at once."""
    return F.grouped_mm(left.transpose(0, 1), right, offs=ends)


@grouped_outer.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])
