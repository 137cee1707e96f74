"""What a run is, in words that JSON keeps: a resumed one must be the same, or be told that it is another."""

import functools
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dgemma.train.config import TrainConfig

# What may differ when a run is resumed: it changes what is written down, not what is computed.
_FREE_FIELDS = {"log_every", "checkpoint_every", "evaluate_every", "keep_last", "progress"}
_FREE_SWITCHES = {"foreach", "fused", "capturable", "differentiable"}  # how an optimizer computes the same update
_LONGEST = 1000  # characters
_NUMBERS = {bool, int, float, complex, type(None)}
_PLAIN = _NUMBERS | {str, bytes, torch.Size}  # their repr says all


def describe_run(
    config: TrainConfig,
    *,
    objective: object,
    source: object,
    adapters: object,
    optimizer: torch.optim.Optimizer,
    model: Mapping[str, Any],
    frozen: int,
) -> dict[str, Any]:
    """The description that is saved with every checkpoint; `frozen` is the checksum of the weights not trained."""
    return {
        "config": asdict(config),
        "objective": describe(objective),
        "source": describe(source),
        "adapters": describe(adapters),
        "optimizer": describe_optimizer(optimizer),
        "model": model,
        "frozen weights": frozen,
    }


def refuse_changes(now: Mapping[str, Any], then: Mapping[str, Any], folder: Path) -> None:
    """ValueError where a run that began as `then` would go on as `now`."""
    for item in fields(TrainConfig):
        before, after = then["config"].get(item.name), now["config"][item.name]
        before = tuple(before) if isinstance(before, list) else before
        if item.name not in _FREE_FIELDS and before != after:
            raise ValueError(
                f"TrainConfig.{item.name} must stay {before!r}, with which the run in {folder} began, got {after!r}. "
                f"Choose another folder, or pass allow_changes=True (--allow-changes)."
            )
    for name, after in now.items():
        before = then.get(name, after)  # runs of earlier versions did not say
        if name != "config" and before != after:
            raise ValueError(
                f"train {name} must be what the run in {folder} began with, {before}, got {after}. Choose another "
                f"folder, or pass allow_changes=True (--allow-changes)."
            )


def describe(value: object) -> str:
    """A line about a value that is the same in every process, and that another value would not have.

    Tensors and arrays are described by size and checksum; large data that knows its own may offer that line as
    `fingerprint`. What says nothing of itself, such as a function, is described by its name.

    Example: `describe(SudokuSource(pool=pool))` names its settings and the checksum of its puzzles.
    """
    if type(value) in _PLAIN:
        return _shorten(repr(value))
    if type(value) is list or type(value) is tuple:
        return _shorten(_describe_sequence(value))
    offered = getattr(value, "fingerprint", None)
    if isinstance(offered, str):
        return offered
    name = type(value).__qualname__
    if is_dataclass(value) and not isinstance(value, type):
        return f"{name}({_join((f.name, getattr(value, f.name)) for f in fields(value) if f.repr)})"
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    if isinstance(value, np.ndarray | np.generic):
        return _describe_array(value)
    if isinstance(value, list | tuple | deque):
        return _shorten(_describe_sequence(value))
    if isinstance(value, set | frozenset):
        return _shorten(f"{{{', '.join(sorted(map(describe, value)))}}}")
    if isinstance(value, Mapping):
        return _shorten(f"{{{', '.join(f'{describe(key)}: {describe(item)}' for key, item in value.items())}}}")
    if isinstance(value, SimpleNamespace):
        return _shorten(f"{'namespace' if type(value) is SimpleNamespace else name}({_join(vars(value).items())})")
    if isinstance(value, functools.partial):
        given = [describe(value.func), *map(describe, value.args)]
        return _shorten(f"functools.partial({', '.join(given)}{_more(value.keywords)})")
    text = repr(value)
    if " at 0x" in text:  # an address, which the next process will not have
        return str(getattr(value, "__qualname__", name))
    return _shorten(text)


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Its class and the settings of its groups; asked before the first step, so learning rates are the peaks.

    Example: `describe_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))`.
    """
    groups = (
        {name: value for name, value in group.items() if name not in _FREE_SWITCHES | {"params"}}
        for group in optimizer.param_groups
    )
    return f"{type(optimizer).__qualname__}({', '.join(describe(group) for group in groups)})"


def checksum(tensors: Iterable[Tensor]) -> int:
    """A number that other weights would not have, wherever they are: their bits, added up exactly."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [int(t.detach().contiguous().view(words[t.element_size()]).sum(dtype=torch.int64)) for t in tensors]
    return zlib.crc32(repr(sums).encode())


def _join(items: Iterable[tuple[str, object]]) -> str:
    return ", ".join(f"{name}={describe(value)}" for name, value in items)


def _more(items: Mapping[str, object]) -> str:
    return f", {_join(items.items())}" if items else ""


def _describe_sequence(value: list[Any] | tuple[Any, ...] | deque[Any]) -> str:
    """As its repr, but for the elements; a subclass is named, and its attributes are."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a NamedTuple
        return f"{type(value).__qualname__}({_join(zip(value._fields, value, strict=True))})"
    # Long lists of numbers are common, and quick to write in one go.
    inner = repr(list(value))[1:-1] if set(map(type, value)) <= _NUMBERS else ", ".join(map(describe, value))
    text = f"({inner}{',' if len(value) == 1 else ''})" if isinstance(value, tuple) else f"[{inner}]"
    if type(value) is list or type(value) is tuple:
        return text
    limit = f", maxlen={value.maxlen}" if isinstance(value, deque) and value.maxlen is not None else ""
    return f"{type(value).__qualname__}({text}{limit}{_more(getattr(value, '__dict__', {}))})"


def _describe_tensor(value: Tensor) -> str:
    if value.is_nested:
        return f"nested {describe(value.unbind())}"
    head = f"{value.dtype} {tuple(value.shape)}"
    if value.is_meta:
        return f"{head} on meta"
    if value.layout is not torch.strided:
        return f"{head} {value.layout} {describe(_sparse_parts(value.detach()))}"
    if not value.ndim:
        return describe(value.item())
    plain = value.detach().cpu().resolve_conj().resolve_neg()
    plain = plain.dequantize() if plain.is_quantized else plain
    return f"{head} crc32 {_crc32(plain.contiguous().flatten().view(torch.uint8).numpy()):08x}"


def _sparse_parts(value: Tensor) -> list[Tensor]:
    if value.layout is torch.sparse_coo:
        value = value.coalesce()
        return [value.indices(), value.values()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [value.ccol_indices(), value.row_indices(), value.values()]
    return [value.to_dense()]


def _describe_array(value: np.ndarray | np.generic) -> str:
    if not value.ndim:
        item = value.item()
        return repr(item) if isinstance(item, np.generic) else describe(item)  # a long double has no Python number
    head = f"{value.dtype} {value.shape}"
    if value.dtype.hasobject or value.dtype.kind in "mM":  # addresses, or no buffer
        return f"{head} {describe(value.tolist())}"
    return f"{head} crc32 {_crc32(np.asarray(value)):08x}"


def _crc32(data: np.ndarray) -> int:
    data = np.ascontiguousarray(data)
    return zlib.crc32(data.reshape(-1).view(np.uint8).data if data.itemsize else b"")  # not every type has a buffer


def _shorten(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[:60]} … of {len(text)} characters, crc32 {zlib.crc32(text.encode()):08x}"
