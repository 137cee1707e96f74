"""The checks that settings share: each refuses a field in one sentence, `Owner.field must RULE, got VALUE. FIX.`"""

import math
from collections.abc import Sequence
from typing import Any


def as_int(value: Any) -> int | None:
    """An integer of any make (Python, NumPy, a tensor without dimensions) as an int; None if it is something else.

    Example: `as_int(np.int64(3))` is 3; `as_int(3.0)` and `as_int(True)` are None.
    """
    value = _as_python(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_number(value: Any) -> float | None:
    """A number of any make as a float; None if it is something else.

    Example: `as_number(torch.tensor(0.5))` is 0.5; `as_number("0.5")` is None.
    """
    value = _as_python(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def check_count(owner: Any, field: str, *, least: int = 1, fix: str) -> None:
    """Whole numbers from `least` on.

    Example: `check_count(self, "history", fix="Use Threshold to ignore stability.")`.
    """
    value = as_int(getattr(owner, field))
    _require(value is not None and value >= least, owner, field, f"be an integer >= {least}", fix)


def check_probability(owner: Any, field: str, *, fix: str) -> None:
    """Numbers in [0, 1].

    Example: `check_probability(self, "tau", fix="Use 0.9, as published.")`.
    """
    value = as_number(getattr(owner, field))
    _require(value is not None and 0 <= value <= 1, owner, field, "be a probability", fix)


def check_size(owner: Any, field: str, *, above: float | None = None, unit: str = "", fix: str) -> None:
    """Numbers from 0 on, or only those larger than `above`; infinity is one of them.

    Example: `check_size(self, "kl_bound", above=0, unit="nats", fix="Use 0.01, as published.")`.
    """
    value = as_number(getattr(owner, field))
    rule = f"be {'>= 0' if above is None else f'> {above}'}{f' {unit}' if unit else ''}"
    _require(value is not None and (value >= 0 if above is None else value > above), owner, field, rule, fix)


def check_finite(owner: Any, field: str, *, above: float | None = None, fix: str) -> None:
    """As `check_size`, without infinity.

    Example: `check_finite(self, "order_temperature", fix="Use 0 for a strict order.")`.
    """
    check_size(owner, field, above=above, fix=fix)
    _require(math.isfinite(getattr(owner, field)), owner, field, "be finite", fix)


def check_choice(owner: Any, field: str, choices: Sequence[str]) -> None:
    """One of a few names.

    Example: `check_choice(self, "quota", ("fixed", "cosine"))`.
    """
    listed = " or ".join(repr(choice) for choice in choices)
    value = getattr(owner, field)
    _require(isinstance(value, str) and value in choices, owner, field, f"be {listed}", "Use one of them.")


def check_block_len(owner: Any) -> None:
    """The `block_len` of a sampler that decides sub-blocks from left to right: None, or at least 1."""
    if owner.block_len is not None:
        check_count(owner, "block_len", fix="Use None for the whole canvas.")


def _as_python(value: Any) -> Any:
    """A NumPy scalar, or an array or tensor without dimensions, as the Python value it holds."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _require(condition: bool, owner: Any, field: str, rule: str, fix: str) -> None:
    if not condition:
        raise ValueError(f"{type(owner).__name__}.{field} must {rule}, got {getattr(owner, field)!r}. {fix}")
