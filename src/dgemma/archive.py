"""Nested values and tensors in one safetensors file: classes by name and fields, booleans as bits, never pickle."""

import inspect
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dgemma.noise import Noise
from dgemma.sampling.base import Sampler
from dgemma.sampling.stopping import StopRule
from dgemma.schedule import Schedule

_HEADER = "dgemma"  # the metadata entry that holds everything but the tensors


@dataclass(frozen=True)
class Unknown:
    """A value in a file whose class this session does not know; its name and what it held stay readable."""

    name: str
    fields: Any = None


def save(path: str | Path, content: Mapping[str, Any], *, kind: str) -> None:
    """Write `content` to `path`, all of it or nothing: an interrupted save leaves what was there before.

    content: dictionaries, lists, tuples, dataclasses, named tuples, numbers, strings, None and tensors, nested at will.
    Each tensor is found in the file under its path, such as "steps.entropy".

    Example: `save("run.safetensors", {"noise": UniformNoise(512), "seeds": torch.arange(2)}, kind="trajectory")`.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: its folder does not exist. Create {path.parent} first.")
    tensors: dict[str, Tensor] = {}
    header = {"kind": kind, "content": _describe(dict(content), "", tensors)}
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    os.close(handle)
    try:
        save_file(tensors, name, metadata={_HEADER: json.dumps(header)})
        with open(name, "rb") as file:
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(path: str | Path, *, kind: str, classes: Iterable[type] = ()) -> dict[str, Any]:
    """Read back what `save` wrote. Only classes of dgemma, those derived from its bases, and `classes` are built.

    Example: `load("run.safetensors", kind="trajectory")["noise"]`.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist. Save a {kind} there first.")
    try:
        with safe_open(str(path), framework="pt") as file:
            header = json.loads((file.metadata() or {})[_HEADER])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        found = header["kind"]
        content = _restore(header["content"], tensors, {**_known_classes(), **{c.__name__: c for c in classes}})
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a whole {kind} file of this version of dgemma: {error}.") from error
    if found != kind:
        raise ValueError(f"{path} must be a {kind} file, got a {found} file.")
    return content


def find_unknown(value: Any) -> str | None:
    """The name of the first `Unknown` inside a nested value, None if all is known."""
    if isinstance(value, Unknown):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in fields(value)]
    elif isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((name for item in value if (name := find_unknown(item)) is not None), None)
    return None


def _describe(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON, its tensors put aside under their paths."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        whole = value.detach().cpu().contiguous()
        if whole.dtype == torch.bool:
            tensors[path] = torch.from_numpy(np.packbits(whole.numpy()))
            return {"bits": path, "shape": list(whole.shape)}
        tensors[path] = whole.clone()  # safetensors refuses tensors that share memory
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"map": _describe_each(value, path, tensors)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {"class": type(value).__name__, "fields": _describe_each(value._asdict(), path, tensors)}
    if isinstance(value, list | tuple):
        return {"list": [_describe(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]}
    if is_dataclass(value) and not isinstance(value, type):
        own = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        return {"class": type(value).__name__, "fields": _describe_each(own, path, tensors)}
    return {"class": getattr(value, "__qualname__", type(value).__name__), "fields": None}


def _describe_each(values: Mapping[str, Any], path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: _describe(value, f"{path}.{name}" if path else name, tensors) for name, value in values.items()}


def _restore(described: Any, tensors: Mapping[str, Tensor], classes: Mapping[str, type]) -> Any:
    if not isinstance(described, dict):
        return described
    if "tensor" in described:
        return tensors[described["tensor"]]
    if "bits" in described:
        shape = described["shape"]
        bits = np.unpackbits(tensors[described["bits"]].numpy(), count=int(np.prod(shape)))
        return torch.from_numpy(bits.astype(bool)).reshape(shape)
    if "list" in described:
        return tuple(_restore(item, tensors, classes) for item in described["list"])
    if "map" in described:
        return {name: _restore(item, tensors, classes) for name, item in described["map"].items()}
    name, inner = described["class"], described["fields"]
    if inner is None:
        return Unknown(name)
    values = {field: _restore(item, tensors, classes) for field, item in inner.items()}
    return classes[name](**values) if name in classes else Unknown(name, values)


def _known_classes() -> dict[str, type]:
    """The value classes of dgemma, and whatever was derived from its bases in this session; the latest of each name."""
    found: dict[str, type] = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "dgemma":
            for _, member in inspect.getmembers(module, inspect.isclass):
                if member.__module__ == name and (is_dataclass(member) or hasattr(member, "_fields")):
                    found[member.__name__] = member
    pending: list[type] = [Sampler, StopRule, Noise, Schedule]
    while pending:
        derived: list[type] = pending.pop().__subclasses__()
        found.update({cls.__name__: cls for cls in derived})
        pending.extend(derived)
    return found
