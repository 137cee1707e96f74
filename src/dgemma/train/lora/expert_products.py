"""Products with the experts' weights, for tokens with their chosen experts, or for rows already grouped by expert."""

from typing import Any, TypeGuard

import torch
from torch import Tensor

from dgemma.model.experts import Groups, dispatch, outer_by_group, product_by_group
from dgemma.model.fused import compiles_on, fusible
from dgemma.model.layers import gated_gelu, wide_dtype
from dgemma.model.quantized import Weight

FEW_OUTPUTS = 16  # a product with at most this many outputs has its own kernel


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
