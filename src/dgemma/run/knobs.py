"""The knobs of a step: sampler, temperature, stop rule, top-k and top-p."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from torch.utils._pytree import tree_leaves

from dgemma.checks import check_types, require_field
from dgemma.diffusion.prediction import TopCount, TopShare
from dgemma.sampling.base import Sampler
from dgemma.sampling.stopping import StopRule
from dgemma.sampling.temperature import Temperature, read_temperature


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
