"""Conversion between frozen dataclasses (samplers, noises, schedules, stop rules and others) and dictionaries.

Checkpoints and the command line use short names for samplers and noises ("threshold", "mask"). A saved trajectory names
any class by module and name, and also holds tensors.
"""

import ast
import math
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

import dgemma.sampling as sampling
from dgemma.checks import check_types, show, typed
from dgemma.diffusion.noise import HybridNoise, MaskNoise, Noise, UniformNoise
from dgemma.diffusion.schedule import Linear, Schedule
from dgemma.sampling import Sampler, StopRule

_Value = TypeVar("_Value")


def _kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "-", name).lower()


SAMPLERS: dict[str, type[Sampler]] = {
    _kebab(kind.__name__): kind
    for kind in sorted((getattr(sampling, name) for name in sampling.__all__), key=lambda kind: _kebab(kind.__name__))
    if isinstance(kind, type) and issubclass(kind, Sampler) and kind is not Sampler
}
NOISES: dict[str, type[Noise]] = {kind.kind: kind for kind in (UniformNoise, MaskNoise, HybridNoise)}

# Folders whose dataclasses may be in a saved file. Names are unique there, so a class is found after it has moved.
_FOLDERS = ("dgemma.diffusion.", "dgemma.sampling.", "dgemma.run.")
_RENAMED = {"Groups": "IndexGroups"}  # by the name in files of earlier versions


@typed
def describe_sampler(sampler: Sampler) -> dict[str, Any]:
    """Return a sampler's name and fields, which a checkpoint stores in `GenerationDefaults.sampler`.

    Example: `describe_sampler(Ancestral())` is `{"name": "ancestral", "parametrisation": "mean"}`.
    """
    name = _kebab(type(sampler).__name__)
    if SAMPLERS.get(name) is not type(sampler):
        raise ValueError(
            f"describe_sampler must get a sampler of dgemma ({', '.join(SAMPLERS)}), got {type(sampler).__name__}. "
            "A checkpoint cannot store another class; pass it to each run as sampler=."
        )
    return {"name": name, **describe_settings(sampler)}


def rebuild_sampler(description: Mapping[str, Any]) -> Sampler:
    """Return the sampler that `describe_sampler` described.

    Error messages start with "must ...", so that the caller can prefix the name of the argument.

    Example: `rebuild_sampler({"name": "threshold", "tau": 0.8})`.
    """
    settings = dict(description)
    return _build(SAMPLERS, settings.pop("name"), settings)


def parse_sampler(text: str) -> Sampler:
    """Read a sampler from its name and fields. Errors start with "must ...", as in `rebuild_sampler`.

    Example: `parse_sampler("threshold:tau=0.8,greedy=True")`.
    """
    name, _, listed = text.partition(":")
    settings: dict[str, Any] = {}
    for pair in filter(None, listed.split(",")):
        field, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"must be NAME:FIELD=VALUE,…, got {pair!r} without a value")
        if field in settings:
            raise ValueError(f"must name every field once, got {field!r} again")
        settings[field] = _literal(value)
    return rebuild_sampler({"name": name, **settings})


@typed
def describe_noise(noise: Noise) -> dict[str, Any]:
    """Return a noise's kind and fields, which a checkpoint stores in `GenerationDefaults.noise`.

    The schedule is omitted, because a network learns all noise levels and each run may choose its own schedule.

    Example: `describe_noise(MaskNoise(512, mask_token_id=4))` is `{"kind": "mask", "mask_token_id": 4}`.
    """
    if type(noise) is not NOISES.get(noise.kind):
        return {"kind": type(noise).__name__}  # a user's class cannot be rebuilt, so the user passes it again
    return {"kind": noise.kind, **describe_settings(noise, without=("vocab_size", "schedule"))}


def rebuild_noise(description: Mapping[str, Any], vocab_size: int) -> Noise:
    """Return the noise that `describe_noise` described. Errors start with "must ...", as in `rebuild_sampler`.

    Example: `rebuild_noise({"kind": "mask", "mask_token_id": 4}, 512)`.
    """
    settings = dict(description)
    return _build(NOISES, settings.pop("kind"), settings, vocab_size=vocab_size, schedule=Linear())


def describe_settings(value: Any, *, without: Iterable[str] = ()) -> dict[str, Any]:
    """Return the fields of a dataclass. NumPy and torch scalars become Python numbers, for JSON.

    Example: `describe_settings(LoRA(rank=4))["rank"]` is 4.
    """
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


def join_settings(settings: Mapping[str, Any]) -> str:
    """Return fields as the command line takes them.

    Example: `join_settings({"tau": 0.8, "greedy": True})` is "tau=0.8,greedy=True".
    """
    return ",".join(f"{field}={value}" for field, value in settings.items())


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

    Example: `describe_value(UniformNoise(512), {})["class"]` is "dgemma.diffusion.noise:UniformNoise".
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

    It builds only classes of dgemma, subclasses of its base classes, and `classes`. Others become an `Unknown`.
    Classes of dgemma and of `classes` are found by name alone, so they may have moved to another module.

    Example: `rebuild_value(describe_value(UniformNoise(512), tensors), tensors)`.
    """
    return _rebuild(description, tensors, _Classes(_library_classes(), _derived_classes(), tuple(classes)))


def _literal(text: str) -> Any:
    """The Python value that a text denotes, or the text itself."""
    for read in (ast.literal_eval, float):  # float reads "inf"
        with suppress(ValueError, SyntaxError, TypeError):
            return read(text)
    return text


def _build(kinds: Mapping[str, type[_Value]], name: str, settings: Mapping[str, Any], **own: Any) -> _Value:
    """The value with this short name: `settings` come from a file or a command line, `own` from the caller."""
    if name not in kinds:
        raise ValueError(f"must be one of {', '.join(kinds)}, got {name!r}")
    known = {field.name: field for field in fields(kinds[name]) if field.name not in own}  # type: ignore[arg-type]
    for field, value in settings.items():
        if field not in known:
            rule = f"takes {', '.join(f'{field}=…' for field in known)}" if known else "takes no fields"
            raise ValueError(f"must fit {name}, which {rule}, got {f'{field}={value}'!r}")
        if known[field].type is bool and not isinstance(value, bool):
            raise ValueError(f"must fit {name}, whose {field} is True or False, got {f'{field}={value}'!r}")
    try:
        return kinds[name](**settings, **own)
    except TypeError:
        raise ValueError(f"must fit {name}, got a value of the wrong type in {join_settings(settings)!r}") from None
    except ValueError as error:
        raise ValueError(f"must fit {name}: {error}") from None


class _Classes(NamedTuple):
    """The classes that may be built."""

    library: Mapping[str, type]  # by name
    derived: Mapping[str, type]  # by module and name
    extra: tuple[type, ...]

    def find(self, full_name: str) -> type | None:
        name = full_name.partition(":")[2]
        if full_name.startswith("dgemma."):
            return self.library.get(_RENAMED.get(name, name))
        return self.derived.get(full_name) or next((cls for cls in self.extra if cls.__qualname__ == name), None)


def _rebuild(description: Any, tensors: Mapping[str, Tensor], classes: _Classes) -> Any:
    """Rebuild a value that a file describes. Every error is a ValueError, and no tensor is larger than its file."""
    if description is None or isinstance(description, bool | int | float | str):
        return description
    if not isinstance(description, dict):
        raise ValueError(f"it describes a value as {show(description)}.")
    if "tensor" in description:
        return _stored(description["tensor"], tensors)
    if "bits" in description:
        return _unpack(_stored(description["bits"], tensors), description.get("shape"))
    if isinstance(description.get("list"), list):
        return tuple(_rebuild(item, tensors, classes) for item in description["list"])
    if isinstance(description.get("map"), dict):
        return {name: _rebuild(item, tensors, classes) for name, item in description["map"].items()}
    full_name, inner = description.get("class"), description.get("fields")
    if not isinstance(full_name, str) or not isinstance(inner, dict | None):
        raise ValueError(f"it describes a value as {show(description)}.")
    if inner is None:
        return Unknown(full_name.replace(":", "."))
    values = {field: _rebuild(item, tensors, classes) for field, item in inner.items()}
    cls = classes.find(full_name)
    if cls is None:
        return Unknown(full_name.replace(":", "."), values)
    known = {f.name for f in fields(cls) if f.init} if is_dataclass(cls) else set(cls._fields)  # type: ignore[attr-defined]
    if not values.keys() <= known:
        raise ValueError(f"{cls.__name__} has no field {show(min(values.keys() - known))}.")
    if is_dataclass(cls) and find_unknown(values) is not None:
        missing = [f.name for f in fields(cls) if f.init and f.name not in values and _has_no_default(f)]
        if missing:
            raise ValueError(f"{cls.__name__} lacks the field {missing[0]}.")
        value = object.__new__(cls)  # __post_init__ would refuse an Unknown
        for field, item in values.items():
            object.__setattr__(value, field, item)
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


def _has_no_default(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


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


def _library_classes() -> dict[str, type]:
    """The dataclasses and named tuples of dgemma that a file may hold."""
    modules = [(name, module) for name, module in sorted(sys.modules.items()) if name.startswith(_FOLDERS)]
    return {
        member.__qualname__: member
        for name, module in modules
        for member in vars(module).values()
        if isinstance(member, type) and member.__module__ == name
        if is_dataclass(member) or hasattr(member, "_fields")
    }


def _derived_classes() -> dict[str, type]:
    """The user's subclasses of dgemma's base classes. If a full name was defined twice, the latest class is used."""
    found: dict[str, type] = {}
    pending: list[type] = [Sampler, StopRule, Noise, Schedule]
    while pending:
        derived: list[type] = pending.pop().__subclasses__()
        found.update({_full_name(cls): cls for cls in derived if not cls.__module__.startswith("dgemma.")})
        pending.extend(derived)
    return found
