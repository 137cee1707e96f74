"""The container of GGUF: metadata, and tensors that fill the rest of the file. Every number is checked before use."""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dgemma.files import open_file
from dgemma.printing import printable

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # type → struct
_TEXT, _LIST = 8, 9
_MOST_DIMENSIONS = 4


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """A tensor in a GGUF file."""

    name: str
    shape: tuple[int, ...]  # as in PyTorch: rows first
    kind: str  # "F32", "Q4_K", ...
    num_bytes: int
    start: int  # in the file


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """The metadata and the tensors of a GGUF file.

    Numbers and texts are Python values, lists of numbers are arrays, and of a list of texts only its length is kept.
    """

    data: mmap.mmap
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    @classmethod
    def open(cls, file: Path) -> "GgufFile":
        """Read the header. The tensors must fill the file in the order of their offsets, without gap or overlap."""
        try:
            with open_file(file) as opened:
                data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            header = _Header(data)
            return cls(data=data, metadata=header.read_metadata(), tensors=header.read_tensors())
        except (ValueError, struct.error) as error:
            raise ValueError(f"{file} is not a complete GGUF file ({error}). Download it again.") from None

    def read(self, tensor: GgufTensor) -> np.ndarray:
        """Return a copy of a tensor: its floats, or its bytes (..., bytes per row)."""
        kind = {"F32": "<f4", "F16": "<f2", "BF16": "<i2"}.get(tensor.kind, "u1")
        raw = np.frombuffer(self.data, "u1", tensor.num_bytes, tensor.start).copy()
        return raw.view(kind).reshape(*tensor.shape[:-1], -1)


class _Header:
    """Reads the values of a header in order."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.alignment = data, 0, 32
        magic, version, self.num_tensors, self.num_entries = (self.number(code) for code in ("4s", "I", "Q", "Q"))
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it must start with GGUF and version 2 or 3, got {magic!r} and {version}")

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def count(self, size: int = 1) -> int:
        """Read a number of items of at least `size` bytes each, which must fit into the rest of the file."""
        number = self.number("Q")
        if number * size > len(self.data) - self.at:
            raise ValueError(f"it declares {number:,} items, more than it can hold")
        return int(number)

    def text(self) -> str:
        size = self.count()
        self.at += size
        return printable(self.data[self.at - size : self.at].decode(errors="replace"))

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _TEXT:
            return self.text()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        element = self.number("I") if kind == _LIST else None
        if element == _TEXT:
            number = self.count(8)
            for _ in range(number):
                self.at += self.count()
            return range(number)  # no text is needed
        if element not in _NUMBERS:
            raise ValueError(f"a value has the unknown type {kind} or {element}")
        code = np.dtype(_NUMBERS[element]).newbyteorder("<")
        number = self.count(code.itemsize)
        self.at += number * code.itemsize
        return np.frombuffer(self.data, code, number, self.at - number * code.itemsize)

    def read_metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(self.num_entries):  # ends with the file, because every entry has bytes
            key = self.text()
            if key in metadata:
                raise ValueError(f"it repeats {key}")
            metadata[key] = self.value()
        self.alignment = metadata.get("general.alignment", self.alignment)
        if not isinstance(self.alignment, int) or self.alignment < 8 or self.alignment & (self.alignment - 1):
            raise ValueError(f"general.alignment must be a power of two from 8, got {self.alignment!r}")
        return metadata

    def read_tensors(self) -> tuple[GgufTensor, ...]:
        import gguf

        described: dict[str, tuple[tuple[int, ...], Any, int]] = {}
        for _ in range(self.num_tensors):
            name, num_dimensions = self.text(), self.number("I")
            if name in described or not 1 <= num_dimensions <= _MOST_DIMENSIONS:
                raise ValueError(f"{name} is repeated, or has {num_dimensions} dimensions")
            shape = tuple(reversed([self.number("Q") for _ in range(num_dimensions)]))
            described[name] = shape, gguf.GGMLQuantizationType(self.number("I")), self.number("Q")
        start = at = self._aligned(self.at)
        tensors = []
        for name, (shape, kind, offset) in sorted(described.items(), key=lambda item: item[1][2]):
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            num_bytes = math.prod(shape) // block * block_bytes
            if start + offset != at or shape[-1] % block or not num_bytes:
                raise ValueError(f"{name} must follow the tensor before it in whole blocks, without gap or overlap")
            tensors.append(GgufTensor(name=name, shape=shape, kind=kind.name, num_bytes=num_bytes, start=at))
            at = self._aligned(at + num_bytes)
        end = tensors[-1].start + tensors[-1].num_bytes if tensors else start
        if not end <= len(self.data) <= at:
            raise ValueError(f"its tensors must end at byte {end:,}, but it has {len(self.data):,} bytes")
        return tuple(tensors)

    def _aligned(self, at: int) -> int:
        return -(-at // self.alignment) * self.alignment
