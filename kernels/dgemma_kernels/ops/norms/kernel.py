"""RMSNorm and the residual stream between a layer's products, each in one pass over the rows.

Statistics and products are float32. Values round to the model's dtype where the published model (transformers'
DiffusionGemma) rounds them. Reference: `reference.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.formats.float8 import Quantized
from dgemma_kernels.formats.fourbit import OrderedRows
from dgemma_kernels.ops.blocks import float8_scale, wait_for_launches_before
from dgemma_kernels.ops.configs import dependent_launch

_MAX_WIDTH = 16384
# From this number of rows on, `layer_tail` uses fewer registers, so that three programs share a multiprocessor.
_MANY, _FEW_REGISTERS = 1024, 80


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x / rms(x), times `weight` unless None. x: (..., D), weight: (D,) → (..., D).

    Example: `rms_norm(hidden, layer.input_layernorm.weight, 1e-6)`.
    """
    _require_rows("rms_norm", x=x)
    _require_vectors("rms_norm", x.shape[-1], weight=weight)
    out = torch.empty_like(x)
    width = x.shape[-1]
    _rms_norm_kernel[(x.numel() // width,)](
        x, weight, out, eps, width, BLOCK=triton.next_power_of_2(width), num_warps=_num_warps(width)
    )
    return out


def round_rows(x: Tensor) -> Quantized:
    """Round rows (M, D) to float8, with one scale per row: `formats.float8.quantize` in one launch.

    Example: `round_rows(normed).values.dtype` is `torch.float8_e4m3fn`.
    """
    _require_rows("round_rows", x=x)
    width = x.shape[-1]
    values, scale = _empty_rows(x, True)
    _round_rows_kernel[(x.numel() // width,)](
        x, values, scale, width, BLOCK=triton.next_power_of_2(width), num_warps=_num_warps(width)
    )
    assert scale is not None
    return Quantized(values=values, scale=scale, dtype=x.dtype)


def attention_residual(
    attention: Tensor,
    residual: Tensor,
    post_weight: Tensor,
    dense_weight: Tensor,
    expert_weight: Tensor,
    router_scale: Tensor,
    eps: float,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    float8: bool = False,
    float8_dense: bool = False,
    ordered: bool = False,
) -> tuple[Tensor, Tensor | Quantized, Tensor | Quantized | OrderedRows, Tensor]:
    """Return the residual stream after attention, and the inputs of dense MLP, experts and router.

    x = residual + norm(attention) * post_weight. With n = norm(x), returns
    (x, n * dense_weight, n * expert_weight, n * router_scale * D**-0.5). attention, residual: (M, D), others (D,);
    all four results (M, D). `scales` (M,) and (D,) multiply the rows and columns of `attention` first. With `float8`
    the experts' input is rounded to float8, with one scale per row; with `float8_dense` that of the dense MLP. With
    `ordered` the experts' input is rounded to `OrderedRows`.

    Example: `x, dense_in, expert_in, router_in = attention_residual(attention, x, *weights, eps=1e-6)`.
    """
    _require_rows("attention_residual", attention=attention, residual=residual)
    width = residual.shape[-1]
    vectors = {"post_weight": post_weight, "dense_weight": dense_weight, "expert_weight": expert_weight}
    _require_vectors("attention_residual", width, **vectors, router_scale=router_scale)
    x, router = torch.empty_like(residual), torch.empty_like(residual)
    dense, dense_scale = _empty_rows(residual, float8_dense)
    expert, expert_scale = _empty_rows(residual, float8 or ordered)
    expert_sums = None
    if ordered:
        if width % 64 or width > 4096:
            raise ValueError(f"attention_residual ordered rows must have 64, 128, ... or 4096 columns, got {width}.")
        expert_sums = torch.empty(residual.numel() // width, 64, dtype=torch.bfloat16, device=residual.device)
    row_scale, col_scale = scales or (None, None)
    _attention_residual_kernel[(residual.numel() // width,)](
        attention,
        residual,
        post_weight,
        dense_weight,
        expert_weight,
        router_scale,
        row_scale,
        col_scale,
        x,
        dense,
        dense_scale,
        expert,
        expert_scale,
        expert_sums,
        router,
        eps,
        width**-0.5,
        width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=_num_warps(width),
        **dependent_launch(residual.device),
    )
    if expert_scale is not None and expert_sums is not None:
        rows: Any = OrderedRows(values=expert, scale=expert_scale, sums=expert_sums, dtype=x.dtype)
    else:
        rows = _as_rows(expert, expert_scale, x)
    return x, _as_rows(dense, dense_scale, x), rows, router


def layer_tail(
    residual: Tensor,
    dense: Tensor,
    expert_rows: Tensor,
    dense_weight: Tensor,
    expert_weight: Tensor,
    post_weight: Tensor,
    layer_scalar: Tensor,
    next_weight: Tensor,
    eps: float,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    float8: bool = False,
) -> tuple[Tensor, Tensor | Quantized]:
    """Return the end of a layer and the first norm of the next, from the dense output and the weighted expert rows.

    moe = Σ_k expert_rows[:, k], in the order of k, so that every run gives the same sum;
    x = (residual + norm(norm(dense) * dense_weight + norm(moe) * expert_weight) * post_weight) * layer_scalar;
    returns (x, norm(x) * next_weight). residual, dense: (M, D), expert_rows: (M, A, D), layer_scalar: (1,) or (M,),
    the other weights (D,). `scales` (M,) and (D,) multiply the rows and columns of `dense` first. With `float8` the
    second result is rounded to float8, with one scale per row.

    Example: `x, normed = layer_tail(x, dense, rows, *weights, layer.layer_scalar, next_input_layernorm.weight, 1e-6)`.
    """
    _require_rows("layer_tail", residual=residual, dense=dense)
    width = residual.shape[-1]
    vectors = {"dense_weight": dense_weight, "expert_weight": expert_weight, "post_weight": post_weight}
    _require_vectors("layer_tail", width, **vectors, next_weight=next_weight)
    _require_vectors("layer_tail", layer_scalar.numel(), layer_scalar=layer_scalar)
    if layer_scalar.numel() not in (1, residual.numel() // width):
        raise ValueError(f"layer_tail.layer_scalar must be (1,) or (M,), got {tuple(layer_scalar.shape)}.")
    num_active = expert_rows.shape[-2]
    if expert_rows.shape != (residual.numel() // width, num_active, width) or not expert_rows.is_contiguous():
        raise ValueError(
            f"layer_tail.expert_rows must be contiguous (M, A, D) for a residual of {tuple(residual.shape)}, got "
            f"{tuple(expert_rows.shape)}."
        )
    x = torch.empty_like(residual)
    normed, normed_scale = _empty_rows(residual, float8)
    row_scale, col_scale = scales or (None, None)
    num_rows = residual.numel() // width
    _layer_tail_kernel[(num_rows,)](
        residual,
        dense,
        expert_rows,
        dense_weight,
        expert_weight,
        post_weight,
        layer_scalar,
        next_weight,
        row_scale,
        col_scale,
        x,
        normed,
        normed_scale,
        eps,
        width,
        SCALAR_PER_ROW=layer_scalar.numel() > 1,
        NUM_ACTIVE=num_active,
        BLOCK=triton.next_power_of_2(width),
        num_warps=_num_warps(width),
        maxnreg=_FEW_REGISTERS if num_rows >= _MANY else None,
        **dependent_launch(residual.device),
    )
    return x, _as_rows(normed, normed_scale, x)


def _empty_rows(like: Tensor, float8: bool) -> tuple[Tensor, Tensor | None]:
    """Return new rows, and their scales if they are float8."""
    if not float8:
        return torch.empty_like(like), None
    scale = torch.empty(like.shape[:-1], dtype=torch.float32, device=like.device)
    return torch.empty_like(like, dtype=torch.float8_e4m3fn), scale


def _as_rows(rows: Tensor, scale: Tensor | None, like: Tensor) -> Tensor | Quantized:
    return rows if scale is None else Quantized(values=rows, scale=scale, dtype=like.dtype)


@triton.jit
def _inverse_rms(x: tl.tensor, width: tl.tensor, eps: tl.tensor) -> tl.tensor:
    return 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)


@triton.jit
def _rms_norm_kernel(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, eps: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr
) -> None:
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    at = tl.program_id(0).to(tl.int64) * width + cols
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    values *= _inverse_rms(values, width, eps)
    if weight is not None:
        values *= tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _round_rows_kernel(
    x: tl.tensor, values: tl.tensor, scale: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr
) -> None:
    cols = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * width + cols
    row = tl.load(x + at, mask=cols < width, other=0.0).to(tl.float32)
    _store_rounded(values, scale, row, at, cols < width)


@triton.jit
def _attention_residual_kernel(
    attention: tl.tensor,
    residual: tl.tensor,
    post_weight: tl.tensor,
    dense_weight: tl.tensor,
    expert_weight: tl.tensor,
    router_scale: tl.tensor,
    row_scale: tl.tensor,
    col_scale: tl.tensor,
    x: tl.tensor,
    dense: tl.tensor,
    dense_scale: tl.tensor,
    expert: tl.tensor,
    expert_scale: tl.tensor,
    expert_sums: tl.tensor,
    router: tl.tensor,
    eps: tl.tensor,
    root: tl.tensor,
    width: tl.tensor,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    dtype = x.dtype.element_ty
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    at = tl.program_id(0).to(tl.int64) * width + cols
    # All loads come first: a load after a reduction would wait for memory again, about a microsecond.
    post = tl.load(post_weight + cols, mask=inside, other=0.0)
    dense_w = tl.load(dense_weight + cols, mask=inside, other=0.0)
    expert_w = tl.load(expert_weight + cols, mask=inside, other=0.0)
    scale = tl.load(router_scale + cols, mask=inside, other=0.0)
    wait_for_launches_before(DEPENDENT)
    update = _load_scaled(attention, row_scale, col_scale, at, cols, inside)
    before = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)

    update *= _inverse_rms(update, width, eps)
    update *= post.to(tl.float32)
    after = (before + update.to(dtype).to(tl.float32)).to(dtype)
    tl.store(x + at, after, mask=inside)

    after = after.to(tl.float32)
    normed = after * _inverse_rms(after, width, eps)
    _store_rounded(dense, dense_scale, normed * dense_w.to(tl.float32), at, inside)
    if expert_sums is None:
        _store_rounded(expert, expert_scale, normed * expert_w.to(tl.float32), at, inside)
    else:
        _store_ordered(expert, expert_scale, expert_sums, normed * expert_w.to(tl.float32), at, inside)
    # The published model rounds after the norm, the scale and D**-0.5. One rounding less can swap two experts.
    scaled = (normed.to(dtype).to(tl.float32) * scale.to(tl.float32)).to(dtype)
    tl.store(router + at, (scaled.to(tl.float32) * root).to(dtype), mask=inside)


@triton.jit
def _layer_tail_kernel(
    residual: tl.tensor,
    dense: tl.tensor,
    expert_rows: tl.tensor,
    dense_weight: tl.tensor,
    expert_weight: tl.tensor,
    post_weight: tl.tensor,
    layer_scalar: tl.tensor,
    next_weight: tl.tensor,
    row_scale: tl.tensor,
    col_scale: tl.tensor,
    x: tl.tensor,
    normed: tl.tensor,
    normed_scale: tl.tensor,
    eps: tl.tensor,
    width: tl.tensor,
    SCALAR_PER_ROW: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    dtype = x.dtype.element_ty
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    row = tl.program_id(0).to(tl.int64)
    at = row * width + cols
    if SCALAR_PER_ROW:
        layer_scalar += row
    # All loads come first, as above.
    dense_w = tl.load(dense_weight + cols, mask=inside, other=0.0)
    expert_w = tl.load(expert_weight + cols, mask=inside, other=0.0)
    post = tl.load(post_weight + cols, mask=inside, other=0.0)
    following = tl.load(next_weight + cols, mask=inside, other=0.0)
    wait_for_launches_before(DEPENDENT)
    scalar = tl.load(layer_scalar).to(tl.float32)
    before = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    both = _load_scaled(dense, row_scale, col_scale, at, cols, inside)

    moe = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(NUM_ACTIVE):
        moe += tl.load(expert_rows + (row * NUM_ACTIVE + k) * width + cols, mask=inside, other=0.0).to(tl.float32)
    moe = moe.to(dtype).to(tl.float32)
    moe *= _inverse_rms(moe, width, eps)
    moe = (moe * expert_w.to(tl.float32)).to(dtype).to(tl.float32)

    both *= _inverse_rms(both, width, eps)
    both = (both * dense_w.to(tl.float32)).to(dtype).to(tl.float32)
    both = (both + moe).to(dtype).to(tl.float32)
    both *= _inverse_rms(both, width, eps)
    both = (both * post.to(tl.float32)).to(dtype).to(tl.float32)

    after = (before + both).to(dtype).to(tl.float32)
    after = (after * scalar).to(dtype)
    tl.store(x + at, after, mask=inside)
    after = after.to(tl.float32)
    after *= _inverse_rms(after, width, eps)
    _store_rounded(normed, normed_scale, after * following.to(tl.float32), at, inside)


@triton.jit
def _load_scaled(
    rows: tl.tensor, row_scale: tl.tensor, col_scale: tl.tensor, at: tl.tensor, cols: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """Load a row in float32, times its scale and those of the columns unless None."""
    values = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
    if row_scale is not None:
        values *= tl.load(col_scale + cols, mask=inside, other=0.0) * tl.load(row_scale + tl.program_id(0))
    return values


@triton.jit
def _store_rounded(out: tl.tensor, scale: tl.tensor, values: tl.tensor, at: tl.tensor, inside: tl.tensor) -> None:
    """Store a row in the dtype of `out`; in float8 if `scale` is not None, with the row's scale."""
    if scale is not None:
        row_scale = float8_scale(values, 0)
        tl.store(scale + tl.program_id(0), row_scale)
        values /= row_scale
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _store_ordered(
    out: tl.tensor, scale: tl.tensor, sums: tl.tensor, values: tl.tensor, at: tl.tensor, inside: tl.tensor
) -> None:
    """Store a row as `fourbit.OrderedRows`."""
    BLOCK: tl.constexpr = values.shape[0]
    row_scale = float8_scale(values, 0)
    tl.store(scale + tl.program_id(0), row_scale)
    rounded = (values / row_scale).to(tl.float8e4nv)
    group_sums = tl.sum(rounded.to(tl.float32).reshape(BLOCK // 64, 64), 1) * (-8 * 2.0**-49)
    tl.store(sums + tl.program_id(0) * 64 + tl.arange(0, BLOCK // 64), group_sums.to(tl.bfloat16))
    ordered = rounded.reshape(BLOCK // 16, 2, 8).permute(0, 2, 1).reshape(BLOCK)
    tl.store(out + at, ordered, mask=inside)


def _num_warps(width: int) -> int:
    # 16 values per thread at the published width: the row stays in registers, and loads are 16 bytes wide.
    return min(max(triton.next_power_of_2(width) // 512, 1), 16)


def _require_rows(owner: str, **tensors: Tensor) -> None:
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if tensor.shape != first.shape or tensor.dtype != first.dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{owner}.{name} must be contiguous {tuple(first.shape)} {first.dtype}, got {tuple(tensor.shape)} "
                f"{tensor.dtype} with strides {tensor.stride()}."
            )
    if not first.is_floating_point() or not 1 <= first.shape[-1] <= _MAX_WIDTH:
        raise ValueError(
            f"{owner} rows must have 1 to {_MAX_WIDTH} floating-point values, got {tuple(first.shape)} {first.dtype}."
        )


def _require_vectors(owner: str, width: int, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.shape != (width,) or not tensor.is_contiguous()):
            raise ValueError(f"{owner}.{name} must be contiguous ({width},), got {tuple(tensor.shape)}.")
