"""The settings of a training run, and the description that a resumed run must match."""

import functools
import inspect
import types
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dgemma.checks import (
    check_choice,
    check_count,
    check_finite,
    check_probability,
    check_size,
    check_types,
    require_field,
    show,
)

_MOST_MINUTES = 10**7  # 19 years; in a longer run, one step would be too small a share of the time to measure
# Settings that may differ when a run is resumed, because they change no computed number.
_FREE_FIELDS = {"log_every", "checkpoint_every", "evaluate_every", "keep_last", "progress", "replay"}
_FREE_SWITCHES = {"foreach", "fused", "capturable", "differentiable"}  # of optimizers
_LONGEST = 1000  # characters of a description
_SUMMED = 1 << 24  # integers that a checksum adds at a time


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a training run; the defaults are those of the published fine-tuning recipe.

    Give either `steps` or `minutes`. With `minutes` the run measures its pace, plans as many steps as fit, and lowers
    the learning rate accordingly; at most a tenth of the steps warm up. When a run is resumed, the time of its earlier
    calls counts towards `minutes`.

    precision: `"mixed"` computes in bfloat16 and keeps weights, norms and softmax in float32; `"weights"` computes in
    the dtype of the weights. `batch_size` counts rows over all processes. `micro_batch_size` is the number of rows that
    one process runs at once; it changes no result unless the objective's `reduction` is "micro_batch". `ema_decay`
    averages the weights; the average is evaluated and returned. `compile` compiles the layers; for adapters on a GPU it
    compiles the functions between matrix products instead. On one GPU, compiled passes of a repeated shape are replayed
    as CUDA graphs. `replay=False` launches every kernel anew; this saves the memory of the graphs.

    Example: `TrainConfig(steps=2000, batch_size=64, lr=3e-4, ema_decay=0.999)`.
    """

    steps: int | None = None
    minutes: float | None = None
    batch_size: int
    micro_batch_size: int | None = None  # None: all rows at once
    lr: float = 1.5e-4
    betas: tuple[float, float] = (0.95, 0.99)
    weight_decay: float = 1e-4
    clip: float = 1.0  # the largest norm of the gradient
    warmup: int = 100  # steps
    final_lr: float = 0.1  # the last learning rate, as a fraction of the peak
    ema_decay: float | None = None
    precision: str = "mixed"
    recompute_activations: bool = False
    compile: bool = False
    replay: bool = True
    seed: int = 0
    log_every: int = 20
    evaluate_every: int | None = None  # None: only after the last step
    checkpoint_every: int = 1000
    keep_last: int = 2  # checkpoints
    progress: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.betas, list):
            object.__setattr__(self, "betas", tuple(self.betas))
        check_types(self)
        require_field(-(2**63) <= self.seed < 2**63, self, "seed", "fit into 64 bits")
        if (self.steps is None) == (self.minutes is None):
            raise ValueError(
                f"TrainConfig must have either steps or minutes, got steps={self.steps} and minutes={self.minutes}. "
                "Set one of them."
            )
        if self.minutes is not None and not 0 < self.minutes <= _MOST_MINUTES:
            raise ValueError(
                f"TrainConfig.minutes must be above 0 and at most {_MOST_MINUTES}, got {self.minutes}. Use steps for a "
                "run without a time limit."
            )
        for name in ("steps", "micro_batch_size", "evaluate_every"):
            if getattr(self, name) is not None:
                check_count(self, name, fix="Use 1 or more, or None.")
        for name in ("batch_size", "log_every", "checkpoint_every"):
            check_count(self, name, fix="Use 1 or more.")
        check_count(self, "keep_last", fix="Keep 1 or more, or the run cannot be resumed.")
        check_count(self, "warmup", least=0, fix="Use 0 for no warm-up.")
        check_finite(self, "lr", fix="Use 1.5e-4, as published.")
        check_size(self, "weight_decay", fix="Use 0 for none.")
        check_size(self, "clip", above=0, fix="Use math.inf to never clip.")
        check_probability(self, "final_lr", fix="It is a fraction of the peak; use 0.1, as published.")
        check_choice(self, "precision", ("mixed", "weights"))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"TrainConfig.betas must be two numbers in [0, 1), got {self.betas}. Use (0.95, 0.99).")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"TrainConfig.ema_decay must be in (0, 1), got {self.ema_decay}. Use None for no average.")


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
    """Return the class and the settings of the groups. Before the first step, their learning rates are the peaks.

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
