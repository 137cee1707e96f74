"""Experts with adapters, and the products with their weights. The backward pass does not compute the output again."""

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dgemma.model.config import GenerationDefaults
from dgemma.model.experts import (
    Experts,
    Groups,
    Kept,
    Routing,
    combine,
    dispatch,
    outer_by_group,
    product_by_group,
    sum_choices,
)
from dgemma.model.fused import compiles_on, fusible
from dgemma.model.layers import gated_gelu, product_dtype, wide_dtype
from dgemma.model.quantized import Weight
from dgemma.train.lora.linear import LoRA, new_pair, scaled_product

FEW_OUTPUTS = 16  # a product with at most this many outputs has its own kernel
_EXPERT_ADAPTERS = ("gate_up_lora_a", "gate_up_lora_b", "down_lora_a", "down_lora_b")


class AdaptedExperts(Experts):
    """Experts whose every product gains scale · B_e A_e x."""

    base_generation: GenerationDefaults

    def __init__(self, base: Experts, lora: LoRA) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj, self.down_proj, self.lora = base.gate_up_proj, base.down_proj, lora
        self.gate_up_lora_a, self.gate_up_lora_b = new_pair(base.gate_up_proj, lora.rank)
        self.down_lora_a, self.down_lora_b = new_pair(base.down_proj, lora.rank)

    @property
    def keeps_output(self) -> bool:  # type: ignore[override]
        # Quantised weights are chosen to save memory, so nothing more is kept next to them.
        # Weights spread over processes are there only during the forward.
        return type(self.gate_up_proj) is type(self.down_proj) is nn.Parameter

    def forward(self, x: Tensor, routing: Routing, kept: Kept | None = None) -> Tensor:
        if kept is None or not self.keeps_output:
            return super().forward(x, routing, kept)
        mixed: Tensor = _KeptOutput.apply(self, kept, x, routing.weights, routing.experts, *trained_weights(self))
        return mixed

    def uses_kernels(self, x: Tensor) -> bool:
        """Return True if steps with inputs like x (M, D) keep their output and compute it with our kernels."""
        return self.keeps_output and uses_kernel(self.gate_up_proj, x)

    def hidden(self, x: Tensor, groups: Groups) -> Tensor:
        return self.hidden_after(self.narrow(x, groups), x, groups)

    def narrow(self, x: Tensor, groups: Groups) -> Tensor:
        """Return scale · A_e x of gate_up's adapter, for each expert e that a token chose: x (M, D) → (M, A, rank)."""
        # For small ranks, one product of all tokens with all experts' A is faster than thin products by expert.
        a = _all_experts(self.gate_up_lora_a.to(x.dtype))
        taken: Tensor = Take.apply(scaled_product(x, a.T, self.lora.scale), groups)
        return taken

    def hidden_after(self, narrow: Tensor, x: Tensor, groups: Groups) -> Tensor:
        """Return `hidden` of x (M, D), from `narrow` of x."""
        b = self.gate_up_lora_b.to(x.dtype)
        return product_of_tokens(x, self.gate_up_proj, in_rows(narrow, groups), b, groups, gated=True)

    def mix(self, hidden: Tensor, weights: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
        down_a = self.down_lora_a.to(hidden.dtype)
        if uses_kernel(self.down_proj, hidden):
            from dgemma_kernels.ops.grouped import multiply_rows

            narrow = thin_product(hidden, down_a, groups.ends, self.lora.scale)
            adapter = narrow, self.down_lora_b.to(hidden.dtype)
            rows = multiply_rows(hidden, self.down_proj, groups.ends, *adapter, groups.tiles)
            return combine(rows, weights, groups, dtype)
        mixed = super().mix(hidden, weights, groups, dtype)
        narrow = product_by_group(hidden, down_a, groups.ends)
        narrow = (narrow * (in_rows(weights, groups)[:, None] * self.lora.scale)).to(hidden.dtype)
        # The other experts get zeros. So one product with the B of all experts gives the sum over a token's experts.
        spread = Put.apply(narrow, groups)  # (M, E · rank)
        b = _all_experts(self.down_lora_b.to(hidden.dtype).mT)
        return mixed.addmm_(spread, b) if mixed.dtype == spread.dtype else mixed + spread @ b

    def gradients(
        self, grad: Tensor, x: Tensor, narrow: Tensor, weights: Tensor, groups: Groups, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the gradients of x (M, D), of the routing weights (M, A) and of the parameters that require one.

        grad: that of the experts' output (M, D). Hidden values are recomputed. The output is not needed: the gradient
        of the routing weights comes from `grad` times the transposed down weights. narrow: as from `self.narrow`.
        dtype: that of products.
        """
        assert isinstance(self.gate_up_proj, Tensor)
        assert isinstance(self.down_proj, Tensor)
        scale, ends = self.lora.scale, groups.ends
        x, grad, gate_up, down = x.to(dtype), grad.to(dtype), self.gate_up_proj.to(dtype), self.down_proj.to(dtype)
        up_a, up_b, down_a, down_b = (getattr(self, name).to(dtype) for name in _EXPERT_ADAPTERS)
        # A name with `of_` is the gradient of what it names. Narrow values are between A and B of an adapter. Each of
        # the R rows is a choice; they are grouped by expert.
        # The backward pass of the `down` product. These gradients lack the factor of the routing weights, except
        # `weighted`, (R, rank).
        of_choices = take(scaled_product(grad, _all_experts(down_b.mT).T, scale), groups)  # (M, A, rank)
        by_choice = weights, narrow.flatten(0, 1).to(dtype), of_choices.flatten(0, 1)
        by_row, up_narrow, of_down_narrow, weighted = narrow_by_row(*by_choice, groups.order)
        of_hidden = product_of_tokens(grad, down.mT, of_down_narrow, down_a.mT, groups)  # (R, F)
        # The backward pass of GeGLU. Its inputs, gate and up, are computed again. Its gradients have the factor.
        gate_and_up = product_of_tokens(x, gate_up, up_narrow, up_b, groups)  # (R, 2F)
        hidden, of_gate_and_up, of_weights = grad_of_gates(gate_and_up, of_hidden, weights, groups.order)
        del gate_and_up, of_hidden
        # The backward pass of the `gate_up` product.
        of_up_narrow, of_up_b = contract_and_outer(of_gate_and_up, up_narrow, up_b, groups, scale)
        spread = put(of_up_narrow, groups)  # (M, E · rank)
        if uses_kernel(gate_up, of_gate_and_up):
            from dgemma_kernels.ops.grouped import multiply_rows

            of_rows = multiply_rows(of_gate_and_up, gate_up.mT, ends, of_up_narrow, up_a.mT, groups.tiles)
            of_x = sum_choices(of_rows, groups.back)
        else:
            of_x = sum_choices(product_by_group(of_gate_and_up, gate_up.mT, ends), groups.back)
            of_x.addmm_(spread, _all_experts(up_a))
        # Parameters.
        down_narrow, of_down_a = contract_and_outer(hidden, weighted, down_a.mT, groups, scale, by_row)
        found = {
            "gate_up_lora_a": (spread.T @ x).view_as(up_a),
            "gate_up_lora_b": of_up_b,
            "down_lora_a": of_down_a.mT,
            "down_lora_b": (put(down_narrow, groups).T @ grad).view_as(down_b.mT).mT,
        }
        if self.gate_up_proj.requires_grad:
            found["gate_up_proj"] = outer_by_group(of_gate_and_up, dispatch(x, groups), ends)
        if self.down_proj.requires_grad:
            of_outputs = dispatch(grad, groups) * by_row[:, None]
            found["down_proj"] = outer_by_group(of_outputs.to(dtype), hidden, ends)
        return of_x, of_weights[groups.back], found

    def updates(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each base weight in this module, and the update of its adapter."""
        yield "gate_up_proj", self.gate_up_lora_b @ self.gate_up_lora_a * self.lora.scale
        yield "down_proj", self.down_lora_b @ self.down_lora_a * self.lora.scale

    def base(self) -> Experts:
        """Return the experts without their adapters."""
        experts = Experts.__new__(Experts)
        nn.Module.__init__(experts)
        experts.gate_up_proj, experts.down_proj = self.gate_up_proj, self.down_proj
        return experts


def _all_experts(weights: Tensor) -> Tensor:
    """Return the rows (E · rank, D) of all experts' matrices (E, rank, D)."""
    return weights.flatten(0, 1)


class _KeptOutput(torch.autograd.Function):
    """The experts' output, whose gradient computes the hidden values again. The output itself is computed once."""

    @staticmethod
    def forward(
        ctx: Any, module: AdaptedExperts, kept: Kept, x: Tensor, weights: Tensor, experts: Tensor, *_: Tensor
    ) -> Tensor:
        groups = kept.group(experts, module.gate_up_proj.shape[0])
        if kept.mixed is None or kept.narrow is None:
            kept.narrow = module.narrow(x, groups)
            kept.mixed = module.mix(module.hidden_after(kept.narrow, x, groups), weights, groups, x.dtype)
        ctx.module, ctx.dtype = module, product_dtype(x)
        ctx.save_for_backward(x, kept.narrow, weights, *groups)
        return kept.mixed.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow, weights, *groups = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            of_x, of_weights, found = ctx.module.gradients(grad, x, narrow, weights, Groups(*groups), ctx.dtype)
        trained = [(name, weight) for name, weight in ctx.module.named_parameters() if weight.requires_grad]
        of_trained = [found[name].to(weight.dtype) for name, weight in trained]
        return None, None, of_x.to(x.dtype), of_weights, None, *of_trained


def trained_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the module's parameters that require gradients.

    Example: `trained_weights(model.layers[0])`.
    """
    return [weight for weight in module.parameters() if weight.requires_grad]


def product_of_tokens(
    x: Tensor, weights: Weight, narrow: Tensor, b: Tensor, groups: Groups, *, gated: bool = False
) -> Tensor:
    """Return x W_eᵀ + narrow B_eᵀ for each choice of an expert e by a token, in rows grouped by expert: (R, O).

    x (M, I), weights (E, O, I), b (E, O, rank); narrow (R, rank) is grouped by expert, too. If gated, `gated_gelu`
    makes the result (R, O / 2). On a Hopper GPU, compiled training steps use one kernel. It does not copy the tokens.
    """
    if uses_kernel(weights, x):
        from dgemma_kernels.ops.grouped import multiply_tokens

        rows = groups.order, groups.ends, groups.tiles
        return multiply_tokens(x.contiguous(), weights, narrow, b, *rows, gated=gated)
    out = product_by_group(dispatch(x, groups), weights, groups.ends) + product_by_group(narrow, b, groups.ends)
    return gated_gelu(*out.chunk(2, dim=-1)) if gated else out


def thin_product(rows: Tensor, weights: Tensor, ends: Tensor, scale: float, by_row: Tensor | None = None) -> Tensor:
    """Return scale · by_row · `product_by_group` for weights with few outputs, for which torch's grouped product is
    slow."""
    if weights.shape[1] <= FEW_OUTPUTS and uses_kernel(weights, rows):
        from dgemma_kernels.ops.grouped import multiply_rows

        return multiply_rows(rows, weights, ends, scale=scale, by_row=by_row)
    factor = scale if by_row is None else scale * by_row[:, None]
    return (product_by_group(rows, weights, ends) * factor).to(rows.dtype)


def contract_and_outer(
    rows: Tensor, narrow: Tensor, weights: Tensor, groups: Groups, scale: float, by_row: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return two products of the rows: with their experts' weights, (R, rank), and with `narrow`, (E, N, rank).

    The first is scale · by_row · row @ W_e, with the expert e of each row. The second is rowsᵀ @ narrow over the rows
    of each expert; if the weights are transposed in memory, so is this product. rows (R, N) and narrow (R, rank) are
    grouped by expert; weights (E, N, rank).
    """
    if uses_kernel(weights, rows) and weights.shape[-1] <= FEW_OUTPUTS:
        from dgemma_kernels.ops import grouped

        return grouped.contract_and_outer(rows, narrow, weights, groups.ends, scale=scale, by_row=by_row)
    of_narrow = thin_product(rows, weights.mT.contiguous(), groups.ends, scale, by_row)
    if weights.is_contiguous():
        return of_narrow, outer_by_group(rows, narrow, groups.ends)
    return of_narrow, outer_by_group(narrow, rows, groups.ends).mT


def uses_kernel(weights: Weight, x: Tensor) -> TypeGuard[Tensor]:
    """Return True in compiled steps while autograd is off, if our kernels support the GPU, dtype and widths."""
    return (
        compiles_on(x.device)
        and not torch.is_grad_enabled()
        and x.is_cuda
        and torch.cuda.get_device_capability(x.device)[0] == 9  # Hopper has the shared memory for the tiles
        and isinstance(weights, Tensor)
        and x.dtype == weights.dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] % 64 == weights.shape[1] % 8 == 0
    )


def grad_of_gates(wide: Tensor, pulled: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden values (R, F), gradients of gate and up (R, 2F), and those of the routing weights by row, (R,).

    pulled: the gradient of the hidden values (R, F), before it is multiplied by the routing weights (M, A).
    """
    if compiles_on(wide.device) and wide.is_cuda and wide.dtype != torch.float64:  # the kernel computes in float32
        from dgemma_kernels.ops.grouped import gated_gradient

        return gated_gradient(wide, pulled, weights.contiguous(), order)
    return _gated_and_grad(wide, pulled, weights, order)


@fusible
def _gated_and_grad(wide: Tensor, pulled: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `grad_of_gates` by automatic differentiation."""
    hidden, pull_back = torch.func.vjp(gated_gelu, *wide.chunk(2, dim=-1))  # type: ignore[misc]
    by_row, exact = weights.flatten()[order][:, None], pulled.to(wide_dtype(pulled))
    return hidden, torch.cat(pull_back((by_row * exact).to(hidden.dtype)), -1), (hidden * exact).sum(-1)


@fusible
def narrow_by_row(
    weights: Tensor, narrow: Tensor, along: Tensor, order: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reorder the inputs from the order of the choices to the order of the rows.

    Return the routing weights (R,), then `narrow`, `along` and routing weights · `along`, each (R, rank).
    """
    by_row, along = weights.flatten()[order], along[order]
    return by_row, narrow[order], along, (along * by_row[:, None]).to(along.dtype)


def take(x: Tensor, groups: Groups) -> Tensor:
    """From the values of all experts, (M, E · rank), return those of the chosen experts, (M, A, rank)."""
    return _take_choices(x.unflatten(1, (groups.ends.shape[0], -1)), groups.experts)


def put(rows: Tensor, groups: Groups) -> Tensor:
    """Return (M, E · rank): each of the rows (R, rank) is copied to its token and the columns of its expert.

    All other values are 0. The rows are grouped by expert.
    """
    return _put_rows(rows, groups.experts, groups.order, groups.ends.shape[0]).flatten(1)


@fusible
def _take_choices(x: Tensor, experts: Tensor) -> Tensor:
    return x[torch.arange(x.shape[0], device=x.device)[:, None], experts]


@fusible
def _put_rows(rows: Tensor, experts: Tensor, order: Tensor, num_experts: int) -> Tensor:
    zeros = rows.new_zeros(experts.shape[0], num_experts, rows.shape[1])
    return zeros.index_put((order // experts.shape[1], experts.flatten()[order]), rows)


class Take(torch.autograd.Function):
    """`take`, whose gradient is a copy without additions, because `take` reads no position twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return take(x, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return put(grad.flatten(0, 1)[ctx.groups.order], ctx.groups), None


class Put(torch.autograd.Function):
    """`put`, whose gradient is `take`, in the order of the rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return put(rows, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return take(grad, ctx.groups).flatten(0, 1)[ctx.groups.order], None


def in_rows(values: Tensor, groups: Groups) -> Tensor:
    """Return the values (M, A, …) of the choices in the order of the rows, (R, …)."""
    out: Tensor = _ByRow.apply(values.flatten(0, 1), groups.order, groups.back.flatten())
    return out


class _ByRow(torch.autograd.Function):
    """x[order], whose gradient is a copy too, because `back` inverts `order`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.saved_tensors[0]], None, None
