"""The knobs of a step: sampler, temperature, stop rule, top-k and top-p."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from torch.utils._pytree import tree_leaves

from dgemma.checks import check_count, check_probability, check_types, require_field
from dgemma.diffusion.prediction import LEAST_TOP_P
from dgemma.sampling.base import Sampler
from dgemma.sampling.stopping import StopRule
from dgemma.sampling.temperature import Temperature


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """The settings of a step. Every knob may change between two steps.

    Example: `Knobs(sampler=EntropyBound(), temperature=LinearTemperature(), stop=StableAndConfident())`.
    """

    sampler: Sampler
    temperature: Temperature
    stop: StopRule | None = None
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        # A value is the key of a CUDA graph. If an attribute outside its fields changed, the old graph would run.
        fix = "Write @dataclass(frozen=True, kw_only=True) above the class."
        for name in ("sampler", "stop"):
            is_frozen = getattr(self, name) is None or _is_frozen(getattr(self, name))
            require_field(is_frozen, self, name, "be a frozen dataclass whose settings are its fields", fix)
        is_schedule = callable(self.temperature) and not isinstance(self.temperature, type)
        fix = "Use ConstantTemperature(value) for a number."
        require_field(is_schedule, self, "temperature", "be a schedule such as LinearTemperature()", fix)
        if self.top_k is not None:
            check_count(self, "top_k", fix="Use None to keep every token.")
            object.__setattr__(self, "top_k", int(self.top_k))
        if self.top_p is not None:
            check_probability(self, "top_p", fix="Use None to keep every token.")
            object.__setattr__(self, "top_p", float(self.top_p))
            fix = "Use a sampler's greedy=True for the argmax."
            require_field(self.top_p >= LEAST_TOP_P, self, "top_p", "be > 0 in float32", fix)


def _is_frozen(value: Any) -> bool:
    """Return True for a frozen dataclass with no attributes but its fields. The same must hold for its components."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        return False
    # A cached_property is allowed, because it is computed from the fields.
    own = {n: v for n, v in vars(value).items() if not isinstance(getattr(type(value), n, None), cached_property)}
    parts = (part for part in tree_leaves(list(own.values())) if isinstance(part, Sampler | StopRule))
    return own.keys() <= {f.name for f in fields(value)} and all(_is_frozen(part) for part in parts)
