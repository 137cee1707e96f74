"""The mixture of experts: a router that reads the raw residual, and the experts it chooses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dgemma.model.config import ModelConfig
from dgemma.model.fused import compiles_on, fusible
from dgemma.model.layers import gated_gelu, rms_norm, wide_dtype
from dgemma.model.quantized import QuantizedWeight, Weight, decoded_product

_FEW = 16  # experts; for so few, comparing all of them is faster than sorting


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
    tiles: Tensor | None = None  # for kernels: each tile is some rows of one expert, see `group_choices`


@dataclass
class Kept:
    """The experts that a layer's tokens chose, and results of the first pass that the recomputation uses.

    All are None until the first pass has set them. `mixed` and `attended` stay None unless the experts have
    `keeps_output`.
    """

    groups: Groups | None = None
    mixed: Tensor | None = None  # (M, D): the output of the experts
    narrow: Tensor | None = None  # (M, A, rank): the tokens times the first matrix of their experts' adapters
    attended: Tensor | None = None  # (M, D): the output of attention; only if text and canvases run together

    def group(self, experts: Tensor, num_experts: int) -> Groups:
        """Return the choices (M, A), sorted by expert. Only the first pass sorts them."""
        if self.groups is None:
            self.groups = group_by_expert(experts, num_experts)
        return self.groups


class Router(nn.Module):
    """Scaleless norm → scale → linear → float32 softmax → top A, renormalised → per-expert scale."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k, self.eps = config.top_k_experts, config.rms_norm_eps
        self.proj = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(config.num_experts))

    def forward(self, residual: Tensor, chosen: Tensor | None = None, x: Tensor | None = None) -> Routing:
        """Route the residual (M, D), before any norm. A normed input would break the routing without an error.

        chosen: the experts (M, A), if they are known. x: `router_input` of the residual, if it is known.
        """
        if x is None:
            x = router_input(residual, self.scale, self.eps)
        logits = self.proj(x)
        if _uses_choice_kernels(logits, self.per_expert_scale):
            return Routing(*_Choices.apply(logits, self.per_expert_scale, self.top_k, chosen))
        probabilities = logits.softmax(-1, dtype=wide_dtype(x))
        scales = self.per_expert_scale.expand_as(probabilities)
        if torch.compiler.is_compiling() and probabilities.shape[-1] <= _FEW:
            weights, scale, experts = _choose_among_few(probabilities, scales, self.top_k)
        else:
            experts = probabilities.detach().topk(self.top_k, dim=-1).indices if chosen is None else chosen
            weights = probabilities.gather(-1, experts)
            # A gather, because the gradient of indexing into (E,) would add the tokens of an expert one by one.
            scale = scales.gather(-1, experts)
        return Routing(probabilities, weights / weights.sum(-1, keepdim=True) * scale, experts)


@fusible
def router_input(residual: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return the normalised and scaled residual (M, D), the input of the router's product."""
    return rms_norm(residual, None, eps) * scale * residual.shape[-1] ** -0.5


def _uses_choice_kernels(logits: Tensor, scales: Tensor) -> bool:
    """Return True if kernels choose and weigh experts. They need frozen scales."""
    return _has_kernels(logits, logits.shape[-1]) and not scales.requires_grad and logits.dtype != torch.float64


def _has_kernels(x: Tensor, num_experts: int) -> bool:
    """Return True in compiled steps on a GPU, outside of compiled layers, if kernels support this number of experts."""
    if not x.is_cuda or not compiles_on(x.device) or torch.compiler.is_compiling():
        return False
    from dgemma_kernels.ops.choices import fits

    return fits(num_experts)


class _Choices(torch.autograd.Function):
    """Probabilities, weights and experts of a `Routing`, from logits (M, E). Replaces about 15 launches."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, scales: Tensor, top_k: int, chosen: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        from dgemma_kernels.ops.choices import choose_experts, weigh_choices

        if chosen is None:
            probabilities, weights, experts = choose_experts(logits, scales, top_k)
        else:
            experts = chosen.view_as(chosen)
            probabilities, weights = weigh_choices(logits, chosen, scales)
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, scales, experts)
        return probabilities, weights, experts

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_probabilities: Tensor | None, of_weights: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        from dgemma_kernels.ops.choices import weigh_choices_gradient

        logits, scales, experts = ctx.saved_tensors
        grad = torch.zeros_like(experts, dtype=torch.float32) if of_weights is None else of_weights
        return weigh_choices_gradient(grad, of_probabilities, logits, experts, scales), None, None, None


def _choose_among_few(probabilities: Tensor, scales: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's A largest probabilities, their scales and their experts, (M, A) each; inputs are (M, E).

    torch.compile fuses these comparisons and sums into one kernel, and those of the gradient into another. `topk` takes
    five kernels.
    """
    expert = torch.arange(probabilities.shape[-1], device=probabilities.device)
    left, chosen = probabilities.detach(), []
    for _ in range(top_k):
        is_next = left.argmax(-1, keepdim=True) == expert
        left = left.masked_fill(is_next, -1.0)
        chosen.append(is_next)
    is_chosen = torch.stack(chosen, dim=1)  # (M, A, E), True once in each row
    weights, scale = (torch.where(is_chosen, of_all[:, None], 0.0).sum(-1) for of_all in (probabilities, scales))
    return weights, scale, torch.where(is_chosen, expert, 0).sum(-1)


class Experts(nn.Module):
    """E gated MLPs as two 3-D tensors, or as two quantised weights."""

    gate_up_proj: Weight  # (E, 2F, D)
    down_proj: Weight  # (E, D, F)
    keeps_output = False  # in a `Kept`

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))

    def forward(self, x: Tensor, routing: Routing, kept: Kept | None = None) -> Tensor:
        """Return Σ_a weight · expert_a(x) over each token's chosen experts: x (M, D) → (M, D)."""
        groups = (kept or Kept()).group(routing.experts, self.gate_up_proj.shape[0])
        return self.mix(self.hidden(x, groups), routing.weights, groups, x.dtype)

    def hidden(self, x: Tensor, groups: Groups) -> Tensor:
        """Return the hidden values (R, F) of tokens x (M, D), one row per choice, grouped by expert."""
        return gated_gelu(*self.gate_up(dispatch(x, groups), groups.ends).chunk(2, dim=-1))

    def mix(self, hidden: Tensor, weights: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
        """Return the weighted sum (M, D) of each token's outputs, from hidden values (R, F) and weights (M, A)."""
        return combine(self.down(hidden, groups.ends), weights, groups, dtype)

    def waits(self, dtype: torch.dtype) -> bool:
        """Return True if products in this dtype read the groups' sizes on the host, which a CUDA graph cannot capture.

        Example: `model.layers[0].experts.waits(torch.bfloat16)`.
        """
        weights = self.gate_up_proj, self.down_proj
        return weights[0].shape[0] > 1 and not all(_supports_grouped(weight.shape[1:], dtype) for weight in weights)

    def gate_up(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return gate and up (R, 2F) of rows (R, D) grouped by expert; the group of expert e ends at ends[e]."""
        return product_by_group(rows, self.gate_up_proj, ends)

    def down(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return the outputs (R, D) of rows (R, F) grouped by expert."""
        return product_by_group(rows, self.down_proj, ends)


class ReleasedExperts(nn.Module):
    """Placeholder for experts that `dgemma_kernels.accelerate(release=True)` has moved out."""

    def forward(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            "accelerate(release=True) has taken the experts out of this model. Use the model it returned, or load this "
            "one again."
        )

    def _save_to_state_dict(self, *_: Any) -> NoReturn:
        self.forward()  # a state dict would lack the experts

    def _load_from_state_dict(self, *_: Any) -> NoReturn:
        self.forward()


def group_by_expert(experts: Tensor, num_experts: int) -> Groups:
    """Sort choices (M, A) by expert. Nothing is counted on the host.

    Example: `group_by_expert(routing.experts, 128).ends`.
    """
    if _has_kernels(experts, num_experts) and experts.numel():
        from dgemma_kernels.ops.choices import group_choices

        return Groups(experts, *group_choices(experts.contiguous(), num_experts))
    count = torch.arange(experts.numel(), device=experts.device)
    if num_experts == 1:  # nothing to sort
        ends = torch.full((1,), experts.numel(), dtype=torch.int32, device=experts.device)
        return Groups(experts, count, count.view_as(experts), ends)
    chosen, expert = experts.flatten(), torch.arange(num_experts, device=experts.device)
    if chosen.numel() and num_experts <= _FEW:
        is_chosen = chosen == expert[:, None]  # (E, R)
        # A running count over the choices of expert 0, then of expert 1 and so on, gives each choice its row.
        counted = is_chosen.flatten().cumsum(0, dtype=torch.int32)
        back = counted[chosen * chosen.shape[0] + count].long() - 1
        order = torch.empty_like(back).scatter(0, back, count)
        ends = counted.view_as(is_chosen)[:, -1].contiguous()
        return Groups(experts, order, back.view_as(experts), ends)
    narrow = torch.int16 if num_experts < 1 << 15 else torch.int64  # a GPU sorts fewer bits faster
    sorted_experts, order = chosen.to(narrow).sort(stable=True)
    ends = torch.searchsorted(sorted_experts, expert.to(narrow), right=True, out_int32=True)
    return Groups(experts, order, torch.empty_like(order).scatter(0, order, count).view_as(experts), ends)


def dispatch(tokens: Tensor, groups: Groups) -> Tensor:
    """Copy every token once per chosen expert, grouped by expert: (M, D) → (R, D).

    Example: `dispatch(x, group_by_expert(routing.experts, 128))`.
    """
    if groups.ends.shape[0] == 1 and groups.back.shape[1] == 1:
        return tokens
    rows: Tensor = _Dispatch.apply(tokens, groups.order, groups.back)
    return rows


def combine(rows: Tensor, weights: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    """Return the weighted sum of the rows of each token's experts: (R, D) and weights (M, A) → (M, D).

    The sum is in float32 and in the order of choice, so that the result does not depend on scheduling.

    Example: `combine(dispatch(x, groups), routing.weights, groups, x.dtype)`.
    """
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


@fusible
def _copy_rows(tokens: Tensor, order: Tensor, top_k: int) -> Tensor:
    return tokens[order // top_k]


@fusible
def sum_choices(rows: Tensor, back: Tensor) -> Tensor:
    return rows[back].sum(1)


@fusible
def _sum_weighted(rows: Tensor, weights: Tensor, back: Tensor, dtype: torch.dtype) -> Tensor:
    return (rows[back].to(wide_dtype(rows)) * weights[..., None]).sum(1).to(dtype)


@fusible
def _grad_of_weighted(
    grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor, back: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows (R, D) and of the weights (M, A), from that of the sums (M, D)."""
    spread = grad[order // back.shape[1]].to(wide_dtype(rows))
    of_rows = spread * weights.flatten()[order][:, None]
    return of_rows.to(rows.dtype), (spread * rows).sum(1)[back].to(weights.dtype)


def product_by_group(rows: Tensor, weights: Weight, ends: Tensor) -> Tensor:
    """Multiply the rows of group e by weights[e]ᵀ: rows (R, I), weights (E, O, I), ends (E,) → (R, O)."""
    if isinstance(weights, QuantizedWeight):
        return decoded_product(rows, weights, lambda rows, decoded: product_by_group(rows, decoded, ends))
    if torch.is_autocast_enabled(rows.device.type):  # autocast does not cover our operator
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weights = rows.to(dtype), weights.to(dtype)
    if weights.shape[0] == 1:
        return F.linear(rows, weights[0])
    if not _supports_grouped(weights.shape[1:], weights.dtype):
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


@torch.library.custom_op("dgemma::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of all groups at once: rows (R, I), weights (E, O, I), ends (E,) → (R, O).

    A custom operator, because torch can trace its grouped product in bfloat16 only, but runs it in float32 too.
    """
    return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


@grouped_product.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


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
    if ends.shape[0] > 1 and _supports_grouped(widths, left.dtype):
        return grouped_outer(left, right, ends)
    sizes = _group_sizes(ends)
    return torch.stack([one.T @ other for one, other in zip(left.split(sizes), right.split(sizes), strict=True)])


@torch.library.custom_op("dgemma::grouped_outer", mutates_args=())
def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Compute `outer_by_group` of all groups at once."""
    return F.grouped_mm(left.transpose(0, 1), right, offs=ends)


@grouped_outer.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def looped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Compute `grouped_product` by a loop over groups: its definition, and the fallback for shapes it refuses."""
    groups = zip(rows.split(_group_sizes(ends)), weights, strict=True)
    return torch.cat([group @ weight.T for group, weight in groups])


def _group_sizes(ends: Tensor) -> list[int]:
    return torch.diff(ends, prepend=ends.new_zeros(1)).tolist()


def _supports_grouped(widths: Sequence[int], dtype: torch.dtype) -> bool:
    """Return True if torch's grouped product supports weights with sides of these widths in this dtype.

    The dtype must have 16 or 32 bits. Both sides must have a multiple of 16 bytes.
    """
    return dtype in (torch.float32, torch.bfloat16, torch.float16) and all(
        size * dtype.itemsize % 16 == 0 for size in widths
    )
