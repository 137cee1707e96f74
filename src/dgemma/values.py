"""Conversion between frozen dataclasses (samplers, noises, schedules, stop rules and others) and dictionaries.

`describe_value` serves saved trajectories: it names any class by module and name, and keeps tensors. `identify` serves
files that are continued: it tells settings apart. `label` is for people.
"""

import functools
import json
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dgemma.checks import check_types, show

# Modules whose dataclasses may be in a saved file. Names are unique there, so a class is found after it has moved.
_MODULES = "diffusion. sampling. run. constraints.automaton constraints.canvas_language constraints.run_language"
_PREFIXES = tuple(f"dgemma.{name}" for name in (*_MODULES.split(), "model.vision.images"))
_LONGEST = 1000  # characters or elements in an identity


def describe_settings(value: Any, *, without: Iterable[str] = ()) -> dict[str, Any]:
    """Return the fields of a dataclass. NumPy and torch scalars become Python numbers, for JSON."""
    own = {field.name: getattr(value, field.name) for field in fields(value) if field.name not in without}
    return {name: item.item() if hasattr(item, "item") else item for name, item in own.items()}


def label(value: Any) -> str:
    """Return the class and the fields that differ from their defaults.

    Example: `label(EntropyBound(bound=0.5))` is "EntropyBound(bound=0.5)".
    """
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    differing = [
        f"{field.name}={getattr(value, field.name)!r}"
        for field in fields(value)
        if field.default is MISSING or getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(differing)})"


def identify(value: object) -> Any:
    """Return JSON that identifies a value, the same in every process.

    An object may identify itself by a text, `fingerprint`. Otherwise a dataclass is identified by its fields, a
    collection by its elements, and a partial function by its arguments. A tensor or array is identified by dtype, shape
    and checksum. Functions, classes, and objects whose repr shows an address are identified by qualified name alone.
    Everything else is identified by its repr. Long texts and lists are replaced by a checksum.
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value if len(value) <= _LONGEST else _digest(f"text of {len(value)} characters", value.encode())
    fingerprint = getattr(value, "fingerprint", None)
    if isinstance(fingerprint, str):
        return fingerprint
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: identify(getattr(value, field.name)) for field in fields(value) if field.repr}
        return {"class": type(value).__qualname__, **own}
    if isinstance(value, Tensor) and value.layout is torch.strided:
        bits = value.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy()
        return value.item() if not value.dim() else _digest(f"{value.dtype} {tuple(value.shape)}", bits.data)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return _digest(f"{value.dtype} {value.shape}", np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    if isinstance(value, list | tuple):
        items = [identify(item) for item in value]
        return items if len(items) <= _LONGEST else _digest(f"{len(items)} elements", json.dumps(items).encode())
    if isinstance(value, set | frozenset):
        return identify(sorted(json.dumps(identify(item)) for item in value))
    if isinstance(value, Mapping):
        return {str(key): identify(item) for key, item in value.items()}
    if isinstance(value, functools.partial):
        return {"partial": identify(value.func), "arguments": identify(value.args), **identify(value.keywords)}
    text = repr(value)
    return identify(getattr(value, "__qualname__", type(value).__qualname__ if " at 0x" in text else text))


def _digest(kind: str, data: Any) -> str:
    return f"{kind} crc32 {zlib.crc32(data):08x}"


@dataclass(frozen=True)
class Unknown:
    """A value in a file whose class this process does not know. Its full name and its fields stay readable."""

    name: str
    fields: Any = None


def find_unknown(value: Any) -> Unknown | None:
    """Return the first `Unknown` inside a nested value, or None."""
    if isinstance(value, Unknown):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in fields(value)]
    elif isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((found for item in value if (found := find_unknown(item)) is not None), None)
    return None


def describe_value(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Return a nested value as JSON; its tensors go into `tensors` under their paths, such as "steps.entropy".

    value: dictionaries, lists, tuples, dataclasses, named tuples, numbers, strings, None and tensors.
    """
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

    def describe_each(values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: describe_value(item, tensors, f"{path}.{name}" if path else name) for name, item in values.items()
        }

    if isinstance(value, Mapping):
        return {"map": describe_each(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {"class": _full_name(type(value)), "fields": describe_each(value._asdict())}
    if isinstance(value, list | tuple):
        return {"list": [describe_value(item, tensors, f"{path}.{i}") for i, item in enumerate(value)]}
    if is_dataclass(value) and not isinstance(value, type):
        own = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        return {"class": _full_name(type(value)), "fields": describe_each(own)}
    return {"class": _full_name(value if hasattr(value, "__qualname__") else type(value)), "fields": None}


def rebuild_value(description: Any, tensors: Mapping[str, Tensor], classes: Iterable[type] = ()) -> Any:
    """Return the value that `describe_value` described; lists become tuples.

    It builds only classes of dgemma, their subclasses, and `classes`. Others become an `Unknown`.
    Classes of dgemma and of `classes` are found by name alone, so they may have moved to another module.
    """
    return _parse(description, tensors, _finder(tuple(classes)))


def _parse(description: Any, tensors: Mapping[str, Tensor], find: Callable[[str], type | None]) -> Any:
    """Read a value that a file describes. Every error is a ValueError, and no tensor is larger than its file."""
    if description is None or isinstance(description, bool | int | float | str):
        return description
    form = description if isinstance(description, dict) else {}
    if "tensor" in form:
        return _stored(form["tensor"], tensors)
    if "bits" in form:
        return _unpack(_stored(form["bits"], tensors), form.get("shape"))
    if isinstance(form.get("list"), list):
        return tuple(_parse(item, tensors, find) for item in form["list"])
    if isinstance(form.get("map"), dict):
        return {name: _parse(item, tensors, find) for name, item in form["map"].items()}
    full_name, inner = form.get("class"), form.get("fields")
    if not isinstance(full_name, str) or not isinstance(inner, dict | None):
        raise ValueError(f"it describes a value as {show(description)}.")
    if inner is None:
        return Unknown(full_name.replace(":", "."))
    values = {field: _parse(item, tensors, find) for field, item in inner.items()}
    cls = find(full_name)
    return Unknown(full_name.replace(":", "."), values) if cls is None else _build(cls, values)


def _build(cls: type, values: Mapping[str, Any]) -> Any:
    """Return a dataclass or a named tuple with the fields of a file."""
    listed: dict[str, Any] = dict.fromkeys(getattr(cls, "_fields", ()))
    if is_dataclass(cls):
        listed = {f.name: f for f in fields(cls) if f.init}
    if not values.keys() <= listed.keys():
        raise ValueError(f"{cls.__name__} has no field {show(min(values.keys() - listed.keys()))}.")
    if is_dataclass(cls) and find_unknown(values) is not None:
        value = object.__new__(cls)  # __post_init__ would refuse an Unknown
        for name, field in listed.items():
            if name not in values and field.default is MISSING and field.default_factory is MISSING:
                raise ValueError(f"{cls.__name__} lacks the field {name}.")
            if name in values:
                object.__setattr__(value, name, values[name])
        return value
    try:
        value = cls(**values)
        if is_dataclass(value):
            check_types(value)
        return value
    except ValueError:
        raise
    except Exception as error:  # a class may raise any error for a value of a wrong type
        raise ValueError(f"{cls.__name__} cannot have these fields ({type(error).__name__}).") from error


def _stored(name: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    if not isinstance(name, str) or name not in tensors:
        raise ValueError(f"it lacks the tensor {show(name)}.")
    return tensors[name]


def _unpack(bits: Tensor, shape: Any) -> Tensor:
    """Unpack stored bits into booleans of this shape."""
    is_shape = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not is_shape or bits.dtype != torch.uint8 or bits.dim() != 1 or -(-math.prod(shape) // 8) != len(bits):
        raise ValueError(f"it stores booleans of shape {show(shape)} as {show(bits)}.")
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=math.prod(shape)).astype(bool)).reshape(shape)


def _full_name(named: Any) -> str:
    """The module and the name of a class or a function."""
    return f"{named.__module__}:{named.__qualname__}"


def _finder(extra: tuple[type, ...]) -> Callable[[str], type | None]:
    """Return a function that finds a class by its module and name: of dgemma, a user's subclass of it, or extra."""
    modules = {name: module for name, module in sorted(sys.modules.items()) if name.startswith(_PREFIXES)}
    members = [(member, name) for name, module in modules.items() for member in vars(module).values()]
    own = [member for member, name in members if isinstance(member, type) and member.__module__ == name]
    library = {cls.__qualname__: cls for cls in own if _has_fields(cls)}
    derived: dict[str, type] = {}
    while own:
        found: list[type] = own.pop().__subclasses__()
        subclasses = [cls for cls in found if not cls.__module__.startswith("dgemma.")]
        derived.update({_full_name(cls): cls for cls in subclasses if _has_fields(cls)})  # the latest of a name
        own.extend(subclasses)

    def find(full_name: str) -> type | None:
        name = full_name.partition(":")[2]
        if full_name.startswith("dgemma."):
            return library.get(name)
        return derived.get(full_name) or next((cls for cls in extra if cls.__qualname__ == name), None)

    return find


def _has_fields(cls: type) -> bool:
    return is_dataclass(cls) or hasattr(cls, "_fields")
