"""Argument checks that raise a ValueError of the form `Owner.field must RULE, got VALUE. FIX.`"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor


def require(condition: bool, name: str, rule: str, value: Any, fix: str = "") -> None:
    """Raise unless the condition holds.

    Example: `require(top_k >= 1, "generate top_k", "be >= 1", top_k, "Use None to keep every token.")`.
    """
    if not condition:
        raise ValueError(f"{name} must {rule}, got {show(value)}.{f' {fix}' if fix else ''}")


def require_field(condition: bool, owner: Any, field: str, rule: str, fix: str = "") -> None:
    """Raise unless the condition holds for a field of `owner`.

    Example: `require_field(self.t_min <= self.t_max, self, "t_min", "be at most t_max")`.
    """
    if not condition:
        require(False, f"{type(owner).__name__}.{field}", rule, getattr(owner, field), fix)


def require_tensor(
    value: Any,
    name: str,
    rule: str,
    *,
    shape: Sequence[int | None],
    dtypes: Collection[torch.dtype] | None = None,
    fix: str = "",
) -> None:
    """Raise unless `value` is a tensor of this shape and dtype.

    None in `shape` allows any size, and without `dtypes` any dtype is allowed.

    Example: `require_tensor(ids, "encode tokens", "be ids (B, P)", shape=(None, None), dtypes=(torch.int64,))`.
    """
    fits = isinstance(value, Tensor) and value.dim() == len(shape) and (dtypes is None or value.dtype in dtypes)
    fits = fits and all(size is None or size == given for size, given in zip(shape, value.shape, strict=True))
    if not fits:
        require(False, name, rule, value, fix)


def check_count(owner: Any, field: str, *, least: int = 1, fix: str = "") -> None:
    """Require an integer >= `least`.

    Example: `check_count(self, "history", fix="Use Threshold to ignore stability.")`.
    """
    value = as_int(getattr(owner, field))
    require_field(value is not None and value >= least, owner, field, f"be an integer >= {least}", fix)


def check_probability(owner: Any, field: str, *, fix: str = "") -> None:
    """Require a number in [0, 1].

    Example: `check_probability(self, "tau", fix="Use 0.9, as published.")`.
    """
    value = as_number(getattr(owner, field))
    require_field(value is not None and 0 <= value <= 1, owner, field, "be a probability", fix)


def check_size(owner: Any, field: str, *, above: float | None = None, unit: str = "", fix: str = "") -> None:
    """Require a number >= 0, or > `above` if it is set. Infinity is allowed.

    Example: `check_size(self, "kl_bound", above=0, unit="nats", fix="Use 0.01, as published.")`.
    """
    value = as_number(getattr(owner, field))
    rule = f"be {'>= 0' if above is None else f'> {above}'}{f' {unit}' if unit else ''}"
    fits = value is not None and (value >= 0 if above is None else value > above)
    require_field(fits, owner, field, rule, fix)


def check_finite(owner: Any, field: str, *, above: float | None = None, fix: str = "") -> None:
    """Apply `check_size`, and also refuse infinity.

    Example: `check_finite(self, "order_temperature", fix="Use 0 for a strict order.")`.
    """
    check_size(owner, field, above=above, fix=fix)
    require_field(math.isfinite(getattr(owner, field)), owner, field, "be finite", fix)


def check_choice(owner: Any, field: str, choices: Sequence[str], *, fix: str = "") -> None:
    """Require one of a few names.

    Example: `check_choice(self, "quota", ("fixed", "cosine"))`.
    """
    value = getattr(owner, field)
    rule = f"be {' or '.join(repr(choice) for choice in choices)}"
    require_field(isinstance(value, str) and value in choices, owner, field, rule, fix)


def check_block_len(owner: Any) -> None:
    """Require the `block_len` of a sampler with sub-blocks to be None or at least 1.

    Example: `check_block_len(Threshold(tau=0.9, block_len=8))`.
    """
    if owner.block_len is not None:
        check_count(owner, "block_len", fix="Use None for the whole canvas.")


def as_int(value: Any) -> int | None:
    """Return a Python, NumPy or torch integer as an int, and None for anything else.

    Example: `as_int(np.int64(3))` is 3; `as_int(3.0)` and `as_int(True)` are None.
    """
    value = _as_python(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_number(value: Any) -> float | None:
    """Return a Python, NumPy or torch number as a float, and None for anything else.

    Example: `as_number(torch.tensor(0.5))` is 0.5; `as_number("0.5")` is None.
    """
    value = _as_python(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def show(value: Any) -> str:
    """Format a value for an error message: tensors by dtype and shape, long values shortened.

    Example: `show(torch.zeros(2, 3))` is "torch.float32 of shape (2, 3)".
    """
    if isinstance(value, Tensor) and value.dim():
        return f"{value.dtype} of shape {tuple(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _as_python(value: Any) -> Any:
    """Return a NumPy or torch scalar as a Python value, and any other value unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value
