"""The knobs of a step: sampler, temperature, stop rule, top-k and top-p."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from torch.utils._pytree import tree_leaves

from dgemma.checks import as_int, as_number, check_count, check_probability
from dgemma.diffusion.prediction import LEAST_TOP_P
from dgemma.sampling.base import Sampler
from dgemma.sampling.entropy_bound import EntropyBound
from dgemma.sampling.stopping import StableAndConfident, StopRule
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
        for name, base, example in (("sampler", Sampler, EntropyBound), ("stop", StopRule, StableAndConfident)):
            value = getattr(self, name)
            if not isinstance(value, base) and not (name == "stop" and value is None):
                raise ValueError(
                    f"Knobs.{name} must be a value such as {example.__name__}(), got {value!r}. Instantiate the class."
                )
            # The value is the key of a CUDA graph. If an attribute outside its fields changed, the old graph would run.
            if value is not None and not _is_frozen(value):
                raise ValueError(
                    f"Knobs.{name} must be a frozen dataclass whose settings are its fields, got {type(value).__name__}"
                    ". Write @dataclass(frozen=True, kw_only=True) above the class."
                )
        if not callable(self.temperature) or isinstance(self.temperature, type):
            raise ValueError(
                f"Knobs.temperature must be a schedule such as LinearTemperature(), got {self.temperature!r}. "
                "Use ConstantTemperature(value) for a number."
            )
        if self.top_k is not None:
            check_count(self, "top_k", fix="Use None to keep every token.")
            object.__setattr__(self, "top_k", as_int(self.top_k))
        if self.top_p is not None:
            check_probability(self, "top_p", fix="Use None to keep every token.")
            object.__setattr__(self, "top_p", as_number(self.top_p))
            if self.top_p is not None and self.top_p < LEAST_TOP_P:
                raise ValueError(
                    f"Knobs.top_p must be > 0 in float32, got {self.top_p}. Use a sampler's greedy=True for the argmax."
                )


def _is_frozen(value: Any) -> bool:
    """Return True for a frozen dataclass with no attributes but its fields. The same must hold for its components."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        return False
    # A cached_property is allowed, because it is computed from the fields.
    own = {n: v for n, v in vars(value).items() if not isinstance(getattr(type(value), n, None), cached_property)}
    parts = (part for part in tree_leaves(list(own.values())) if isinstance(part, Sampler | StopRule))
    return own.keys() <= {f.name for f in fields(value)} and all(_is_frozen(part) for part in parts)
