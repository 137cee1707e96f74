"""The weights of a checkpoint before they are read: the tensors that store each of them, their formats and settings."""

import fnmatch
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import regex
import torch
from torch import Tensor

from dgemma.checkpoint.names import VISION, our_names
from dgemma.checks import as_int, require, show
from dgemma.quantization.weights import QuantizedWeight

_CACHE_NOTE = "The checkpoint asks for a quantised prefix cache. dgemma keeps it in the model's dtype."
_CACHE_SCALES = ("k_scale", "v_scale")
_MOST_SECONDS = 10.0  # for all matches of an expression
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

INTEGERS = ("I32", "I64")


class Stored(NamedTuple):
    """A tensor in a file, described by the file's header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A weight of a checkpoint: the tensors that store it, by their role, and the function that decodes them.

    A plain tensor has the single role "weight" and no `decode`.
    """

    shape: tuple[int, ...]  # of the weight, not of the tensors
    format: str  # "int4", "fp8", ..., or the dtype of a plain tensor
    decode: Callable[[dict[str, Tensor]], QuantizedWeight | Tensor] | None = None
    tensors: Mapping[str, str] = field(default_factory=dict)  # role → name in the files


Expected = Mapping[str, tuple[Collection[str], tuple[int, ...]]]  # role → its dtypes and its shape


@dataclass(frozen=True)
class Contents:
    """The weights of a checkpoint by published name, its mismatches with its config, and notes for the user."""

    stored: Mapping[str, Stored]  # its tensors, by their names in the files
    entries: dict[str, Entry] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_plain(self, name: str, tensor: str) -> None:
        """Add the weight that a plain tensor is."""
        header = self.stored[tensor]
        self.entries[name] = Entry(tensors={"weight": tensor}, shape=header.shape, format=header.dtype)

    def coded_modules(self, roles: Iterable[str]) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield each module that is stored in codes, and its tensors by role: {"weight": "a.b.weight"}.

        Other tensors are added as plain weights. Scales of the prefix cache are skipped.
        """
        grouped: dict[str, dict[str, str]] = {}
        roles = frozenset(roles)
        for name in self.stored:
            module, _, role = name.rpartition(".")
            if role in _CACHE_SCALES:
                self.note_cache()
            elif role in roles:
                grouped.setdefault(module, {})[role] = name
            else:
                self.add_plain(name, name)
        for module, tensors in grouped.items():
            if tensors.keys() == {"weight"}:
                self.add_plain(weight_name(module), tensors["weight"])
            else:
                yield module, tensors

    def shape(self, tensors: Mapping[str, str], role: str) -> tuple[int, ...]:
        """Return the shape of one of a module's tensors, () if it is missing."""
        return self.stored[tensors[role]].shape if role in tensors else ()

    def add_coded(
        self,
        module: str,
        tensors: Mapping[str, str],
        expected: Expected,
        weight: Entry,
        *,
        group_size: int | None = None,
        problems: Sequence[str] = (),
    ) -> None:
        """Add the weight of a module that is stored in codes, or else what is wrong with its tensors.

        tensors: the module's, by role. group_size must divide the columns. A single number may be stored with or
        without a dimension.
        """
        found = []
        for role, (dtypes, shape) in expected.items():
            if role not in tensors:
                found.append(f"missing {module}.{role}")
                continue
            header = self.stored[tensors[role]]
            if header.dtype not in dtypes:
                found.append(f"unreadable {tensors[role]}: stored as {header.dtype}, not as {' or '.join(dtypes)}")
            elif header.shape != shape and not (shape == (1,) and header.shape == ()):
                found.append(f"misshapen {tensors[role]}: {header.shape}, not {shape}")
        found += problems
        if not found and group_size is not None and weight.shape[-1] % group_size:
            found = [f"unreadable {module}: {weight.shape[-1]} columns are no multiple of its groups of {group_size}"]
        self.problems.extend(found)
        if not found:
            self.entries[weight_name(module)] = replace(weight, tensors={role: tensors[role] for role in expected})

    def refuse_coded(self, module: str) -> None:
        """Note that the config does not quantise a module that is stored in codes."""
        self.problems.append(f"unexpected {module}: stored in codes, but the config does not quantise it")

    def refuse_plain(self, is_quantized: Callable[[str], bool]) -> None:
        """Note the plain linear layers that the config quantises."""
        quantized = filter(is_quantized, self.plain_linears())
        self.problems.extend(
            f"missing codes of {module}: stored plainly, but the config quantises it" for module in quantized
        )

    def plain_linears(self) -> list[str]:
        """Return the names of the linear layers that are stored as plain tensors."""
        plain = [name.removesuffix(".weight") for name, entry in self.entries.items() if entry.decode is None]
        return [module for module in plain if is_linear(module)]

    def note_cache(self) -> None:
        """Note that the prefix cache stays in the model's dtype."""
        if _CACHE_NOTE not in self.notes:
            self.notes.append(_CACHE_NOTE)


def weight_name(module: str) -> str:
    """Return the published name of a module's weight. Fused experts are parameters, without ".weight"."""
    return module if re.search(r"\.experts\.(gate_up|down)_proj$", module) else f"{module}.weight"


def is_linear(module: str) -> bool:
    """Return True for the name of a linear layer of the text model, and False for fused experts."""
    if VISION.match(module) or weight_name(module) == module:
        return False
    return re.search(r"(_proj|router\.proj)$", module) is not None


def aliases(module: str) -> set[str]:
    """Return the names by which a config may call a module: encoder and decoder share their weights."""
    ours = our_names(module)[0]
    prefixes = ("", "model.", "model.decoder.", "model.encoder.language_model.", "model.language_model.")
    return {module, *(prefix + ours for prefix in prefixes)}


class Names:
    """A list of module names in a config, which may have "re:" expressions and wildcards."""

    def __init__(self, patterns: Iterable[str]) -> None:
        patterns = list(patterns)
        self._exact = frozenset(patterns)
        expressions = [p.removeprefix("re:") for p in patterns if p.startswith("re:")]
        expressions += [fnmatch.translate(p) for p in patterns if "*" in p and not p.startswith("re:")]
        self._seconds = _MOST_SECONDS
        try:
            self._expression = regex.compile("|".join(f"(?:{expression})" for expression in expressions) or r"\Z.")
        except (regex.error, RecursionError, OverflowError) as error:
            raise ValueError(f"quantization_config.ignore and targets must be valid expressions ({error}).") from None

    def __contains__(self, module: str) -> bool:
        names = aliases(module)
        return not self._exact.isdisjoint(names) or any(map(self._matches, names))

    def _matches(self, name: str) -> bool:
        """Match the expression. All matches together have a limit of time, because some expressions never end."""
        start = time.monotonic()
        try:
            return self._expression.match(name, timeout=self._seconds) is not None
        except TimeoutError:
            raise ValueError(
                f"quantization_config.ignore and targets must match within {_MOST_SECONDS:.0f} s, but an expression "
                f"takes longer for {name}. Simplify it."
            ) from None
        finally:
            self._seconds = max(self._seconds - (time.monotonic() - start), 1e-3)


class Settings:
    """A dictionary of a config. `null` means the same as an absent key. A value of another type is a ValueError."""

    def __init__(self, values: Any, owner: str = "quantization_config") -> None:
        require(isinstance(values, Mapping), owner, "be a dictionary", values, "Download config.json again.")
        self.owner, self.values = owner, {name: value for name, value in values.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def choose(self, name: str, *allowed: Any, absent: Any = None) -> Any:
        """Return one of the allowed values. They must also agree in type: neither 4.0 nor True is an integer."""
        value = self.values.get(name, absent)
        if not any(type(value) is type(option) and value == option for option in allowed):
            raise self.refuse(name, f"be {' or '.join(map(repr, allowed))}", value)
        return value

    def size(self, name: str, *, also: int | None = None) -> int:
        """Return an integer of at least 1, or the value `also`."""
        value = as_int(self.values.get(name))
        if value is None or (value < 1 and value != also):
            raise self.refuse(name, "be a number of columns" + ("" if also is None else f", or {also} for whole rows"))
        return value

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list of names, empty if it is absent."""
        found = self.values.get(name, ())
        if not isinstance(found, list | tuple) or not all(isinstance(item, str) for item in found):
            raise self.refuse(name, "be a list of names")
        return tuple(found)

    def section(self, name: str) -> "Settings":
        """Return a dictionary inside this one, empty if it is absent."""
        return Settings(self.values.get(name, {}), f"{self.owner}.{name}")

    def override(self, name: str, overrides: "Settings | None" = None) -> "Settings":
        """Return these settings with those under `name`, here or in another dictionary, in front."""
        own = (overrides or self).section(name)
        return Settings({**self.values, **own.values}, own.owner)

    def refuse(self, name: str, rule: str, value: Any = None) -> ValueError:
        """Return the error for a setting that dgemma cannot run."""
        found = show(self.values.get(name, value))
        return ValueError(f"{self.owner}.{name} must {rule}, got {found}. Load a checkpoint in another format.")
