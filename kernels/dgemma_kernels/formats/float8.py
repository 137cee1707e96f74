"""Values in float8 (e4m3, three bits of mantissa) with float32 scales, as fp8 tensor cores multiply them."""

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 448.0  # of e4m3
_LEAST = 2.0**-80  # rows that are smaller than this everywhere become zeros, not NaN
_CHUNK = 16_384  # rows: all experts' quotients in float32 would take as much memory as their weights


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """values times scale. `dtype` is what they stand for, and what is computed from them.

    Example: `quantize(weight).dequantize()` is within a sixteenth of `weight`, or of its row's largest / 448 / 512.
    """

    values: Tensor  # (..., K) float8_e4m3fn
    scale: Tensor  # (...) float32, one a row; with `block` (..., G), one for each so many columns
    dtype: torch.dtype
    block: int | None = None

    def __post_init__(self) -> None:
        if self.block is not None and self.block < 1:
            raise ValueError(f"Quantized.block must be at least 1 column, got {self.block}.")
        *rows, width = self.values.shape
        shape = rows if self.block is None else [*rows, -(-width // self.block)]
        if list(self.scale.shape) != shape or self.scale.dtype != torch.float32 or not self.scale.is_contiguous():
            raise ValueError(
                f"Quantized.scale must be contiguous {tuple(shape)} float32 for values {tuple(self.values.shape)}, "
                f"got {tuple(self.scale.shape)} {self.scale.dtype}."
            )

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self) -> Tensor:
        """What they stand for, exactly: (..., K) float64."""
        if self.block is None:
            return self.values.double() * self.scale[..., None]
        wide = self.scale.repeat_interleave(self.block, -1)
        return self.values.double() * wide[..., : self.values.shape[-1]]


def quantize(x: Tensor) -> Quantized:
    """x (..., K) rounded to float8, each row scaled so that its largest value is float8's.

    Example: `quantize(experts.gate_up_proj).scale.shape` is `(128, 1408)`.
    """
    scale = torch.linalg.vector_norm(x, torch.inf, dim=-1).float().clamp(min=_LEAST) / LARGEST
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    rows, row_scale, out = x.reshape(-1, x.shape[-1]), scale.view(-1, 1), values.view(-1, x.shape[-1])
    for start in range(0, rows.shape[0], _CHUNK):
        chunk = slice(start, start + _CHUNK)
        out[chunk] = rows[chunk] / row_scale[chunk]
    return Quantized(values=values, scale=scale, dtype=x.dtype)


def split(x: Tensor | Quantized) -> tuple[Tensor, Tensor | None]:
    """What a kernel reads: the values, and their scale where they have one."""
    return (x.values, x.scale) if isinstance(x, Quantized) else (x, None)
