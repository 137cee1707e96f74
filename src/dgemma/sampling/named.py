"""Samplers by name and fields: how a command line, and a checkpoint that has a sampler of its own, say which."""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from dgemma import sampling
from dgemma.sampling.base import Sampler
from dgemma.sampling.entropy_bound import EntropyBound

if TYPE_CHECKING:
    from dgemma.run.denoiser import Denoiser


def _kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "-", name).lower()


SAMPLERS: dict[str, type[Sampler]] = {
    _kebab(kind.__name__): kind
    for kind in sorted((getattr(sampling, name) for name in sampling.__all__), key=lambda kind: _kebab(kind.__name__))
    if isinstance(kind, type) and issubclass(kind, Sampler) and kind is not Sampler
}


def build_sampler(name: str, settings: Mapping[str, Any]) -> Sampler:
    """A sampler from its name and fields. What is wrong is a rule, for whoever names it to put a subject in front of.

    Example: `build_sampler("threshold", {"tau": 0.8})`.
    """
    if name not in SAMPLERS:
        raise ValueError(f"must be one of {', '.join(SAMPLERS)}, got {name!r}")
    known = {field.name: field for field in fields(SAMPLERS[name])}  # type: ignore[arg-type]
    for field, value in settings.items():
        if field not in known:
            takes = f"takes {', '.join(f'{field}=…' for field in known)}" if known else "takes no fields"
            raise ValueError(f"must fit {name}, which {takes}, got {f'{field}={value}'!r}")
        if known[field].type is bool and not isinstance(value, bool):
            raise ValueError(f"must fit {name}, whose {field} is True or False, got {f'{field}={value}'!r}")
    try:
        return SAMPLERS[name](**settings)
    except TypeError:
        raise ValueError(f"must fit {name}, got {say_settings(settings)!r}, of another type") from None
    except ValueError as error:
        raise ValueError(f"must fit {name}: {error}") from None


def describe_sampler(sampler: Sampler) -> dict[str, Any]:
    """What a checkpoint keeps of the sampler it is best written with: name and fields, in `GenerationDefaults.sampler`.

    Example: `describe_sampler(Ancestral())` is `{"name": "ancestral", "parametrisation": "mean"}`.
    """
    name = _kebab(type(sampler).__name__)
    if SAMPLERS.get(name) is not type(sampler):
        raise ValueError(
            f"describe_sampler must get one of {', '.join(SAMPLERS)}, which every copy of dgemma can build again, "
            f"got {type(sampler).__name__}. Pass your own as sampler=."
        )
    settings = {field.name: getattr(sampler, field.name) for field in fields(sampler)}  # type: ignore[arg-type]
    # Scalars of numpy and torch become Python's, which JSON knows.
    return {"name": name, **{field: v.item() if hasattr(v, "item") else v for field, v in settings.items()}}


def rebuild_sampler(described: Mapping[str, Any]) -> Sampler:
    """What `describe_sampler` was given; its rules are those of `build_sampler`.

    Example: `rebuild_sampler({"name": "threshold", "tau": 0.8})`.
    """
    settings = dict(described)
    return build_sampler(settings.pop("name"), settings)


def default_sampler(model: "Denoiser") -> Sampler:
    """The sampler that a model's checkpoint names; the published one, with the checkpoint's bound, where it names none.

    Example: `default_sampler(DiffusionGemma.from_pretrained("dgemma/sudoku"))` is `EntropyBound(bound=0.1)`.
    """
    if model.generation.sampler is None:
        return EntropyBound(bound=model.generation.entropy_bound)
    try:
        return rebuild_sampler(model.generation.sampler)
    except ValueError as error:
        rule = str(error).removesuffix(".")
        raise ValueError(
            f"GenerationDefaults.sampler {rule}. Pass another as sampler=, or correct config.json."
        ) from None


def say_settings(settings: Mapping[str, Any]) -> str:
    """Fields as a command line has them.

    Example: `say_settings({"tau": 0.8, "greedy": True})` is "tau=0.8,greedy=True".
    """
    return ",".join(f"{field}={value}" for field, value in settings.items())
