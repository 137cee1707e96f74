"""RMSNorm and the residual stream between a layer's products, each in one pass over the rows.

Statistics and products are float32. Values round to the model's dtype where the published model (transformers'
DiffusionGemma) rounds them. Reference: `reference.py`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.blocks import (
    MANY_ROWS,
    blocks_of,
    load_row,
    load_rows,
    row_float8_scale,
    rows_of,
    store_block,
    store_rounded,
    store_rows_rounded,
    wait_for_launches_before,
)
from dgemma_kernels.formats.float8 import Quantized
from dgemma_kernels.formats.fourbit import OrderedRows
from dgemma_kernels.ops.configs import dependent_launch


class ResidualNorms(NamedTuple):
    """Weights (D,): of the norm after attention, and of the inputs of dense MLP, experts and router."""

    post: Any
    dense: Any
    expert: Any
    router: Any


class TailNorms(NamedTuple):
    """Weights (D,) of the norms at the end of a layer: of the dense output, of the experts', and of their sum."""

    dense: Any
    expert: Any
    post: Any


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x / rms(x), times `weight` unless None. x: (..., D), weight: (D,) → (..., D).

    Example: `rms_norm(hidden, layer.input_layernorm.weight, 1e-6)`.
    """
    out, width = torch.empty_like(x), x.shape[-1]
    assert x.is_contiguous()
    assert weight is None or weight.shape == (width,)
    _rms_norm_kernel[(x.numel() // width,)](x, weight, out, eps, **blocks_of(width))
    return out


def round_rows(x: Tensor) -> Quantized:
    """Round rows (M, D) to float8, with one scale per row: `formats.float8.quantize` in one launch.

    Example: `round_rows(normed).values.dtype` is `torch.float8_e4m3fn`.
    """
    assert x.is_contiguous()
    width = x.shape[-1]
    values, scale = empty_rows(x, True)
    num_rows = x.numel() // width
    launch = rows_of(num_rows, width)
    _round_rows_kernel[(triton.cdiv(num_rows, launch["ROWS"]),)](x, values, scale, num_rows, **launch)
    assert scale is not None
    return Quantized(values=values, scale=scale, dtype=x.dtype)


def scale_rows(
    x: Tensor,
    row_scale: Tensor,
    col_scale: Tensor | None = None,
    *,
    factor: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply x (M, D) by `factor`, by scales of its rows (M,), and by scales of its columns (D,) unless None.

    Scales are float32. The result (M, D) is in `dtype`, by default that of x.

    Example: `scale_rows(product, rows.scale, weight.scale, dtype=torch.bfloat16)`.
    """
    num_rows, width = x.shape
    assert x.is_contiguous()
    assert row_scale.shape == (num_rows,)
    out = torch.empty(num_rows, width, dtype=dtype or x.dtype, device=x.device)
    _scale_rows_kernel[(triton.cdiv(num_rows, 4), triton.cdiv(width, 256))](
        x, row_scale, col_scale, out, num_rows, width, factor, ROWS=4, BLOCK=256, num_warps=4
    )
    return out


def attention_residual(
    attention: Tensor,
    residual: Tensor,
    norms: ResidualNorms,
    eps: float,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    float8: bool = False,
    float8_dense: bool = False,
    ordered: bool = False,
) -> tuple[Tensor, Tensor | Quantized, Tensor | Quantized | OrderedRows, Tensor]:
    """Return the residual stream after attention, and the inputs of dense MLP, experts and router.

    x = residual + norm(attention) * norms.post. With n = norm(x), returns
    (x, n * norms.dense, n * norms.expert, n * norms.router * D**-0.5). attention, residual and all results: (M, D).
    `scales` (M,) and (D,) multiply the rows and columns of `attention` first. With `float8` the experts' input is
    rounded to float8, with one scale per row; with `float8_dense` that of the dense MLP. With `ordered` the experts'
    input is rounded to `OrderedRows`.

    Example: `x, dense_in, expert_in, router_in = attention_residual(attention, x, norms, eps=1e-6)`.
    """
    num_rows, width = residual.shape
    assert attention.shape == residual.shape
    assert attention.is_contiguous()
    assert residual.is_contiguous()
    x, router = torch.empty_like(residual), torch.empty_like(residual)
    dense, expert = empty_rows(residual, float8_dense), empty_rows(residual, float8 or ordered)
    expert_sums = None
    if ordered:
        assert width % 64 == 0 and width <= 4096, width  # noqa: PT018
        expert_sums = torch.empty(num_rows, 2, 64, dtype=torch.bfloat16, device=residual.device)
    _attention_residual_kernel[(num_rows,)](
        attention,
        residual,
        ResidualNorms(*norms),
        scales or (None, None),
        x,
        dense,
        expert,
        expert_sums,
        router,
        eps,
        width**-0.5,
        MANY=num_rows >= MANY_ROWS,
        **blocks_of(width),
        **dependent_launch(residual.device),
    )
    rows: Any = as_rows(expert, x)
    if expert_sums is not None:
        rows = OrderedRows(values=rows.values, scale=rows.scale, sums=expert_sums, dtype=x.dtype)
    return x, as_rows(dense, x), rows, router


def layer_tail(
    residual: Tensor,
    dense: Tensor,
    expert_rows: Tensor,
    norms: TailNorms,
    layer_scalar: Tensor,
    next_weight: Tensor,
    eps: float,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    float8: bool = False,
    alone: bool = False,
) -> tuple[Tensor, Tensor | Quantized]:
    """Return the end of a layer and the first norm of the next, from the dense output and the weighted expert rows.

    moe = Σ_k expert_rows[:, k], in the order of k, so that every run gives the same sum;
    x = (residual + norm(norm(dense) * norms.dense + norm(moe) * norms.expert) * norms.post) * layer_scalar;
    returns (x, norm(x) * next_weight). residual, dense: (M, D), expert_rows: (M, A, D), layer_scalar: (1,) or (M,),
    next_weight: (D,). `scales` (M,) and (D,) multiply the rows and columns of `dense` first. With `float8` the
    second result is rounded to float8, with one scale per row. With `alone`, twice as many threads share a row. This is
    faster for a single row, and adds in another order.

    Example: `x, normed = layer_tail(x, dense, rows, norms, layer.layer_scalar, next_input_layernorm.weight, 1e-6)`.
    """
    (num_rows, width), num_active = residual.shape, expert_rows.shape[1]
    assert expert_rows.shape == (num_rows, num_active, width)
    assert layer_scalar.numel() in (1, num_rows)
    assert all(tensor.is_contiguous() for tensor in (residual, dense, expert_rows, layer_scalar))
    x = torch.empty_like(residual)
    normed = empty_rows(residual, float8)
    _layer_tail_kernel[(num_rows,)](
        residual,
        dense,
        expert_rows,
        TailNorms(*norms),
        layer_scalar,
        next_weight,
        scales or (None, None),
        x,
        normed,
        eps,
        SCALAR_PER_ROW=layer_scalar.numel() > 1,
        NUM_ACTIVE=num_active,
        MANY=num_rows >= MANY_ROWS,
        **blocks_of(width, per_thread=4 if alone else 8),
        **dependent_launch(residual.device),
    )
    return x, as_rows(normed, x)


def empty_rows(like: Tensor, float8: bool) -> tuple[Tensor, Tensor | None]:
    """Return new rows, and their scales if they are float8.

    Example: `values, scale = empty_rows(x, float8=True)`.
    """
    if not float8:
        return torch.empty_like(like), None
    scale = torch.empty(like.shape[:-1], dtype=torch.float32, device=like.device)
    return torch.empty_like(like, dtype=torch.float8_e4m3fn), scale


def as_rows(rows: tuple[Tensor, Tensor | None], like: Tensor) -> Tensor | Quantized:
    """Return the rows of `empty_rows` as one value.

    Example: `as_rows(empty_rows(x, True), x).shape == x.shape`.
    """
    values, scale = rows
    return values if scale is None else Quantized(values=values, scale=scale, dtype=like.dtype)


@triton.jit
def inverse_rms(row: tl.tuple, WIDTH: tl.constexpr, eps: tl.tensor) -> tl.tensor:
    # Explicit fma: otherwise the compiler chooses which product it fuses, and may choose differently in each variant.
    squares = row[0] * row[0]
    for i in tl.static_range(1, len(row)):
        squares = tl.fma(row[i], row[i], squares)
    return 1.0 / tl.sqrt(tl.sum(squares, 0) / WIDTH + eps)


@triton.jit
def add_attention(
    update: tl.tuple, scale: tl.tensor, before: tl.tuple, post: tl.tuple, dtype: tl.constexpr
) -> tl.tuple:
    """Return the residual stream after attention, rounded to `dtype` and then float32."""
    after = ()
    for i in tl.static_range(len(update)):
        change = (update[i] * scale * post[i]).to(dtype).to(tl.float32)
        after += ((before[i] + change).to(dtype).to(tl.float32),)  # type: ignore[assignment]
    return after


@triton.jit
def router_input(normed: tl.tensor, router_scale: tl.tensor, root: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return a block of the router's input, rounded to `dtype`.

    The published model rounds three times: after the norm, the scale and D**-0.5. With one rounding less, two experts
    can swap ranks.
    """
    scaled = (normed.to(dtype).to(tl.float32) * router_scale).to(dtype)
    return (scaled.to(tl.float32) * root).to(dtype)


@triton.jit
def _load_scaled(rows: tl.tensor, scales: tl.tuple, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> tl.tuple:
    """Load this program's row, times its scale and those of the columns unless None."""
    row_scale, col_scale = scales
    row = load_row(rows + tl.program_id(0).to(tl.int64) * WIDTH, WIDTH, BLOCK)
    if row_scale is None:
        return row
    else:  # noqa: RET505 (without `else`, Triton also compiles the code after the return)
        scale = tl.load(row_scale + tl.program_id(0))
        scales = load_row(col_scale, WIDTH, BLOCK)
        scaled = ()
        for i in tl.static_range(len(row)):
            scaled += (row[i] * (scales[i] * scale),)  # type: ignore[assignment]
        return scaled


@triton.jit
def _rms_norm_kernel(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64) * WIDTH
    values = load_row(x + row, WIDTH, BLOCK)
    scale = inverse_rms(values, WIDTH, eps)
    if weight is not None:
        weights = load_row(weight, WIDTH, BLOCK)
    for i in tl.static_range(len(values)):
        normed = values[i] * scale
        if weight is not None:
            normed *= weights[i]
        store_block(out + row, normed, i, WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def _round_rows_kernel(
    x: tl.tensor,
    values: tl.tensor,
    scale: tl.tensor,
    num_rows: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    store_rows_rounded(values, scale, row, num_rows, load_rows(x, row, num_rows, WIDTH, BLOCK, WIDTH), WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def _scale_rows_kernel(
    x: tl.tensor,
    row_scale: tl.tensor,
    col_scale: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    factor: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (cols < width)
    values = tl.load(x + row * width + cols, mask=mask, other=0.0).to(tl.float32)
    values *= tl.load(row_scale + row, mask=row < num_rows, other=0.0) * factor
    if col_scale is not None:
        values *= tl.load(col_scale + cols, mask=cols < width, other=0.0)
    tl.store(out + row * width + cols, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _attention_residual_kernel(
    attention: tl.tensor,
    residual: tl.tensor,
    norms: ResidualNorms,
    scales: tl.tuple,  # of rows and columns, or None
    x: tl.tensor,
    dense: tl.tuple,  # as in `store_rounded`
    expert: tl.tuple,
    expert_sums: tl.tensor,
    router: tl.tensor,
    eps: tl.tensor,
    root: tl.tensor,
    WIDTH: tl.constexpr,
    MANY: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    dtype = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * WIDTH
    # For few rows all loads come first: a load after a reduction would wait for memory again, about a microsecond. For
    # many, registers are worth more: more programs run at once.
    if not MANY:
        post = load_row(norms.post, WIDTH, BLOCK)
        dense_w = load_row(norms.dense, WIDTH, BLOCK)
        expert_w = load_row(norms.expert, WIDTH, BLOCK)
        router_w = load_row(norms.router, WIDTH, BLOCK)
    wait_for_launches_before(DEPENDENT)
    update = _load_scaled(attention, scales, WIDTH, BLOCK)
    before = load_row(residual + row, WIDTH, BLOCK)

    scale = inverse_rms(update, WIDTH, eps)
    if MANY:
        post = load_row(norms.post, WIDTH, BLOCK)
    after = add_attention(update, scale, before, post, dtype)
    for i in tl.static_range(len(after)):
        store_block(x + row, after[i], i, WIDTH)
    scale = inverse_rms(after, WIDTH, eps)
    if MANY:
        dense_w = load_row(norms.dense, WIDTH, BLOCK)
        expert_w = load_row(norms.expert, WIDTH, BLOCK)
        router_w = load_row(norms.router, WIDTH, BLOCK)
    dense_in = ()
    expert_in = ()
    for i in tl.static_range(len(after)):
        normed = after[i] * scale
        dense_in += (normed * dense_w[i],)  # type: ignore[assignment]
        expert_in += (normed * expert_w[i],)  # type: ignore[assignment]
        store_block(router + row, router_input(normed, router_w[i], root, dtype), i, WIDTH)
    store_rounded(dense, dense_in, WIDTH)
    if expert_sums is None:
        store_rounded(expert, expert_in, WIDTH)
    else:
        _store_ordered(expert[0], expert[1], expert_sums, expert_in, WIDTH)


@triton.jit
def _layer_tail_kernel(
    residual: tl.tensor,
    dense: tl.tensor,
    expert_rows: tl.tensor,
    norms: TailNorms,
    layer_scalar: tl.tensor,
    next_weight: tl.tensor,
    scales: tl.tuple,
    x: tl.tensor,
    normed: tl.tuple,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    SCALAR_PER_ROW: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    MANY: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    dtype = x.dtype.element_ty
    number = tl.program_id(0).to(tl.int64)
    row = number * WIDTH
    if SCALAR_PER_ROW:
        layer_scalar += number
    if not MANY:  # as above
        expert_w = load_row(norms.expert, WIDTH, BLOCK)
        dense_w = load_row(norms.dense, WIDTH, BLOCK)
        post = load_row(norms.post, WIDTH, BLOCK)
        following = load_row(next_weight, WIDTH, BLOCK)
    wait_for_launches_before(DEPENDENT)
    scalar = tl.load(layer_scalar).to(tl.float32)
    before = load_row(residual + row, WIDTH, BLOCK)
    dense_out = _load_scaled(dense, scales, WIDTH, BLOCK)
    experts = load_row(expert_rows + row * NUM_ACTIVE, WIDTH, BLOCK)
    for k in tl.static_range(1, NUM_ACTIVE):
        others = load_row(expert_rows + row * NUM_ACTIVE + k * WIDTH, WIDTH, BLOCK)
        sums = ()
        for i in tl.static_range(len(experts)):
            sums += (experts[i] + others[i],)  # type: ignore[assignment]
        experts = sums

    moe = ()
    for i in tl.static_range(len(experts)):
        moe += (experts[i].to(dtype).to(tl.float32),)  # type: ignore[assignment]
    moe_scale = inverse_rms(moe, WIDTH, eps)
    dense_rms = inverse_rms(dense_out, WIDTH, eps)
    if MANY:
        expert_w = load_row(norms.expert, WIDTH, BLOCK)
        dense_w = load_row(norms.dense, WIDTH, BLOCK)
        post = load_row(norms.post, WIDTH, BLOCK)
        following = load_row(next_weight, WIDTH, BLOCK)
    both = ()
    for i in tl.static_range(len(moe)):
        normed_moe = (moe[i] * moe_scale * expert_w[i]).to(dtype).to(tl.float32)
        normed_dense = (dense_out[i] * dense_rms * dense_w[i]).to(dtype).to(tl.float32)
        both += ((normed_dense + normed_moe).to(dtype).to(tl.float32),)  # type: ignore[assignment]

    scale = inverse_rms(both, WIDTH, eps)
    after = ()
    for i in tl.static_range(len(both)):
        change = (both[i] * scale * post[i]).to(dtype).to(tl.float32)
        sums = (before[i] + change).to(dtype).to(tl.float32)
        out = (sums * scalar).to(dtype)
        store_block(x + row, out, i, WIDTH)
        after += (out.to(tl.float32),)  # type: ignore[assignment]

    scale = inverse_rms(after, WIDTH, eps)
    result = ()
    for i in tl.static_range(len(after)):
        result += (after[i] * scale * following[i],)  # type: ignore[assignment]
    store_rounded(normed, result, WIDTH)


@triton.jit
def _round_to_float8(x: tl.tensor) -> tl.tensor:
    """Return float32 values of at most 448 rounded to float8 (e4m3), in float32.

    A conversion to float8 and back would be shorter. But with the assembler of Triton 3.6, the code then reads a wrong
    register.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + (bits >> 20 & 1) & -0x100000).to(tl.float32, bitcast=True)
    denormal = (x + 1.5 * 2.0**14) - 1.5 * 2.0**14  # a multiple of 2**-9
    return tl.where(tl.abs(x) < 2.0**-6, denormal, normal)


@triton.jit
def _store_ordered(out: tl.tensor, scale: tl.tensor, sums: tl.tensor, row: tl.tuple, WIDTH: tl.constexpr) -> None:
    """Store this program's row as `fourbit.OrderedRows`."""
    BLOCK: tl.constexpr = row[0].shape[0]
    out += tl.program_id(0).to(tl.int64) * WIDTH
    row_scale = row_float8_scale(row)
    tl.store(scale + tl.program_id(0), row_scale)
    for i in tl.static_range(len(row)):
        rounded = _round_to_float8(row[i] / row_scale)
        exact = tl.sum(rounded.reshape(BLOCK // 64, 64), 1) * (-8 * 2.0**-49)
        group_sums = exact.to(tl.bfloat16)
        at_sums = sums + tl.program_id(0) * 128 + i * (BLOCK // 64) + tl.arange(0, BLOCK // 64)
        tl.store(at_sums, group_sums)
        tl.store(at_sums + 64, (exact - group_sums.to(tl.float32)).to(tl.bfloat16))
        store_block(out, rounded.reshape(BLOCK // 16, 2, 8).permute(0, 2, 1).reshape(BLOCK), i, WIDTH)
