"""Reports of the memory that weights take: the format and the bytes of each part of a model."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from dgemma.quantization.weights import quantized_weights

_PARTS = {  # parts of the model in the order of the report, and the names of their weights
    "vision": r"vision\.",
    "embedding": r"embed_tokens\.",
    "attention": r".*\.self_attn\.._proj\.",
    "dense MLP": r".*\.mlp\.",
    "experts": r".*\.experts\.",
    "router": r".*\.router\.",
    "self-conditioning": r"self_conditioning\.",
    "norms and scalars": r"",
}


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """A part of a model in one format: its number of weights and of bytes, scales included."""

    part: str
    format: str
    num_weights: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The parts of a model with their formats. Printed, the report is a table.

    `dequantized` maps the names of decoded weights to their formats in the files.

    Example: `print(model.memory_report())`.
    """

    parts: tuple[StoredPart, ...]
    dequantized: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def __str__(self) -> str:
        rows = [(p.part, p.format, f"{p.num_weights:,}", f"{p.num_bytes:,}") for p in self.parts]
        total = sum(p.num_weights for p in self.parts)
        rows = [("part", "format", "weights", "bytes"), *rows, ("total", "", f"{total:,}", f"{self.num_bytes:,}")]
        wide = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [f"{a:{wide[0]}}  {b:{wide[1]}}  {c:>{wide[2]}}  {d:>{wide[3]}}" for a, b, c, d in rows]
        lines += [f"{name} was dequantised: its files have {format}." for name, format in self.dequantized.items()]
        return "\n".join(lines)


def summarize(
    weights: Iterable[tuple[str, str, int, int]], dequantized: Mapping[str, str] | None = None
) -> MemoryReport:
    """Return the report of weights, given as (our name, format, number of weights, number of bytes)."""
    sums: dict[tuple[str, str], list[int]] = {}
    for name, format, num_weights, num_bytes in weights:
        part = next(part for part, pattern in _PARTS.items() if re.match(pattern, name))
        counts = sums.setdefault((part, format), [0, 0])
        counts[0] += num_weights
        counts[1] += num_bytes
    ordered = sorted(sums.items(), key=lambda item: list(_PARTS).index(item[0][0]))
    parts = [StoredPart(part=p, format=f, num_weights=c[0], num_bytes=c[1]) for (p, f), c in ordered]
    return MemoryReport(parts=tuple(parts), dequantized=dict(dequantized or {}))


def report_memory(model: nn.Module, dequantized: Mapping[str, str] | None = None) -> MemoryReport:
    """Return the report of a model: its parameters, buffers and quantised weights."""
    quantized = list(quantized_weights(model))
    buffers = {f"{name}.{role}" for name, weight in quantized for role in weight.tensors()}
    plain = {name: tensor for name, tensor in model.state_dict().items() if name not in buffers}
    found = {n: (str(t.dtype).removeprefix("torch."), t.numel(), t.nbytes) for n, t in plain.items()}
    found |= {name: (weight.format, weight.shape.numel(), weight.num_bytes) for name, weight in quantized}
    return summarize(((name, *entry) for name, entry in found.items()), dequantized)
