"""Quantisation of weights: round to nearest, with the scale of every group chosen by its squared error.

int4 can also use the inputs of a layer: GPTQ (arXiv:2210.17323).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dgemma.checks import Words, require, require_field
from dgemma.quantization.weights import (
    E2M1,
    NVFP4_GROUP,
    Float8Weight,
    IntWeight,
    NvFp4Weight,
    QuantizedWeight,
    Weight,
    pack_nibbles,
)

FORMATS = ("int4", "int8", "fp8", "nvfp4")
LARGEST_E4M3 = 448.0
_LARGEST_E2M1 = 6.0
_SMALLEST = 2.0**-80  # a row whose values are all smaller becomes zeros, not NaN
_CHUNK = 1 << 24  # values quantised at a time
_EXPERTS_AT_ONCE = 16  # for GPTQ: one copy of the (K, K) matrices of 128 experts takes 4 GB, and several are needed
_DAMPING = 0.01  # share of the diagonal's mean that is added to it: with few inputs, some directions have no data
# Scales to try, as fractions of the one that represents the largest value of the group. A smaller scale clips the
# largest value and rounds all others more finely.
_FRACTIONS = tuple(1.0 - 0.03 * i for i in range(14))
_MIDPOINTS = tuple((low + high) / 2 for low, high in pairwise(E2M1[:8]))


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Formats for the weights of a model: one for experts, one for attention and dense MLPs. None means unquantised.

    Routers, self-conditioning, norms and the embedding stay unquantised. `group_size` and `symmetric` are for int4.

    Example: `DiffusionGemma.from_pretrained(path, device="cuda", quantization=Quantization(experts="int4"))`.
    """

    experts: str | None = "int4"
    dense: str | None = "fp8"
    group_size: int = 64
    symmetric: bool = True

    def __post_init__(self) -> None:
        for name in ("experts", "dense"):
            fits = getattr(self, name) is None or getattr(self, name) in FORMATS
            require_field(fits, self, name, f"be None or one of {', '.join(FORMATS)}")
        require_field(self.group_size >= 1, self, "group_size", "be >= 1", "Use 32 or 64.")
        fits = self.symmetric or "int4" in (self.experts, self.dense)
        require_field(fits, self, "symmetric", "be True without int4, the only format with zero points")

    def format_of(self, name: str) -> str | None:
        """Return the format of the weight with this name, as in `model.state_dict()`; None if it stays unquantised.

        Example: `Quantization().format_of("layers.0.experts.down_proj")` is "int4".
        """
        if ".experts." in name:
            return self.experts
        return self.dense if name.startswith("layers.") and name.endswith("_proj.weight") else None

    def apply(self, name: str, weight: Tensor, second_moments: Tensor | None = None) -> Weight:
        """Return the weight with this name in its format, rounded to nearest, or with `gptq` given second moments.

        Example: `Quantization().apply("layers.0.experts.down_proj", weight).format` is "int4".
        """
        to = self.format_of(name)
        if to is None:
            return weight
        try:
            if second_moments is not None:
                return gptq(weight, second_moments, group_size=self.group_size, symmetric=self.symmetric)
            group_size, symmetric = (self.group_size, self.symmetric) if to == "int4" else (None, True)
            return quantize(weight, to, group_size=group_size, symmetric=symmetric)
        except ValueError as error:
            raise ValueError(f"{name} cannot be quantised: {error}") from None


@torch.no_grad()
def quantize(
    weight: Tensor,
    to: str,
    *,
    group_size: int | None = None,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> QuantizedWeight:
    """Round a weight (..., N, K) to a format: "int4", "int8", "fp8" or "nvfp4".

    int4 has groups of `group_size` columns, 64 by default; int8 has one scale per row by default. `symmetric`,
    `group_size` and `scale_dtype` are for integers only.

    Example: `quantize(experts.down_proj, "int4", group_size=32).decode(torch.bfloat16)`.
    """
    require(to in FORMATS, "quantize argument 'to'", f"be one of {', '.join(FORMATS)}", to)
    fits = weight.is_floating_point() and weight.ndim in (2, 3) and weight.numel() > 0
    require(fits, "quantize weight", "be a float (N, K) or (E, N, K)", weight)
    *rows, width = weight.shape
    size = {"nvfp4": NVFP4_GROUP, "int4": group_size or 64, "int8": group_size or width, "fp8": width}[to]
    require(to != "int4" or width % 2 == 0, "quantize weight", "have an even number of columns for int4", width)
    check_weight(weight, size, "quantize")
    chunks = weight.reshape(-1, width).split(max(1, _CHUNK // width))
    if to == "fp8":
        values, scale = _joined(_float8(chunk) for chunk in chunks)
        return Float8Weight(values=values.view(weight.shape), scale=scale.view(rows))
    if to == "nvfp4":
        # One scale per matrix, as in files. It maps the largest block scale to float8's largest.
        flat = weight.reshape(-1, rows[-1] * width)
        largest = torch.linalg.vector_norm(flat, torch.inf, dim=-1).float().clamp(min=_SMALLEST)
        row_scale = (largest / (_LARGEST_E2M1 * LARGEST_E4M3)).repeat_interleave(rows[-1])  # (R,)
        parts = zip(chunks, row_scale.split(chunks[0].shape[0]), strict=True)
        codes, scale = (t.view(*rows, -1) for t in _joined(_nvfp4(chunk, part) for chunk, part in parts))
        return NvFp4Weight(codes=codes, scale=scale, row_scale=row_scale.view(rows))
    bits = int(to.removeprefix("int"))
    coded = (_integers(chunk, bits, size, symmetric, scale_dtype) for chunk in chunks)
    return _int_weight(coded, weight.shape, bits=bits, symmetric=symmetric)


@torch.no_grad()
def gptq(weight: Tensor, second_moments: Tensor, *, group_size: int = 64, symmetric: bool = True) -> IntWeight:
    """Round a weight (..., N, K) to int4 with GPTQ: each column's rounding error is moved to later columns.

    The error to minimise is that of the products. `second_moments` (..., K, K) is the sum of x xᵀ over their inputs x.

    Example: `gptq(linear.weight, inputs.T @ inputs)`.
    """
    shape, width = weight.shape, weight.shape[-1]
    check_weight(weight, group_size, "gptq")
    tensors = weight.detach().reshape(-1, *shape[-2:]), second_moments.reshape(-1, width, width)
    parts = zip(*(tensor.split(_EXPERTS_AT_ONCE) for tensor in tensors), strict=True)
    coded = (_calibrated(part, moments, group_size, symmetric) for part, moments in parts)
    return _int_weight(coded, shape, bits=4, symmetric=symmetric)


def _calibrated(weight: Tensor, moments: Tensor, group_size: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (E, N, K / 2), scales and zero points (E, N, G) of weights (E, N, K)."""
    rest, factor = weight.float().clone(), _inverse_factor(moments.float())
    codes = torch.empty(rest.shape, dtype=torch.uint8, device=weight.device)
    scales, zeros = [], []
    for start in range(0, rest.shape[-1], group_size):
        group = slice(start, start + group_size)
        block, errors = rest[..., group], torch.empty_like(rest[..., group])
        scale, zero = choose_scale(block, bits=4, symmetric=symmetric, scale_dtype=torch.bfloat16)
        for column in range(group_size):
            at = start + column
            exact = block[..., column]
            code = (exact / scale + zero).round().clamp(0, 15)
            codes[..., at] = code.to(torch.uint8)
            error = (exact - (code - zero) * scale) / factor[:, at, at, None]
            block[..., column + 1 :] -= error[..., None] * factor[:, None, at, at + 1 : group.stop]
            errors[..., column] = error
        rest[..., group.stop :] -= errors @ factor[:, group, group.stop :]
        scales.append(scale.to(torch.bfloat16))
        zeros.append(zero.to(torch.uint8))
    return pack_nibbles(codes), torch.stack(scales, dim=-1), torch.stack(zeros, dim=-1)


def _inverse_factor(moments: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of (E, K, K), damped."""
    diagonal = moments.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1, keepdim=True)
    # An expert that no token chose has no inputs. With the identity, its weights are rounded to nearest.
    damped = diagonal + torch.where(mean > 0, _DAMPING * mean, 1.0)
    moments = moments.clone()
    moments.diagonal(dim1=-2, dim2=-1).copy_(damped)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments))
    return torch.linalg.cholesky(inverse, upper=True)


def check_weight(weight: Tensor, group_size: int, owner: str) -> None:
    """Raise if groups do not divide the columns, or for NaN or infinity: their whole group would become NaN."""
    width = weight.shape[-1]
    fits, rule = width % group_size == 0, f"divide the weight's {width} columns"
    require(fits, f"{owner} group_size", rule, group_size, "Use 32 or 64.")
    is_finite = bool(torch.linalg.vector_norm(weight.flatten(), torch.inf).isfinite())
    require(is_finite, f"{owner} weight", "be finite", Words("NaN or infinity"), "Repair or load another checkpoint.")


def requantize(values: Tensor, like: QuantizedWeight) -> QuantizedWeight:
    """Round new values (..., N, K) to the format of another weight.

    The result never has a `group_index`: its groups are neighbouring columns. It never has a `bias` either: if the
    other weight has one, the result has zero points.
    """
    if not isinstance(like, IntWeight):
        return quantize(values, like.format)
    symmetric = like.zero_point is None and like.bias is None
    return quantize(values, like.format, group_size=like.group_size, symmetric=symmetric, scale_dtype=like.scale.dtype)


def _joined(pieces: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*pieces, strict=True)]


def _int_weight(coded: Iterable[tuple[Tensor, ...]], shape: torch.Size, *, bits: int, symmetric: bool) -> IntWeight:
    codes, scale, zero = (tensor.view(*shape[:-1], -1) for tensor in _joined(coded))
    return IntWeight(codes=codes, scale=scale, zero_point=None if symmetric else zero, bits=bits)


def _float8(rows: Tensor) -> tuple[Tensor, Tensor]:
    # The scale is rounded to bfloat16, as files store it. If it is rounded down, the largest quotient exceeds 448, but
    # by so little that it rounds to 448.
    scale = (rows.abs().amax(-1).float().clamp(min=_SMALLEST) / LARGEST_E4M3).to(torch.bfloat16).float()
    return (rows.float() / scale[:, None]).to(torch.float8_e4m3fn), scale


def _integers(
    rows: Tensor, bits: int, group_size: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (r, K · bits / 8), scales (r, G) and zero points (r, G) of rows (r, K)."""
    groups = rows.float().unflatten(-1, (-1, group_size))  # (r, G, size)
    scale, zero = choose_scale(groups, bits=bits, symmetric=symmetric, scale_dtype=scale_dtype)
    codes = (groups / scale[..., None] + zero[..., None]).round_().clamp_(0, (1 << bits) - 1).to(torch.uint8).flatten(1)
    return pack_nibbles(codes) if bits == 4 else codes, scale.to(scale_dtype), zero.to(torch.uint8)


def choose_scale(groups: Tensor, *, bits: int, symmetric: bool, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero point (...) for groups (..., size) of float32 values, both float32.

    For 8 bits, the scale represents the largest value. For 4 bits, the function tries several fractions of that scale
    and returns the one with the least squared error.
    """
    middle, top = 1 << bits - 1, (1 << bits) - 1
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    # With 4 bits, symmetric codes stand for -8 to 7. So the scale must be at least high / 7 and -low / 8.
    span = torch.maximum(high / (top - middle), -low / middle) if symmetric else (high - low) / top
    # The zero point is the same for all scales, so that a smaller scale clips both sides.
    zero = torch.full_like(span, middle) if symmetric else (-low / span.clamp(min=_SMALLEST)).round()
    best_error, best_scale = torch.full_like(span, torch.inf), span
    for fraction in _FRACTIONS if bits == 4 else _FRACTIONS[:1]:
        scale = (span * fraction).clamp(min=_SMALLEST).to(scale_dtype).float()
        codes = (groups / scale[..., None] + zero[..., None]).round_().clamp_(0, top)
        error = (codes.sub_(zero[..., None]).mul_(scale[..., None]) - groups).square().sum(-1)
        best_scale = torch.where(error < best_error, scale, best_scale)
        best_error = torch.minimum(error, best_error)
    return best_scale, zero


def _nvfp4(rows: Tensor, row_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (r, K / 2) and block scales (r, K / 16) of rows (r, K), divided by `row_scale` (r,) first."""
    blocks = (rows.float() / row_scale[:, None]).unflatten(-1, (-1, NVFP4_GROUP))
    span = blocks.abs().amax(-1) / _LARGEST_E2M1
    best_error = torch.full_like(span, torch.inf)
    best_scale, best_codes = span, torch.zeros(blocks.shape, dtype=torch.uint8, device=rows.device)
    table = torch.tensor(E2M1, device=rows.device)
    # The last candidate maps the largest value to 4, because the gap from 3 to 4 is smaller than that from 4 to 6.
    for fraction in (*_FRACTIONS, _LARGEST_E2M1 / 4):
        scale = (span * fraction).clamp(max=LARGEST_E4M3).to(torch.float8_e4m3fn).float()
        scaled = blocks / scale.clamp(min=2.0**-9)[..., None]  # the smallest float8; zero stays zero
        sign = torch.where(scaled < 0, 8, 0)
        codes = torch.bucketize(scaled.abs(), torch.tensor(_MIDPOINTS, device=rows.device)) + sign
        error = (table[codes] * scale[..., None] - blocks).square().sum(-1)
        better = error < best_error
        best_error, best_scale = torch.where(better, error, best_error), torch.where(better, scale, best_scale)
        best_codes = torch.where(better[..., None], codes.to(torch.uint8), best_codes)
    return pack_nibbles(best_codes.flatten(1)), best_scale.to(torch.float8_e4m3fn)
