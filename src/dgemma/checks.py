"""Argument checks that raise a ValueError with the field, the rule, the value and a fix."""

import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TextIO, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from dgemma.printing import nearest

Function = TypeVar("Function", bound=Callable[..., Any])

_MOST_SHOWN = 8  # elements of a tensor in `short_repr`
_EXAMPLES = {
    "Sampler": "dgemma.EntropyBound(bound=0.1)",
    "Noise": "dgemma.UniformNoise(vocab_size)",
    "Regex": "dgemma.Regex(pattern, tokenizer)",
}
_WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def require(condition: bool, name: str, rule: str, value: Any, fix: str = "") -> None:
    """Raise unless the condition holds.

    Example: `require(top_k >= 1, "generate top_k", "be >= 1", top_k, "Use None to keep every token.")`.
    """
    if not condition:
        raise ValueError(f"{name} must {rule}, got {show(value)}.{f' {fix}' if fix else ''}")


def require_field(condition: bool, owner: Any, field: str, rule: str, fix: str = "") -> None:
    """Raise unless the condition holds for a field of `owner`."""
    require(condition, f"{type(owner).__name__}.{field}", rule, getattr(owner, field), fix)


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
    """
    fits = isinstance(value, Tensor) and value.layout is torch.strided and value.dim() == len(shape)
    fits = fits and (dtypes is None or value.dtype in dtypes)
    fits = fits and all(size is None or size == length for size, length in zip(shape, value.shape, strict=True))
    require(fits, name, rule, value, fix)


def typed(function: Function) -> Function:
    """Check the arguments of a public function against its annotations and their rules, before its body runs.

    beartype checks types, of one element per collection. An int may be a NumPy or torch integer; if the annotation is
    `int` or a ruled one such as `Count`, the function gets an int. A float may be any number. The argument `model` is
    not checked here.

    Example: `typed(lambda: 3)()` is 3; usually it is a decorator.
    """
    signature = inspect.signature(function)
    names = [p.name for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    rules = {parameter.name: _rules_in(parameter.annotation) for parameter in signature.parameters.values()}
    owner = function.__qualname__.removesuffix(".__init__").removesuffix(".__call__")

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            near = next((near for name in kwargs if name not in names and (near := nearest(name, names))), None)
            hint = f" Perhaps you meant {near}." if near else ""
            listed = ", ".join(sorted({*names} - {"self", "cls"}))
            raise TypeError(f"{owner} {error}.{hint} It takes {listed}.") from None
        for name, hint in _hints_of(function).items():
            if name in bound.arguments and name in names and name != "model":
                _check_type(bound.arguments[name], hint, f"{owner} {name}")
                if hint is int:
                    bound.arguments[name] = as_int(bound.arguments[name])
                _check_value(bound.arguments[name], rules[name], f"{owner} {name}")
        return bound

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # torch.compile cannot trace signatures, so only `check` has one
            return function(*args, **kwargs)
        bound = check(args, kwargs)
        return function(*bound.args, **bound.kwargs)

    return checked  # type: ignore[return-value]


class ValueRule(NamedTuple):
    """A rule in the annotation of a field, which `check_types` applies to every value but None."""

    text: str
    accepts: Callable[[Any], bool]
    fix: str = ""


def at_least(least: float) -> ValueRule:
    """Return the rule of a number >= `least`. Infinity is allowed.

    Example: `history: Annotated[int, at_least(1)] = 2`.
    """
    return ValueRule(f"be >= {least}", lambda value: value >= least)


def above(least: float) -> ValueRule:
    """Return the rule of a number > `least`. Infinity is allowed."""
    return ValueRule(f"be > {least}", lambda value: value > least)


def at_most(most: float) -> ValueRule:
    """Return the rule of a number <= `most`."""
    return ValueRule(f"be <= {most}", lambda value: value <= most)


FINITE = ValueRule("be finite", math.isfinite)
Count = Annotated[int, at_least(1)]
Probability = Annotated[float, ValueRule("be a probability", lambda value: 0 <= value <= 1)]


def check_types(owner: Any) -> None:
    """Check the fields of a dataclass against their annotations, as `typed` does for arguments, and their rules.

    A list becomes a tuple where the annotation is one, because JSON has only lists.
    """
    kind: Any = type(owner)
    hints = _hints_of(kind)
    for field in fields(owner):
        if field.name in hints:
            value, hint = getattr(owner, field.name), hints[field.name]
            if isinstance(value, list) and any(get_origin(each) is tuple for each in (hint, *get_args(hint))):
                object.__setattr__(owner, field.name, tuple(value))
            _check_type(getattr(owner, field.name), hints[field.name], f"{kind.__name__}.{field.name}")
    check_rules(owner)


def check_rules(owner: Any) -> None:
    """Check only the rules in the annotations of a dataclass, for fields that may hold a look-alike of their type."""
    for field in fields(owner):
        _check_value(getattr(owner, field.name), _rules_in(field.type), f"{type(owner).__name__}.{field.name}")


class Checked:
    """Base class of dataclasses whose fields are checked by `check_types` and nothing else."""

    def __post_init__(self) -> None:
        check_types(self)


def _check_value(value: Any, rules: Iterable[ValueRule], name: str) -> None:
    for rule in rules:
        require(value is None or rule.accepts(value), name, rule.text, value, rule.fix)


def _rules_in(hint: Any) -> list[ValueRule]:
    """Return the rules in an annotation such as `Probability | None`."""
    return [rule for part in get_args(hint) for rule in ([part] if isinstance(part, ValueRule) else _rules_in(part))]


@functools.cache
def _hints_of(annotated: Any) -> dict[str, Any]:
    """Return the annotations of a function or a dataclass by name, without names that only type checkers import."""
    listed = {name: parameter.annotation for name, parameter in inspect.signature(annotated).parameters.items()}
    with suppress(NameError):
        listed |= get_type_hints(annotated)
    empty = inspect.Parameter.empty
    return {name: hint for name, hint in listed.items() if not isinstance(hint, str) and hint is not empty}


def _check_type(value: Any, hint: Any, name: str) -> None:
    from beartype.door import is_bearable  # not at the top, because its import takes 0.3 s

    if not is_bearable(value, hint, conf=_meanings()):
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        spelled = " or ".join("None" if kind is NoneType else inspect.formatannotation(kind) for kind in kinds)
        spelling = re.sub(r"[\w.]+\.(?=\w)", "", spelled).replace(" | ", " or ")
        choices = re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace(", ", " or "), spelling)
        choices = re.sub(r"Union\[([^[]*)\]", lambda found: found[1].replace(", ", " or "), choices)
        require(False, name, f"be {choices.replace('NoneType', 'None')}", value, _fix_type(value, spelling))


def _fix_type(value: Any, wanted: str) -> str:
    """Return the fix of a common mistake."""
    if isinstance(value, type):
        return f"Write {value.__name__}()."
    if type(value) is int and as_int(value) is None:
        return "An integer must fit into 64 bits: from -2**63 to 2**63 - 1."
    if "Sequence[tuple[int, int]]" in wanted:
        return "Write spans as [(start, stop), ...]."
    if wanted == "Trajectory":
        return "Pass out.trajectory of generate(..., record=True)."
    if wanted == "Tensor" and isinstance(value, str):
        return "Encode it: tokenizer.encode_batch([text]).tokens."
    if wanted == "Tensor" and hasattr(value, "tokens"):
        return "Pass its .tokens."
    if wanted == "Tensor" and isinstance(value, list):
        return "Write torch.tensor(...)."
    kind = wanted.replace("[", " ").split()[0]
    return f"Pass one, such as {_EXAMPLES[kind]}." if kind in _EXAMPLES else ""


@functools.cache
def _meanings() -> Any:
    """Return beartype's configuration, with the values that each annotation accepts here."""
    from beartype import BeartypeConf, FrozenDict
    from beartype.vale import Is

    listed = Annotated[Tensor, Is[lambda value: value.dim() and has_values(value)]]
    meanings = {
        int: Annotated[object, Is[lambda value: as_int(value) is not None]],
        float: Annotated[object, Is[lambda value: as_number(value) is not None]],
        bool: Annotated[object, Is[lambda value: isinstance(value, bool | np.bool_)]],
        Tensor: Annotated[Tensor, Is[lambda value: value.layout is torch.strided]],
        Sequence[int]: Sequence[int] | np.ndarray | listed,
        TextIO: Annotated[object, Is[lambda value: hasattr(value, "write") and hasattr(value, "isatty")]],
    }
    return BeartypeConf(hint_overrides=FrozenDict(meanings))


def as_int(value: Any) -> int | None:
    """Return a Python, NumPy or torch integer as an int; None for other values and for integers beyond 64 bits.

    Example: `as_int(np.int64(3))` is 3; `as_int(3.0)` and `as_int(True)` are None.
    """
    value = _as_python(value)
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def as_number(value: Any) -> float | None:
    """Return a Python, NumPy or torch number as a float, and None for anything else.

    Example: `as_number(torch.tensor(0.5))` is 0.5; `as_number("0.5")` is None.
    """
    value = _as_python(value)
    value = value if isinstance(value, float) else as_int(value)
    return None if value is None else float(value)


def _as_python(value: Any) -> Any:
    """Return a NumPy or torch scalar as a Python value, and any other value unchanged."""
    is_scalar = getattr(value, "ndim", None) == 0 and (not isinstance(value, Tensor) or has_values(value))
    return value.item() if is_scalar else value


def read_device(owner: str, device: Any) -> torch.device:
    """Return a device by its name; raise if torch cannot use it here."""
    try:
        read = torch.device(device)
        torch.empty(0, device=read)
    except (RuntimeError, TypeError, AssertionError, ValueError):
        fix = "Use 'cpu' or 'cuda'." if torch.cuda.is_available() else "Use 'cpu': torch sees no GPU."
        require(False, f"{owner} device", "name a device that torch can use here", device, fix)
    return read


def read_dtype(owner: str, dtype: Any) -> torch.dtype | None:
    """Return a dtype of weights, which may be given by its name; None stays None."""
    read = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and (not isinstance(read, torch.dtype) or read not in _WEIGHT_DTYPES):
        names = ", ".join(str(known).removeprefix("torch.") for known in _WEIGHT_DTYPES)
        require(False, f"{owner} dtype", f"be one of {names}", dtype, "An example is torch.bfloat16.")
    return read


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Return whether a shape can be expanded to another one."""
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def in_range(ids: Tensor, end: int) -> bool:
    """Return whether all ids are in [0, end). On a GPU it is always True, because reading the ids would wait."""
    if type(ids) is not Tensor or ids.device.type != "cpu" or not ids.numel() or torch.compiler.is_compiling():
        return True
    return int(ids.min()) >= 0 and int(ids.max()) < end


def as_lists(value: Any) -> Any:
    """Turn tensors, arrays, sets, ranges and generators into nested lists of Python values; return others unchanged."""
    if isinstance(value, Tensor) and not has_values(value):
        return value  # the caller refuses what is neither a number nor a list
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        return [as_lists(item) for item in value]
    return value


def has_values(tensor: Tensor) -> bool:
    """Return True if the tensor's numbers can be read in order: it is neither sparse nor on the "meta" device."""
    return tensor.layout is torch.strided and not tensor.is_meta


class Words(str):
    """A description in place of a value, which `show` writes without quotes."""


def show(value: Any) -> str:
    """Format a value for an error message: tensors by dtype and shape, long values shortened."""
    if isinstance(value, Tensor) and value.dim():
        return f"{value.dtype} of shape {tuple(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = str(value) if isinstance(value, Words) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def short_repr(owner: Any) -> str:
    """Return a dataclass on one line: tensors of over 8 elements by dtype and shape, and no empty field.

    Example: `repr(decision)` is "Decision(tokens=int64 (1, 16), write=bool (1, 16), renoise=bool (1, 16))".
    """
    values = {field.name: getattr(owner, field.name) for field in fields(owner) if field.repr}
    shown = [f"{name}={_shorten(value)}" for name, value in values.items() if value is not None and value != {}]
    return f"{type(owner).__name__}({', '.join(shown)})"


def _shorten(value: Any) -> str:
    if isinstance(value, Tensor):
        if value.numel() > _MOST_SHOWN or value.dim() > 1 or not has_values(value):
            return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        return _shorten(value.tolist())
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_shorten(item)}' for key, item in value.items())}}}"
    if type(value) in (list, tuple):
        return f"[{', '.join(map(_shorten, value))}]"
    text = repr(value)
    return f"{type(value).__name__}(...)" if "\n" in text else text
