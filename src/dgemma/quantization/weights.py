"""Quantised weights as modules: codes and scales in buffers, decoded at each use, with gradients to the input only.

A weight is 2-D (N, K), or 3-D (E, N, K) for experts. Row n gives output n. Along K, neighbouring columns form groups
that share a scale. Below, G is the number of groups, and "..." stands for no dimension or for E.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dgemma.doors import replaceable

# Values of the sixteen e2m1 codes: a sign bit, two bits of exponent, one bit of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NVFP4_GROUP = 16
_CHUNK = 1 << 24  # values decoded at a time, because they are float32 until they are rounded


class QuantizedWeight(nn.Module):
    """A weight (..., N, K) in codes and scales. Subclasses define the format.

    Every buffer except `group_index` has the leading dimensions (..., N). Casts of a model, such as `model.half()`,
    do not change its buffers, because their dtypes are part of the format.
    """

    format: str

    def __init__(self, **tensors: Tensor | None) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    @property
    def shape(self) -> torch.Size:
        """The shape (..., N, K) of the weight that it encodes."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return next(self.buffers()).device

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that it stores, by name."""
        return dict(self.named_buffers(recurse=False))

    def with_tensors(self, tensors: dict[str, Tensor]) -> Self:
        """Return a weight of the same format with other tensors.

        Example: `weight.with_tensors({name: t[:4] for name, t in weight.tensors().items()})` is its first 4 experts.
        """
        return type(self)(**tensors)

    @replaceable
    @torch.no_grad()
    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the values (..., N, K): computed in float32, or in float64 if `dtype` is, and rounded once."""
        num_rows, width = self.shape[:-1].numel(), self.shape[-1]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        out = torch.empty(num_rows, width, dtype=dtype, device=self.device)
        size = max(1, _CHUNK // width)
        for start in range(0, num_rows, size):
            chunk = slice(start, min(start + size, num_rows))
            out[chunk] = self.decode_rows(chunk, wide, wide)
        return out.view(self.shape)

    def decode_rows(self, rows: slice, wide: torch.dtype, dtype: torch.dtype) -> Tensor:
        """Return the values (r, K) of some rows, computed in `wide`. Rows are numbered over all leading dimensions."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        for name, buffer in self.named_buffers(recurse=False):
            moved = fn(buffer)
            setattr(self, name, moved if moved.dtype == buffer.dtype else buffer.to(moved.device))
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Pickle cannot store float8.
        float8 = [name for name, buffer in self.named_buffers(recurse=False) if buffer.dtype == torch.float8_e4m3fn]
        buffers = {name: b.view(torch.uint8) if name in float8 else b for name, b in self._buffers.items()}  # type: ignore[union-attr]
        return {**self.__dict__, "_buffers": buffers, "float8": float8}

    def __setstate__(self, state: dict[str, Any]) -> None:
        float8 = state.pop("float8")
        super().__setstate__(state)
        self._buffers |= {name: state["_buffers"][name].view(torch.float8_e4m3fn) for name in float8}

    def extra_repr(self) -> str:
        return f"{self.format}, {tuple(self.shape)}"


class IntWeight(QuantizedWeight):
    """Unsigned integer codes of 4 or 8 bits. A value is (code - zero_point) · scale, or code · scale + bias.

    zero_point None means the middle, 8 or 128. `bias` is for formats whose offset is not a multiple of the scale.
    `group_index` None means that groups are K / G neighbouring columns.
    """

    codes: Tensor  # (..., N, K · bits / 8) uint8; with 4 bits, byte j has column 2j low and column 2j + 1 high
    scale: Tensor  # (..., N, G) float
    zero_point: Tensor | None  # (..., N, G) uint8
    bias: Tensor | None  # (..., N, G) float
    group_index: Tensor | None  # (..., K) int32: the group of each column

    def __init__(
        self,
        *,
        codes: Tensor,
        scale: Tensor,
        zero_point: Tensor | None = None,
        bias: Tensor | None = None,
        group_index: Tensor | None = None,
        bits: int = 4,
    ) -> None:
        super().__init__(codes=codes, scale=scale, zero_point=zero_point, bias=bias, group_index=group_index)
        self.bits = bits

    @property
    def format(self) -> str:  # type: ignore[override]
        return f"int{self.bits}"

    @property
    def shape(self) -> torch.Size:
        *rows, width = self.codes.shape
        return torch.Size((*rows, width * 8 // self.bits))

    @property
    def group_size(self) -> int:
        return self.shape[-1] // self.scale.shape[-1]

    def with_tensors(self, tensors: dict[str, Tensor]) -> Self:
        return type(self)(**tensors, bits=self.bits)

    def decode_rows(self, rows: slice, wide: torch.dtype, dtype: torch.dtype) -> Tensor:
        codes = self.codes.view(-1, self.codes.shape[-1])[rows]
        zero_point, bias = (None if t is None else self._of_rows(t, rows) for t in (self.zero_point, self.bias))
        return int_values(codes, self._of_rows(self.scale, rows), zero_point, bias, self.bits, wide, dtype)

    def _of_rows(self, per_group: Tensor, rows: slice) -> Tensor:
        """Return the entries of `per_group` (..., N, G) for some rows: (r, G), or (r, K) with a group index."""
        chosen = per_group.view(-1, per_group.shape[-1])[rows]
        if self.group_index is None:
            return chosen
        expert = torch.arange(rows.start, rows.stop, device=chosen.device) // self.shape[-2]
        return chosen.gather(1, self.group_index.view(-1, self.shape[-1])[expert].long())


@replaceable
def int_values(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    bits: int,
    wide: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    """Return the values (r, K) of packed codes. scale, zero_point and bias are (r, G)."""
    codes = unpack_nibbles(codes) if bits == 4 else codes
    if zero_point is None and bias is None:  # signed, around the middle
        codes = codes.view(torch.int8) - 8 if bits == 4 else (codes ^ 128).view(torch.int8)
    values = codes.to(wide).unflatten(-1, (scale.shape[-1], -1))
    if zero_point is not None:
        values.sub_(zero_point.to(wide)[..., None])
    values.mul_(scale.to(wide)[..., None])
    if bias is not None:
        values.add_(bias.to(wide)[..., None])
    return values.flatten(-2).to(dtype)


class Float8Weight(QuantizedWeight):
    """float8 values (e4m3) with one scale per row. A value is values · scale."""

    format = "fp8"
    values: Tensor  # (..., N, K) float8_e4m3fn
    scale: Tensor  # (..., N) float32

    def __init__(self, *, values: Tensor, scale: Tensor) -> None:
        super().__init__(values=values, scale=scale)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def decode_rows(self, rows: slice, wide: torch.dtype, dtype: torch.dtype) -> Tensor:
        return float8_values(self.values.view(-1, self.shape[-1])[rows], self.scale.view(-1, 1)[rows], wide, dtype)


@replaceable
def float8_values(values: Tensor, scale: Tensor, wide: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Return the values (r, K) of float8 values, with scales (r, 1)."""
    return (values.to(wide) * scale.to(wide)).to(dtype)


class NvFp4Weight(QuantizedWeight):
    """e2m1 codes with a float8 scale per 16 columns and a float32 scale per row: the NVFP4 format.

    A value is E2M1[code] · scale · row_scale. Files have one global scale per matrix. Here every row has its own,
    because fused matrices have several.
    """

    format = "nvfp4"
    codes: Tensor  # (..., N, K / 2) uint8; columns 2j and 2j + 1 are the low and high bits of byte j
    scale: Tensor  # (..., N, K / 16) float8_e4m3fn
    row_scale: Tensor  # (..., N) float32

    def __init__(self, *, codes: Tensor, scale: Tensor, row_scale: Tensor) -> None:
        super().__init__(codes=codes, scale=scale, row_scale=row_scale)

    @property
    def shape(self) -> torch.Size:
        *rows, width = self.codes.shape
        return torch.Size((*rows, width * 2))

    def decode_rows(self, rows: slice, wide: torch.dtype, dtype: torch.dtype) -> Tensor:
        codes, scale = (t.view(-1, t.shape[-1])[rows] for t in (self.codes, self.scale))
        table = _e2m1_values(wide, codes.device)
        return nvfp4_values(codes, scale, self.row_scale.view(-1, 1)[rows], table, dtype)


@replaceable
def nvfp4_values(codes: Tensor, scale: Tensor, row_scale: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values (r, K) of packed codes, with scales (r, G) and (r, 1). The table has the codes' values."""
    values = table[unpack_nibbles(codes).int()].unflatten(-1, (scale.shape[-1], -1))
    return values.mul_((scale.to(table.dtype) * row_scale.to(table.dtype))[..., None]).flatten(-2).to(dtype)


@cache
def _e2m1_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values of the codes (16,); cached, because copying them to a GPU makes the host wait."""
    return torch.tensor(E2M1, dtype=dtype, device=device)


Weight = Tensor | QuantizedWeight


class QuantizedLinear(nn.Module):
    """A linear layer without bias over a quantised weight (N, K)."""

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def linear(x: Tensor, weight: Weight) -> Tensor:
    """Return x (..., K) times weight (N, K) transposed: (..., N)."""
    return decoded_product(x, weight, F.linear) if isinstance(weight, QuantizedWeight) else F.linear(x, weight)


def decoded_product(x: Tensor, weight: QuantizedWeight, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return multiply(x, decoded weight), where multiply(x, W) is linear in x and multiply(y, Wᵀ) is its transpose.

    The backward decodes the weight again, so that autograd stores only codes. Under autocast, x is cast to autocast's
    dtype, unless it is float64.
    """
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    out: Tensor = _DecodedProduct.apply(x, weight, multiply)
    return out


class _DecodedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.weight, ctx.multiply = weight, multiply
        return multiply(x, weight.decode(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        with torch.autocast(grad.device.type, enabled=False):
            return ctx.multiply(grad.contiguous(), ctx.weight.decode(grad.dtype).mT), None, None


def quantized_weights(model: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yield every quantised weight of a model with its name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedWeight))


def frozen_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what training leaves unchanged, by name: parameters without gradients, and codes with their scales."""
    frozen = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}
    codes = {f"{name}.{role}": t for name, weight in quantized_weights(model) for role, t in weight.tensors().items()}
    return frozen | codes


def set_weight(model: nn.Module, name: str, weight: Weight) -> None:
    """Replace the weight with this name, as in `model.state_dict()`, by a tensor or a quantised weight."""
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, nn.Linear | QuantizedLinear):
        outer, _, child = owner.rpartition(".")
        setattr(model.get_submodule(outer), child, linear_layer(weight))
        return
    delattr(module, attribute)
    setattr(module, attribute, nn.Parameter(weight) if isinstance(weight, Tensor) else weight)


def linear_layer(weight: Weight) -> nn.Linear | QuantizedLinear:
    """Return a linear layer without bias that uses this weight (N, K) itself, not a copy."""
    if isinstance(weight, QuantizedWeight):
        return QuantizedLinear(weight)
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
    return layer


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes (..., K) below 16 into bytes (..., K / 2); the even column is in the low four bits.

    Example: `pack_nibbles(torch.tensor([1, 2], dtype=torch.uint8))` is [0x21].
    """
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Undo `pack_nibbles`: (..., K / 2) uint8 → (..., K) uint8.

    Example: `unpack_nibbles(torch.tensor([0x21], dtype=torch.uint8))` is [1, 2].
    """
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
