"""Values in float8 (e4m3, three bits of mantissa) with float32 scales, as fp8 tensor cores multiply them."""

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 448.0  # of e4m3
_LEAST = 2.0**-80  # a row whose values are all smaller becomes zeros, not NaN
_CHUNK = 1 << 25  # values at a time; the float32 quotients of all would take twice the memory of bfloat16 weights


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """float8 values times float32 scales. `dtype` is the dtype of the original values and of results from them.

    Example: `quantize(weight).decode()` differs from `weight` by at most 1/16 of it, or 1/1024 of the scale if larger.
    """

    values: Tensor  # (..., K) float8_e4m3fn
    scale: Tensor  # (...) float32, one per row; with `block` (..., G), one per `block` columns
    dtype: torch.dtype
    block: int | None = None

    def __post_init__(self) -> None:
        *rows, width = self.values.shape
        assert list(self.scale.shape) == rows + ([] if self.block is None else [-(-width // self.block)])

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that it stores."""
        return self.values, self.scale

    def decode(self) -> Tensor:
        """Return values times scales, exactly: (..., K) float64."""
        if self.block is None:
            return self.values.double() * self.scale[..., None]
        wide = self.scale.repeat_interleave(self.block, -1)
        return self.values.double() * wide[..., : self.values.shape[-1]]


def quantize(x: Tensor) -> Quantized:
    """Round x (..., K) to float8, with one scale per row that maps the row's largest value to float8's largest.

    Example: `quantize(experts.gate_up_proj).scale.shape` is `(128, 1408)`.
    """
    scale = torch.linalg.vector_norm(x, torch.inf, dim=-1).float().clamp(min=_LEAST) / LARGEST
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    rows, row_scale, out = x.reshape(-1, x.shape[-1]), scale.view(-1, 1), values.view(-1, x.shape[-1])
    step = max(1, _CHUNK // x.shape[-1])
    for start in range(0, rows.shape[0], step):
        chunk = slice(start, start + step)
        out[chunk] = rows[chunk] / row_scale[chunk]
    return Quantized(values=values, scale=scale, dtype=x.dtype)


def values_and_scale(x: Tensor | Quantized) -> tuple[Tensor, Tensor | None]:
    """Return the two arguments of a kernel: the values, and their scale, which is None for a plain tensor.

    Example: `values, scale = values_and_scale(quantize(x))`.
    """
    return (x.values, x.scale) if isinstance(x, Quantized) else (x, None)


def multiply(x: Tensor | Quantized, weight: Tensor | Quantized, out: Tensor | None = None) -> Tensor:
    """Return x @ weight.T by a library product: (M, K), (N, K) → (M, N) in the dtype of x. Both are plain or float8.

    Float8 products accumulate as the library does, in at least 14 bits, and round once.

    Example: `multiply(round_rows(x), quantize(linear.weight))`.
    """
    if isinstance(x, Tensor) and isinstance(weight, Tensor):
        return torch.mm(x, weight.T, out=out)
    assert isinstance(x, Quantized)
    assert isinstance(weight, Quantized)
    if x.values.device.type != "cuda":  # the library's product is for GPUs
        wide = torch.mm(x.decode(), weight.decode().T)
        return wide.to(x.dtype) if out is None else out.copy_(wide)
    scales = {"scale_a": x.scale[:, None], "scale_b": weight.scale[None, :]}
    product: Tensor = torch._scaled_mm(
        x.values, weight.values.T, **scales, out_dtype=x.dtype, use_fast_accum=True, out=out
    )
    return product


def multiply_unscaled(
    x: Tensor | Quantized, weight: Tensor | Quantized, one: Tensor, out: Tensor | None = None
) -> Tensor:
    """Return the product of the values of two float8 operands, for a kernel that applies both scales itself.

    For rows of few thousand columns it is faster than `multiply`. x: (M, K), weight: (N, K), one: () float32, the
    number 1 on their device → (M, N) in the dtype of x, or in that of `out`.

    Example: `multiply_unscaled(round_rows(seen), layer.o, one)`.
    """
    assert isinstance(x, Quantized)
    assert isinstance(weight, Quantized)
    if x.values.device.type != "cuda":
        wide = torch.mm(x.values.float(), weight.values.float().T)
        return wide.to(x.dtype) if out is None else out.copy_(wide)
    product: Tensor = torch._scaled_mm(
        x.values,
        weight.values.T,
        scale_a=one,
        scale_b=one,
        out_dtype=x.dtype if out is None else out.dtype,
        use_fast_accum=True,
        out=out,
    )
    return product
