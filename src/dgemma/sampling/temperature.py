"""Temperature as a function of the step: `(step, num_steps) -> temperature`, all (B,)."""

from dataclasses import dataclass
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dgemma.checks import Checked, ValueRule, as_number, require, require_tensor

_LEAST, _MOST = 1e-30, 1e30  # the range in which float32 logits can be divided
_IN_RANGE = ValueRule(
    f"be from {_LEAST:g} to {_MOST:g}",
    lambda value: _LEAST <= value <= _MOST,
    fix="Use a sampler's greedy=True for the argmax.",
)


@runtime_checkable
class Temperature(Protocol):
    """A schedule: step (B,) counted from 0 and num_steps (B,) → temperature (B,) float32.

    Example: `lambda step, num_steps: 1 - 0.5 * step / num_steps` falls from 1 towards 0.5.
    """

    def __call__(self, step: Tensor, num_steps: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class ConstantTemperature(Checked):
    """The same temperature at every step.

    Example: `ConstantTemperature(0.7)`.
    """

    value: Annotated[float, _IN_RANGE] = 1.0

    def __call__(self, step: Tensor, num_steps: Tensor) -> Tensor:
        return torch.full_like(step, self.value, dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class LinearTemperature(Checked):
    """From `start` towards `end`: end + (start - end) · n/N with n steps left, the published schedule.

    n counts down from N to 1, so the last step is still (start - end)/N away from `end`.

    Example: `LinearTemperature(start=0.8, end=0.4)` over 48 steps is 0.8, 0.7917, ..., 0.4083.
    """

    start: Annotated[float, _IN_RANGE] = 0.8
    end: Annotated[float, _IN_RANGE] = 0.4

    def __call__(self, step: Tensor, num_steps: Tensor) -> Tensor:
        # float32 as in transformers. After the last step the share is 0.
        share_left = (num_steps - step).clamp(min=0).float() / num_steps.float()
        return self.end + (self.start - self.end) * share_left


def check_temperature(temperature: Temperature, num_steps: int, device: torch.device) -> None:
    """Raise unless a user's schedule is finite and above 0 at every step. Schedules of the library check themselves."""
    if isinstance(temperature, ConstantTemperature | LinearTemperature):
        return
    step = torch.arange(num_steps, device=device)
    name = f"The temperature {getattr(temperature, '__qualname__', type(temperature).__name__)}"
    values = temperature(step, torch.full_like(step, num_steps))
    require_tensor(values, name, "return floats (B,) for step (B,)", shape=(num_steps,))
    require(bool(((values >= _LEAST) & (values <= _MOST)).all()), name, "be above 0 at every step", values.tolist())


def read_temperature(value: Any) -> Any:
    """Return a number as a `ConstantTemperature`, and any other value unchanged."""
    number = as_number(value)
    return value if number is None else ConstantTemperature(number)
