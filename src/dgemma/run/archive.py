"""Nested values and tensors in one safetensors file: classes by name and fields, booleans as bits, never pickle."""

import inspect
import json
import os
import sys
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dgemma.checkpoint.weights import write_tensors
from dgemma.diffusion.noise import Noise
from dgemma.diffusion.schedule import Schedule
from dgemma.sampling.base import Sampler
from dgemma.sampling.stopping import StopRule

_HEADER = "dgemma"  # the metadata entry that holds everything but the tensors


@dataclass(frozen=True)
class Unknown:
    """A value in a file whose class this process does not know; its full name and what it held stay readable."""

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
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex}.new")
    try:
        write_tensors(new, tensors, metadata={_HEADER: json.dumps(header)})
        with new.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def load(path: str | Path, *, kind: str, classes: Iterable[type] = ()) -> dict[str, Any]:
    """Read back what `save` wrote. Only classes of dgemma, those derived from its bases, and `classes` are built.

    A class is known again by its module and name; one of `classes` by its name alone, wherever it now lives, unless the
    file's is one of dgemma's own.

    Example: `load("run.safetensors", kind="trajectory")["noise"]`.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist. Save a {kind} there first.")
    try:
        with safe_open(str(path), framework="pt") as file:
            header = json.loads((file.metadata() or {})[_HEADER])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        found = header["kind"]
        content = _restore(header["content"], tensors, _Classes(_known_classes(), tuple(classes)))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a whole {kind} file of this version of dgemma: {error}.") from error
    if found != kind:
        raise ValueError(f"{path} must be a {kind} file, got a {found} file.")
    return content


def find_unknown(value: Any) -> Unknown | None:
    """The first `Unknown` inside a nested value, None if all is known."""
    if isinstance(value, Unknown):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in fields(value)]
    elif isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((found for item in value if (found := find_unknown(item)) is not None), None)
    return None


def _describe(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON, its tensors put aside under their paths."""
    value = value.item() if isinstance(value, np.generic) else value
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
        return {"class": _full_name(type(value)), "fields": _describe_each(value._asdict(), path, tensors)}
    if isinstance(value, list | tuple):
        return {"list": [_describe(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]}
    if is_dataclass(value) and not isinstance(value, type):
        own = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        return {"class": _full_name(type(value)), "fields": _describe_each(own, path, tensors)}
    return {"class": _full_name(value if hasattr(value, "__qualname__") else type(value)), "fields": None}


def _describe_each(values: Mapping[str, Any], path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: _describe(value, f"{path}.{name}" if path else name, tensors) for name, value in values.items()}


def _full_name(named: Any) -> str:
    """The module and the name in it of a class or a function."""
    return f"{named.__module__}:{named.__qualname__}"


class _Classes(NamedTuple):
    """Those that may be built: known by their full names, and given by the caller."""

    known: Mapping[str, type]
    given: tuple[type, ...]

    def find(self, name: str) -> type | None:
        if name in self.known or name.startswith("dgemma."):
            return self.known.get(name)
        return next((cls for cls in self.given if cls.__qualname__ == name.partition(":")[2]), None)


def _restore(described: Any, tensors: Mapping[str, Tensor], classes: _Classes) -> Any:
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
        return Unknown(name.replace(":", "."))
    values = {field: _restore(item, tensors, classes) for field, item in inner.items()}
    cls = classes.find(name)
    if cls is None:
        return Unknown(name.replace(":", "."), values)
    if not is_dataclass(cls) or find_unknown(values) is None:
        return cls(**values)
    built = object.__new__(cls)  # what holds something unknown cannot be checked
    for field, value in values.items():
        object.__setattr__(built, field, value)
    return built


def _known_classes() -> dict[str, type]:
    """The value classes of dgemma, and those derived from its bases in this process; the latest of each full name."""
    found: dict[str, type] = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "dgemma":
            for _, member in inspect.getmembers(module, inspect.isclass):
                if member.__module__ == name and (is_dataclass(member) or hasattr(member, "_fields")):
                    found[_full_name(member)] = member
    pending: list[type] = [Sampler, StopRule, Noise, Schedule]
    while pending:
        derived: list[type] = pending.pop().__subclasses__()
        found.update({_full_name(cls): cls for cls in derived if not cls.__module__.startswith("dgemma.")})
        pending.extend(derived)
    return found
