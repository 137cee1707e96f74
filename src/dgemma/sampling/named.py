"""Samplers and noises by short names ("threshold", "mask"), as checkpoints and the command line store them."""

import ast
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any, TypeVar

import dgemma.sampling as sampling
from dgemma.checks import require, typed
from dgemma.diffusion.noise import HybridNoise, MaskNoise, Noise, UniformNoise
from dgemma.diffusion.schedule import Linear
from dgemma.sampling.base import Sampler
from dgemma.values import describe_settings

_Value = TypeVar("_Value")


def _kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "-", name).lower()


SAMPLERS: dict[str, type[Sampler]] = {
    _kebab(kind.__name__): kind
    for kind in sorted((getattr(sampling, name) for name in sampling.__all__), key=lambda kind: _kebab(kind.__name__))
    if isinstance(kind, type) and issubclass(kind, Sampler) and kind is not Sampler
}
NOISES: dict[str, type[Noise]] = {kind.kind: kind for kind in (UniformNoise, MaskNoise, HybridNoise)}


@typed
def describe_sampler(sampler: Sampler) -> dict[str, Any]:
    """Return a sampler's name and fields, which a checkpoint stores in `GenerationDefaults.sampler`.

    Example: `describe_sampler(Ancestral())` is `{"name": "ancestral", "parametrisation": "mean"}`.
    """
    name = _kebab(type(sampler).__name__)
    rule, fix = f"be a sampler of dgemma ({', '.join(SAMPLERS)})", "Pass another one to each run as sampler=."
    require(SAMPLERS.get(name) is type(sampler), "describe_sampler sampler", rule, type(sampler), fix)
    return {"name": name, **describe_settings(sampler)}


def rebuild_sampler(description: Mapping[str, Any]) -> Sampler:
    """Return the sampler that `describe_sampler` described.

    Error messages start with "must ...", so that the caller can prefix the name of the argument.
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
    """Return the noise that `describe_noise` described. Errors start with "must ...", as in `rebuild_sampler`."""
    settings = dict(description)
    return _build(NOISES, settings.pop("kind"), settings, vocab_size=vocab_size, schedule=Linear())


def join_settings(settings: Mapping[str, Any]) -> str:
    """Return fields as the command line takes them."""
    return ",".join(f"{field}={value}" for field, value in settings.items())


def _literal(text: str) -> Any:
    """The Python value that a text denotes, or the text itself."""
    for parse in (ast.literal_eval, float):  # float reads "inf"
        with suppress(ValueError, SyntaxError, TypeError):
            return parse(text)
    return text


def _build(kinds: Mapping[str, type[_Value]], name: str, settings: Mapping[str, Any], **own: Any) -> _Value:
    """The value with this short name: `settings` come from a file or a command line, `own` from the caller."""
    if name not in kinds:
        raise ValueError(f"must be one of {', '.join(kinds)}, got {name!r}")
    known = [field.name for field in fields(kinds[name]) if field.name not in own]  # type: ignore[arg-type]
    for field, value in settings.items():
        if field not in known:
            rule = f"takes {', '.join(f'{field}=…' for field in known)}" if known else "takes no fields"
            raise ValueError(f"must fit {name}, which {rule}, got {f'{field}={value}'!r}")
    try:
        return kinds[name](**settings, **own)
    except ValueError as error:
        raise ValueError(f"must fit {name}: {error}") from None
