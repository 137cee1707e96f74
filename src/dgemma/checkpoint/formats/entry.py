"""The weights of a checkpoint before they are read: which tensors store each of them, and in which format."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgemma.checkpoint.names import VISION, our_names
from dgemma.model.quantized import QuantizedWeight

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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

    tensors: Mapping[str, str]  # role → name in the files
    shape: tuple[int, ...]  # of the weight, not of the tensors
    format: str  # "int4", "fp8", ..., or the dtype of a plain tensor
    decode: Callable[[dict[str, Tensor]], QuantizedWeight | Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The weights of a checkpoint by published name, its mismatches with its config, and notes for the user."""

    entries: dict[str, Entry]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plain_entry(name: str, stored: Stored) -> Entry:
    """Return the entry of a plain tensor.

    Example: `plain_entry("model.decoder.norm.weight", headers["model.decoder.norm.weight"]).shape`.
    """
    return Entry(tensors={"weight": name}, shape=stored.shape, format=stored.dtype)


def modules(stored: Mapping[str, Stored], roles: Iterable[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each module that has a tensor with one of the `roles`, and its tensors by role: {"weight": "a.b.weight"}.

    Tensors without such a role, such as `layer_scalar`, form a module of their own with the role "".

    Example: `dict(modules(headers, ("weight", "weight_scale")))["model.decoder.layers.0.mlp.up_proj"]`.
    """
    grouped: dict[str, dict[str, str]] = {}
    roles = frozenset(roles)
    for name in stored:
        module, _, role = name.rpartition(".")
        if role in roles:
            grouped.setdefault(module, {})[role] = name
        else:
            grouped[name] = {"": name}
    yield from grouped.items()


def weight_name(module: str) -> str:
    """Return the published name of a module's weight. Fused experts are parameters, without ".weight".

    Example: `weight_name("layers.0.experts.down_proj")` is "layers.0.experts.down_proj".
    """
    return module if re.search(r"\.experts\.(gate_up|down)_proj$", module) else f"{module}.weight"


def is_linear(module: str) -> bool:
    """Return True for the name of a linear layer of the text model, and False for fused experts.

    Example: `is_linear("model.decoder.layers.0.experts.3.up_proj")`.
    """
    if VISION.match(module) or weight_name(module) == module:
        return False
    return re.search(r"(_proj|router\.proj)$", module) is not None


def aliases(module: str) -> set[str]:
    """Return the names by which a config may call a module: encoder and decoder share their weights.

    Example: `"model.encoder.language_model.layers.0.router.proj" in aliases("model.decoder.layers.0.router.proj")`.
    """
    ours = our_names(module)[0]
    prefixes = ("", "model.", "model.decoder.", "model.encoder.language_model.", "model.language_model.")
    return {module, *(prefix + ours for prefix in prefixes)}


class Names:
    """A list of module names in a config, which may have "re:" expressions and wildcards.

    Example: `"model.decoder.layers.0.mlp.up_proj" in Names(["lm_head", "*mlp*"])`.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        patterns = list(patterns)
        self._exact = frozenset(patterns)
        expressions = [p.removeprefix("re:") for p in patterns if p.startswith("re:")]
        expressions += [fnmatch.translate(p) for p in patterns if "*" in p and not p.startswith("re:")]
        try:
            self._expression = re.compile("|".join(f"(?:{expression})" for expression in expressions) or r"\Z.")
        except re.error as error:
            raise refuse("ignore and targets", f"be valid expressions ({error})", expressions) from None

    def __contains__(self, module: str) -> bool:
        names = aliases(module)
        return not self._exact.isdisjoint(names) or any(map(self._expression.match, names))


def strings(settings: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a list of names in a config, empty if it is absent.

    Example: `strings({"targets": ["Linear"]}, "targets")` is ("Linear",).
    """
    found = settings.get(name) or ()
    if not isinstance(found, list | tuple) or not all(isinstance(item, str) for item in found):
        raise refuse(name, "be a list of names", found)
    return tuple(found)


def dictionary(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a dictionary in a config, empty if it is absent.

    Example: `dictionary({}, "extra_config")` is {}.
    """
    found = settings.get(name) or {}
    if not isinstance(found, Mapping):
        raise refuse(name, "be a dictionary", found)
    return found


def refuse(field: str, rule: str, value: Any) -> ValueError:
    """Return the error for a setting of a quantised checkpoint that dgemma cannot run.

    Example: `raise refuse("bits", "be 4 or 8", 3)`.
    """
    return ValueError(f"quantization_config.{field} must {rule}, got {value!r}. Load a checkpoint in another format.")
