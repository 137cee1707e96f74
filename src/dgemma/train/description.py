"""The description of a training run, which is saved with every checkpoint and which a resumed run must match."""

import functools
import inspect
import types
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dgemma.checks import show
from dgemma.train.config import TrainConfig

# Settings that may differ when a run is resumed, because they change no computed number.
_FREE_FIELDS = {"log_every", "checkpoint_every", "evaluate_every", "keep_last", "progress", "replay"}
_FREE_SWITCHES = {"foreach", "fused", "capturable", "differentiable"}  # of optimizers
_LONGEST = 1000  # characters of a description
_SUMMED = 1 << 24  # integers that a checksum adds at a time


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
    """Return the description that is saved with every checkpoint; `frozen` is the checksum of the untrained weights."""
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
    """Raise ValueError if a run that began as `then` would continue as `now`; the message names the first change."""
    fix = "Choose another folder, or pass allow_changes=True (--allow-changes)."
    config = then.get("config")
    if not isinstance(config, dict):
        raise ValueError(f"The run in {folder} must have a configuration, got {show(config)}. {fix}")
    for item in fields(TrainConfig):
        before, after = config.get(item.name), now["config"][item.name]
        before = tuple(before) if isinstance(before, list) else before
        if item.name not in _FREE_FIELDS and before != after:
            raise ValueError(
                f"TrainConfig.{item.name} must stay {before!r}, as in the run in {folder}, got {after!r}. {fix}"
            )
    for name, after in now.items():
        before = then.get(name)
        if name != "config" and before != after:
            raise ValueError(f"train {name} must stay as in the run in {folder}, {before}, got {after}. {fix}")


def describe(value: object) -> str:
    """Return a line that identifies a value, the same in every process.

    Objectives and sources are the user's own functions and objects, so this covers every kind of value that they may
    hold. A resumed run would not notice a change of a value that this left out.

    An object may offer the line itself as `fingerprint`. Otherwise a dataclass is identified by its fields, a
    collection by its elements, and a partial function by its arguments. A dense tensor or array is identified by dtype,
    shape and checksum. A function is identified by its name, its code, its defaults, and the variables outside it that
    it reads. A plain object is identified by its class and its attributes. Everything else is identified by its repr.

    Example: `describe(SudokuSource(pool=pool))` holds its settings and the checksum of its puzzles.
    """
    if value is None or isinstance(value, str | bytes | int | float):  # first, because lists of such values can be long
        return _shorten(repr(value))
    fingerprint = getattr(value, "fingerprint", None)
    if isinstance(fingerprint, str):
        return fingerprint
    if is_dataclass(value) and not isinstance(value, type):
        items = (f"{f.name}={describe(getattr(value, f.name))}" for f in fields(value) if f.repr)
        return f"{type(value).__qualname__}({', '.join(items)})"
    if isinstance(value, Tensor) and not value.dim():
        return describe(value.item())
    if isinstance(value, Tensor) and value.layout is torch.strided:
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return f"{value.dtype} {tuple(value.shape)} crc32 {zlib.crc32(data.data):08x}"
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return f"{value.dtype} {value.shape} crc32 {zlib.crc32(data.data):08x}"
    if isinstance(value, list):
        return _shorten(f"[{', '.join(map(describe, value))}]")
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return _shorten(f"({', '.join(map(describe, value))}{',' if len(value) == 1 else ''})")
    if isinstance(value, set | frozenset):
        return _shorten(f"{{{', '.join(sorted(map(describe, value)))}}}")
    if isinstance(value, Mapping):
        return _shorten(f"{{{', '.join(f'{describe(key)}: {describe(item)}' for key, item in value.items())}}}")
    if isinstance(value, functools.partial):
        arguments = [describe(value.func), *map(describe, value.args)]
        arguments += [f"{name}={describe(item)}" for name, item in value.keywords.items()]
        return _shorten(f"functools.partial({', '.join(arguments)})")
    if isinstance(value, types.FunctionType | types.MethodType):
        return _describe_function(value)
    text = repr(value)
    if " at 0x" in text:  # another process has another address
        name = str(getattr(value, "__qualname__", type(value).__qualname__))
        return _shorten(f"{name}({_describe_variables(getattr(value, '__dict__', {}))})")
    return _shorten(text)


def _describe_function(function: types.FunctionType | types.MethodType) -> str:
    if isinstance(function, types.MethodType):
        return _shorten(f"{describe(function.__self__)} {_describe_function(function.__func__)}")  # type: ignore[arg-type]
    outside = inspect.getclosurevars(function)
    read = _describe_variables({**outside.nonlocals, **outside.globals})
    parts = (
        _describe_code(function.__code__),
        describe(function.__defaults__),
        describe(function.__kwdefaults__),
        read,
    )
    return f"{function.__qualname__} crc32 {zlib.crc32(repr(parts).encode()):08x}"


def _describe_code(code: types.CodeType) -> str:
    constants = [_describe_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _describe_variables(variables: Mapping[str, object]) -> str:
    """Describe data by value, but functions and modules by name, because these may refer to each other."""
    named = {
        name: getattr(value, "__qualname__", value.__class__.__name__)
        if callable(value) or isinstance(value, types.ModuleType)
        else describe(value)
        for name, value in sorted(variables.items())
    }
    return ", ".join(f"{name}={text}" for name, text in named.items())


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return the class and the settings of the groups. Call it before the first step changes their learning rates.

    Example: `describe_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))`.
    """
    groups = (
        {name: value for name, value in group.items() if name not in _FREE_SWITCHES | {"params"}}
        for group in optimizer.param_groups
    )
    return f"{type(optimizer).__qualname__}({', '.join(describe(group) for group in groups)})"


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return a checksum of weights that does not depend on their device: their bits, added as integers."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

    def add_up(t: Tensor) -> int:
        # In parts, because torch makes a copy in the sum's dtype.
        parts = t.detach().contiguous().view(words[t.element_size()]).flatten().split(_SUMMED)
        return int(torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum())

    sums = [add_up(t) for t in tensors]
    return zlib.crc32(repr(sums).encode())


def _shorten(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[:60]} … of {len(text)} characters, crc32 {zlib.crc32(text.encode()):08x}"
