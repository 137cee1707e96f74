"""Norms, and gradients of the residual stream between a layer's products in training, each in one pass over the rows.

Values round where the published model rounds them. Gradients are computed in float32 and rounded once. The norms'
weights get no gradient: they are frozen while adapters are trained. Reference: `reference.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.blocks import blocks_of, load_row, store_block
from dgemma_kernels.ops.norms import kernel as norms
from dgemma_kernels.ops.norms.kernel import ResidualNorms, TailNorms

_MAX_WIDTH = 8192


def fits(*rows: Tensor) -> bool:
    """Return True if these kernels support rows (M, D): of one shape and one dtype, and not too wide.

    Example: `fits(torch.empty(4, 2816, dtype=torch.bfloat16))` is True.
    """
    first = rows[0]
    same = all(each.shape == first.shape and each.dtype == first.dtype for each in rows)
    is_float = first.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return same and is_float and first.dim() == 2 and first.shape[0] > 0 and first.shape[1] <= _MAX_WIDTH


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x / rms(x), times `weight` unless None. x: (M, D), weight: (D,) → (M, D).

    Example: `rms_norm(x, norm.weight, 1e-6)`.
    """
    return norms.rms_norm(x.contiguous(), weight, eps)


def rms_norm_gradient(
    grad: Tensor, x: Tensor, weight: Tensor | None, eps: float, added: Tensor | None = None
) -> tuple[Tensor]:
    """Return the gradient of x (M, D), from that of `rms_norm(x, weight, eps)`. weight: (D,).

    added: (M, D), a gradient of x from elsewhere, which is added.

    Example: `(of_x,) = rms_norm_gradient(grad, x, norm.weight, 1e-6)`.
    """
    grad, x = _rows(grad, x)
    if added is not None:
        added, _ = _rows(added, x)
    out = torch.empty_like(x)
    _rms_norm_gradient_kernel[(x.shape[0],)](grad, x, weight, added, out, eps, **blocks_of(x.shape[1]))
    return (out,)


def after_attention_gradient(
    of_residual: Tensor,
    of_dense: Tensor,
    of_experts: Tensor,
    of_routed: Tensor,
    x: Tensor,
    attended: Tensor,
    post_norm: Tensor,
    dense_norm: Tensor,
    experts_norm: Tensor,
    router_scale: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and attended (M, D), from those of the four results of `norms.attention_residual`.

    With r = x + norm(attended) * post_norm and n = norm(r), these are r, n * dense_norm, n * experts_norm and
    n * router_scale * D**-0.5. Norms: (D,).

    Example: `of_x, of_attended = after_attention_gradient(*grads, x, attended, *weights, 1e-6)`.
    """
    rows = _rows(of_residual, of_dense, of_experts, of_routed, x, attended)
    of_x, of_attended = torch.empty_like(x), torch.empty_like(x)
    _after_attention_gradient_kernel[(x.shape[0],)](
        *rows,
        ResidualNorms(post_norm, dense_norm, experts_norm, router_scale),
        of_x,
        of_attended,
        eps,
        x.shape[1] ** -0.5,
        **blocks_of(x.shape[1]),
    )
    return of_x, of_attended


def after_experts_gradient(
    grad: Tensor,
    residual: Tensor,
    dense: Tensor,
    mixed: Tensor,
    dense_norm: Tensor,
    experts_norm: Tensor,
    post_norm: Tensor,
    scalar: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of residual, dense and mixed (M, D), from that of `after_experts`.

    Example: `of_residual, of_dense, of_mixed = after_experts_gradient(grad, x, dense, mixed, *weights, scalar, 1e-6)`.
    """
    grad, dense, mixed = _rows(grad, dense, mixed)
    outs = [torch.empty_like(residual) for _ in range(3)]
    _after_experts_gradient_kernel[(dense.shape[0],)](
        grad,
        dense,
        mixed,
        TailNorms(dense_norm, experts_norm, post_norm),
        scalar.contiguous(),
        *outs,
        eps,
        SCALAR_PER_ROW=scalar.numel() > 1,
        **blocks_of(dense.shape[1]),
    )
    return outs[0], outs[1], outs[2]


def _rows(*tensors: Tensor) -> list[Tensor]:
    assert fits(*tensors)
    return [tensor.contiguous() for tensor in tensors]


@triton.jit
def _inverse_rms(row: tl.tuple, WIDTH: tl.constexpr, eps: tl.tensor) -> tl.tensor:
    return tl.rsqrt(_dot(row, row) / WIDTH + eps)


@triton.jit
def _dot(row: tl.tuple, other: tl.tuple) -> tl.tensor:
    products = row[0] * other[0]
    for i in tl.static_range(1, len(row)):
        products += row[i] * other[i]
    return tl.sum(products, 0)


@triton.jit
def _times(row: tl.tuple, factor: tl.tensor) -> tl.tuple:
    """Return factor · row."""
    out = ()
    for i in tl.static_range(len(row)):
        out += (row[i] * factor,)  # type: ignore[assignment]
    return out


@triton.jit
def _product(row: tl.tuple, other: tl.tuple) -> tl.tuple:
    out = ()
    for i in tl.static_range(len(row)):
        out += (row[i] * other[i],)  # type: ignore[assignment]
    return out


@triton.jit
def _sum(row: tl.tuple, other: tl.tuple) -> tl.tuple:
    out = ()
    for i in tl.static_range(len(row)):
        out += (row[i] + other[i],)  # type: ignore[assignment]
    return out


@triton.jit
def _round(row: tl.tuple, dtype: tl.constexpr) -> tl.tuple:
    """Return the row as values of dtype, in float32."""
    out = ()
    for i in tl.static_range(len(row)):
        out += (row[i].to(dtype).to(tl.float32),)  # type: ignore[assignment]
    return out


@triton.jit
def _grad_of_norm(grad: tl.tuple, normed: tl.tuple, inverse: tl.tensor, WIDTH: tl.constexpr) -> tl.tuple:
    """Return the gradient of a row, from that of normed = inverse · row."""
    mean = _dot(grad, normed) / WIDTH
    out = ()
    for i in tl.static_range(len(grad)):
        out += (inverse * (grad[i] - normed[i] * mean),)  # type: ignore[assignment]
    return out


@triton.jit
def _store_row(out: tl.tensor, row: tl.tuple, WIDTH: tl.constexpr) -> None:
    for i in tl.static_range(len(row)):
        store_block(out, row[i], i, WIDTH)


@triton.jit
def _rms_norm_gradient_kernel(
    grad: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    added: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * WIDTH
    of_normed, values = load_row(grad + row, WIDTH, BLOCK), load_row(x + row, WIDTH, BLOCK)
    if added is not None:
        others = load_row(added + row, WIDTH, BLOCK)
    if weight is not None:
        of_normed = _product(of_normed, load_row(weight, WIDTH, BLOCK))
    inverse = _inverse_rms(values, WIDTH, eps)
    of_x = _grad_of_norm(of_normed, _times(values, inverse), inverse, WIDTH)
    if added is not None:
        of_x = _sum(of_x, others)
    _store_row(out + row, of_x, WIDTH)


@triton.jit
def _after_attention_gradient_kernel(
    of_residual: tl.tensor,
    of_dense: tl.tensor,
    of_experts: tl.tensor,
    of_routed: tl.tensor,
    x: tl.tensor,
    attended: tl.tensor,
    weights: ResidualNorms,
    of_x: tl.tensor,
    of_attended: tl.tensor,
    eps: tl.tensor,
    root: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * WIDTH
    update = load_row(attended + row, WIDTH, BLOCK)
    before = load_row(x + row, WIDTH, BLOCK)
    # The three norms of the residual differ only in their weights. So their gradients are added first, and pass through
    # the norm once.
    of_normed = _product(load_row(of_dense + row, WIDTH, BLOCK), load_row(weights.dense, WIDTH, BLOCK))
    of_normed = _sum(
        of_normed, _product(load_row(of_experts + row, WIDTH, BLOCK), load_row(weights.expert, WIDTH, BLOCK))
    )
    routed = _product(load_row(of_routed + row, WIDTH, BLOCK), load_row(weights.router, WIDTH, BLOCK))
    of_normed = _sum(of_normed, _times(routed, root))
    total = load_row(of_residual + row, WIDTH, BLOCK)
    post = load_row(weights.post, WIDTH, BLOCK)

    inverse = _inverse_rms(update, WIDTH, eps)
    update = _times(update, inverse)
    residual = _round(_sum(before, _round(_product(update, post), dtype)), dtype)
    scale = _inverse_rms(residual, WIDTH, eps)
    total = _sum(total, _grad_of_norm(of_normed, _times(residual, scale), scale, WIDTH))
    _store_row(of_x + row, total, WIDTH)
    _store_row(of_attended + row, _grad_of_norm(_product(total, post), update, inverse, WIDTH), WIDTH)


@triton.jit
def _after_experts_gradient_kernel(
    grad: tl.tensor,
    dense: tl.tensor,
    mixed: tl.tensor,
    weights: TailNorms,
    scalar: tl.tensor,
    of_residual: tl.tensor,
    of_dense: tl.tensor,
    of_mixed: tl.tensor,
    eps: tl.tensor,
    SCALAR_PER_ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    dtype: tl.constexpr = dense.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * WIDTH
    factor = tl.load(scalar + (tl.program_id(0) if SCALAR_PER_ROW else 0)).to(tl.float32)
    dense_row, mixed_row = load_row(dense + row, WIDTH, BLOCK), load_row(mixed + row, WIDTH, BLOCK)
    total = _times(load_row(grad + row, WIDTH, BLOCK), factor)
    dense_w, experts_w = load_row(weights.dense, WIDTH, BLOCK), load_row(weights.expert, WIDTH, BLOCK)
    post = load_row(weights.post, WIDTH, BLOCK)
    _store_row(of_residual + row, total, WIDTH)

    dense_inverse, mixed_inverse = _inverse_rms(dense_row, WIDTH, eps), _inverse_rms(mixed_row, WIDTH, eps)
    dense_row, mixed_row = _times(dense_row, dense_inverse), _times(mixed_row, mixed_inverse)
    # Values are rounded as separate layers would round them.
    both = _sum(_round(_product(dense_row, dense_w), dtype), _round(_product(mixed_row, experts_w), dtype))
    both = _round(both, dtype)
    inverse = _inverse_rms(both, WIDTH, eps)
    of_both = _grad_of_norm(_product(total, post), _times(both, inverse), inverse, WIDTH)
    _store_row(of_dense + row, _grad_of_norm(_product(of_both, dense_w), dense_row, dense_inverse, WIDTH), WIDTH)
    _store_row(of_mixed + row, _grad_of_norm(_product(of_both, experts_w), mixed_row, mixed_inverse, WIDTH), WIDTH)
