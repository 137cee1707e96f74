"""Every sampler and stop rule of dgemma.sampling. New files there are found and tested automatically.

Each class is built with its defaults, then once per alternative value of an option, then with all options changed.
Alternatives are every value of a Literal, both booleans, and a number where the default is None or zero. Required
fields get a value of their type. Combinations that raise are skipped, but every option must be accepted once.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import types
import typing
from contextlib import suppress
from typing import Any

import torch

import dgemma.sampling
from dgemma.diffusion.noise import HybridNoise, MaskNoise, Noise, UniformNoise
from dgemma.diffusion.schedule import Linear, Loop
from dgemma.sampling.base import Sampler
from dgemma.sampling.stopping import StopRule
from toy import fresh_state

_PROCESSES: dict[str, type[Noise]] = {process.kind: process for process in (MaskNoise, UniformNoise, HybridNoise)}
_REQUIRED: dict[Any, Any] = {int: 2, float: 0.5, str: "", tuple: (1,)}


def classes(base: type) -> list[type]:
    """The public subclasses of `base` defined in dgemma.sampling, by name."""
    found = set()
    for module_info in pkgutil.iter_modules(dgemma.sampling.__path__, "dgemma.sampling."):
        module = importlib.import_module(module_info.name)
        for _, value in inspect.getmembers(module, inspect.isclass):
            if issubclass(value, base) and dataclasses.is_dataclass(value) and not value.__name__.startswith("_"):
                found.add(value)
    return sorted(found, key=lambda cls: cls.__name__)


def variants(cls: type) -> list[Any]:
    """One instance with the defaults, one per alternative value of each option, and one with all options changed."""
    hints = typing.get_type_hints(cls)
    fields = [f for f in dataclasses.fields(cls) if f.init]
    required = {
        f.name: _REQUIRED[typing.get_origin(hints[f.name]) or hints[f.name]]
        for f in fields
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    options = {f.name: _alternatives(hints[f.name], f.default) for f in fields if f.name not in required}
    changes = [{name: value} for name, values in options.items() for value in values]
    changes.append({name: values[0] for name, values in options.items() if values})
    instances, untried = [cls(**required)], {name for name, values in options.items() if values}
    for change in changes:
        with suppress(ValueError):  # an option may need another one
            instances.append(cls(**required, **change))
            untried -= change.keys()
    assert not untried, f"{cls.__name__} refuses every alternative of {untried}."
    return list(dict.fromkeys(instances))


def _alternatives(hint: Any, default: Any) -> list[Any]:
    """Values of the type that are not the default."""
    values: list[Any] = []
    if typing.get_origin(hint) is typing.Literal:
        values = list(typing.get_args(hint))
    elif hint is bool:
        values = [False, True]
    elif hint is float and default == 0:  # zero switches the option off
        values = [0.5]
    elif typing.get_origin(hint) in (types.UnionType, typing.Union):
        values = [None] + [_REQUIRED[arg] for arg in typing.get_args(hint) if arg in _REQUIRED]
    return [value for value in values if value != default]


SAMPLERS: list[Sampler] = [instance for cls in classes(Sampler) for instance in variants(cls)]
STOP_RULES: list[StopRule] = [instance for cls in classes(StopRule) for instance in variants(cls)]


def noises(sampler: Sampler, vocab_size: int) -> list[Noise]:
    """The noise processes the sampler is valid for, each with the first schedule that its `start` accepts."""
    return [_first_accepted(sampler, _PROCESSES[kind], vocab_size) for kind in sorted(sampler.valid_for)]


def _first_accepted(sampler: Sampler, process: type[Noise], vocab_size: int) -> Noise:
    for schedule in (Linear(), Loop()):
        noise = process(vocab_size, schedule=schedule)
        try:
            sampler.start(fresh_state(torch.zeros(1, 2, dtype=torch.int64), noise, 2))
        except ValueError:
            continue
        return noise
    raise AssertionError(f"{sampler} refuses every schedule listed here.")
