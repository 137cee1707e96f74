"""The values of a Gluon kernel: numbers and tiles in registers, their layouts, tensors in global memory.

Arithmetic is torch's, with Triton's dtypes; NaN spreads through `maximum`, where a GPU may drop it. The mapping
of elements to threads is not simulated, but operands must have the same layout, as in the compiler.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Hazard(Exception):
    """An error that on a GPU can give a wrong result, a crash or a hang."""


@dataclass
class BlockedLayout:
    size_per_thread: list[int]
    threads_per_warp: list[int]
    warps_per_cta: list[int]
    order: list[int]
    rank = property(lambda self: len(self.order))


@dataclass
class NVMMADistributedLayout:
    version: list[int]
    warps_per_cta: list[int]
    instr_shape: list[int]
    rank = 2


@dataclass
class DotOperandLayout:
    operand_index: int
    parent: NVMMADistributedLayout
    k_width: int
    rank = 2


@dataclass
class SliceLayout:
    dim: int
    parent: Any
    rank = property(lambda self: self.parent.rank - 1)


@dataclass
class DistributedLinearLayout:
    registers: list[list[int]]
    lanes: list[list[int]]
    warps: list[list[int]]
    blocks: list[list[int]]
    shape: list[int]
    rank = property(lambda self: len(self.shape))


@dataclass
class Derived:
    """The layout of a tile with other dimensions. The compiler derives it; a conversion must follow."""

    rank: int


@dataclass
class NVMMASharedLayout:
    swizzle_byte_width: int
    element_bitwidth: int
    rank: int = 2
    transposed: bool = False


@dataclass
class SwizzledSharedLayout:
    vec: int
    per_phase: int
    max_phase: int
    order: list[int]
    rank = property(lambda self: len(self.order))


@dataclass
class MBarrierLayout:
    rank = 1


class Value:
    """A number or a tile of numbers in registers; a tile has a layout."""

    def __init__(self, data: Tensor, layout: Any = None) -> None:
        if data.dim() != (layout.rank if layout else 0):
            raise ValueError(f"a tile of shape {tuple(data.shape)} cannot have the layout {layout}")
        self.data, self.layout = data, layout

    type = property(lambda self: self)  # kernels use `tile.type.layout`
    dtype = property(lambda self: self.data.dtype)

    def reshape(self, *shape: Any) -> "Value":
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        return Value(self.data.reshape(shape), Derived(len(shape)))

    def permute(self, *order: Any) -> "Value":
        order = order[0] if isinstance(order[0], tuple) else order
        return Value(self.data.permute(order), Derived(len(order)))

    def split(self) -> "tuple[Value, Value]":
        """Return the two halves of the last dimension, which has two elements."""
        first, second = self.data.unbind(-1)
        return Value(first, Derived(first.dim())), Value(second, Derived(first.dim()))

    shape = property(lambda self: list(self.data.shape))

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Value":
        return Value(self.data.view(dtype) if bitcast else self.data.to(dtype), self.layout)

    def __bool__(self) -> bool:
        if self.layout:
            raise TypeError("a tile is neither true nor false")
        return bool(self.data)


def int32(x: int) -> Value:
    return Value(torch.tensor(x, dtype=torch.int32))


def number(x: Any) -> int:
    return int(x.data) if isinstance(x, Value) else int(x)


def elementwise(function: Callable[..., Tensor], *operands: Any) -> Value:
    """Apply a function to tiles of one layout, numbers, and constants, which take the dtype of the others."""
    values = [x for x in operands if isinstance(x, Value)]
    layouts = [x.layout for x in values if x.layout]
    if any(layout != layouts[0] for layout in layouts):
        raise ValueError(f"tiles must have one layout, got {layouts}")
    dtype = functools.reduce(torch.promote_types, [x.data.dtype for x in values])
    data = [torch.tensor(x, dtype=dtype) if isinstance(x, int | float) else x.data.to(dtype) for x in operands]
    return Value(function(*data), layouts[0] if layouts else None)


_COMPARISONS = ("lt", "le", "gt", "ge", "eq")


Value.__neg__ = lambda self: elementwise(operator.neg, self)


def _overload(name: str, function: Callable[..., Tensor]) -> None:
    setattr(Value, f"__{name}__", lambda x, y: elementwise(function, x, y))
    if name not in _COMPARISONS:
        setattr(Value, f"__r{name}__", lambda x, y: elementwise(function, y, x))


for _name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "lshift", "rshift", *_COMPARISONS):
    _overload(_name, getattr(operator, f"__{_name}__"))
_overload("floordiv", functools.partial(torch.div, rounding_mode="trunc"))  # integers divide as in C
_overload("mod", torch.fmod)


def where(condition: Value, x: Any, y: Any) -> Value:
    x = int32(x) if isinstance(x, int) and not isinstance(y, Value) else x  # not of the dtype of the condition
    return elementwise(lambda c, a, b: torch.where(c != 0, a, b), condition, x, y)


def reduce(function: Callable[..., Tensor], tile: Value, axis: int) -> Value:
    result = function(tile.data, axis)
    return Value(result, SliceLayout(axis, tile.layout) if result.dim() else None)


def expand_dims(tile: Value, axis: int) -> Value:
    if not isinstance(tile.layout, SliceLayout) or tile.layout.dim != axis:
        raise ValueError(f"expand_dims at {axis} needs a layout sliced there, got {tile.layout}")
    return Value(tile.data.unsqueeze(axis), tile.layout.parent)


def broadcast(x: Value, y: Value) -> tuple[Value, Value]:
    if x.layout != y.layout:
        raise ValueError(f"tiles must have one layout, got {x.layout} and {y.layout}")
    return tuple(Value(data, x.layout) for data in torch.broadcast_tensors(x.data, y.data))


def join(x: Value, y: Value) -> Value:
    return Value(torch.stack((x.data, y.data), -1), Derived(x.data.dim() + 1))


@dataclass
class ElementType:
    element_ty: torch.dtype


@dataclass
class Pointer:
    """Elements of a contiguous tensor."""

    memory: Tensor
    offset: Value
    dtype = property(lambda self: ElementType(self.memory.dtype))

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + offset)

    def load(self, mask: Value | None = None, other: float = 0) -> Value:
        at = self.offset.data
        inside = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.data.expand(at.shape)
        bits = {1: torch.uint8}.get(self.memory.element_size(), self.memory.dtype)  # torch cannot index float8 tensors
        values = torch.full(at.shape, other, dtype=bits)
        values[inside] = self.memory.view(bits).view(-1)[self._check(at[inside])]
        return Value(values.view(self.memory.dtype), self.offset.layout)

    def atomic_add(self, value: Any, sem: str) -> Value:
        at = self._check(self.offset.data)
        before = self.memory.view(-1)[at].clone()
        self.memory.view(-1)[at] += number(value)
        return Value(before)

    def store(self, value: Value, mask: Value, eviction_policy: str = "") -> None:
        if not self.offset.layout == value.layout == mask.layout:
            raise ValueError(f"tiles must have one layout, got {[self.offset.layout, value.layout, mask.layout]}")
        inside = mask.data.expand(value.data.shape)
        self.memory.view(-1)[self._check(self.offset.data[inside])] = value.data[inside].to(self.memory.dtype)

    def _check(self, at: Tensor) -> Tensor:
        if at.numel() and not 0 <= at.min() <= at.max() < self.memory.numel():
            raise Hazard(f"reaches elements {at.min()} to {at.max()} of a tensor of {self.memory.numel()}")
        return at


@dataclass
class TensorDescriptor:
    """A tensor for the copy engine, which reads zeros beyond the tensor's ends and writes nothing there."""

    base: Tensor
    block_shape: list[int]
    layout: NVMMASharedLayout
    dtype = property(lambda self: self.base.dtype)

    @staticmethod
    def from_tensor(tensor: Tensor, block_shape: list[int], layout: NVMMASharedLayout) -> "TensorDescriptor":
        width, strides = tensor.element_size(), tensor.stride()
        rules = {
            "one to five dimensions": 1 <= tensor.dim() == len(block_shape) == layout.rank <= 5,
            "an address that is a multiple of 16 bytes": tensor.data_ptr() % 16 == 0,
            "strides that are multiples of 16 bytes": all(stride * width % 16 == 0 for stride in strides[:-1]),
            "a contiguous last dimension": strides[-1] == 1,
            "blocks of powers of two up to 256": all(1 <= n <= 256 and n & (n - 1) == 0 for n in block_shape),
            "16 bytes or more of a row": block_shape[-1] * width >= 16,
            "a layout of its dtype": layout.element_bitwidth == 8 * width,
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise ValueError(f"a tensor descriptor needs {broken}, got {tuple(tensor.shape)}, {strides}, {block_shape}")
        return TensorDescriptor(tensor, block_shape, layout)

    def overlap(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the parts of the tensor and of the block that overlap, for a block that begins at `at`."""
        begin = [max(first, 0) for first in at]
        end = [first + size for first, size in zip(at, self.block_shape, strict=True)]
        end = [max(b, min(e, size)) for b, e, size in zip(begin, end, self.base.shape, strict=True)]
        both = list(zip(begin, end, at, strict=True))
        return tuple(slice(b, e) for b, e, _ in both), tuple(slice(b - a, e - a) for b, e, a in both)
