"""The knobs of a step (sampler, temperature, stop rule, top-k and top-p), and a checkpoint's sampler and noise."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any, TypeVar

from torch.utils._pytree import tree_leaves

from dgemma.checks import check_types, require_field
from dgemma.diffusion.noise import Noise
from dgemma.diffusion.prediction import TopCount, TopShare
from dgemma.model.denoiser import Denoiser
from dgemma.sampling.base import Sampler
from dgemma.sampling.entropy_bound import EntropyBound
from dgemma.sampling.named import describe_noise, rebuild_noise, rebuild_sampler
from dgemma.sampling.stopping import StopRule
from dgemma.sampling.temperature import Temperature, read_temperature

_Built = TypeVar("_Built")
logger = logging.getLogger("dgemma")


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """The settings of a step. Every knob may change between two steps. A number is a constant temperature.

    Example: `Knobs(sampler=EntropyBound(), temperature=LinearTemperature(), stop=StableAndConfident())`.
    """

    sampler: Sampler
    temperature: Temperature
    stop: StopRule | None = None
    top_k: TopCount | None = None
    top_p: TopShare | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", read_temperature(self.temperature))
        check_types(self)
        # A value is the key of a CUDA graph. If an attribute outside its fields changed, the old graph would run.
        for name in ("sampler", "stop"):
            rule = "be a frozen dataclass whose settings are its fields"
            fix = "Write @dataclass(frozen=True, kw_only=True) above the class."
            require_field(_is_frozen(getattr(self, name)), self, name, rule, fix)
        for name, kind in (("top_k", int), ("top_p", float)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, kind(getattr(self, name)))


def _is_frozen(value: Any) -> bool:
    """Return True for a frozen dataclass with no attributes but its fields. The same must hold for its components."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        return value is None
    # A cached_property is allowed, because it is computed from the fields.
    own = {n: v for n, v in vars(value).items() if not isinstance(getattr(type(value), n, None), cached_property)}
    parts = (part for part in tree_leaves(list(own.values())) if isinstance(part, Sampler | StopRule))
    return own.keys() <= {f.name for f in fields(value)} and all(_is_frozen(part) for part in parts)


def default_sampler(model: Denoiser) -> Sampler:
    """Return the checkpoint's sampler. The default is the published sampler with the checkpoint's bound.

    Example: `default_sampler(DiffusionGemma.from_pretrained("dgemma/sudoku"))` is `EntropyBound(bound=0.1)`.
    """
    stored = model.generation.sampler
    if stored is None:
        return EntropyBound(bound=model.generation.entropy_bound)
    return _rebuild("sampler", lambda: rebuild_sampler(stored))


def learnt_noise(model: Denoiser) -> Noise:
    """Return the noise that the checkpoint was trained under. The default is uniform noise, as published.

    Example: `learnt_noise(DiffusionGemma.from_pretrained("dgemma/sudoku"))` is a `MaskNoise`.
    """
    stored = model.generation.noise or {"kind": "uniform"}
    return _rebuild("noise", lambda: rebuild_noise(stored, model.config.vocab_size))


def _rebuild(name: str, build: Callable[[], _Built]) -> _Built:
    try:
        return build()
    except ValueError as error:
        rule = str(error).removesuffix(".")
        raise ValueError(
            f"GenerationDefaults.{name} {rule}. Pass another as {name}=, or correct config.json."
        ) from None


def warn_of_noise(model: Denoiser, noise: Noise) -> None:
    """Log one line if the checkpoint is for another kind of noise; once per pair of kinds."""
    learnt, kind = (model.generation.noise or {}).get("kind"), describe_noise(noise)["kind"]
    if learnt not in (None, kind):
        _warn_once(learnt, kind)


@cache
def _warn_once(learnt: str, kind: str) -> None:
    logger.warning("The checkpoint is for %s noise; its predictions may be unreliable under %s noise.", learnt, kind)
