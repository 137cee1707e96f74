"""Parsers of command-line values. They report mistakes before torch is imported, except for samplers."""

import argparse
import importlib.util
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.cli.importing import import_quickly

if TYPE_CHECKING:
    from dgemma.sampling import Sampler

_PICTURE_PACKAGES = ("PIL", "matplotlib")


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a reader of whole numbers within bounds.

    Example: `whole(20, 81)("30")` is 30.
    """
    rule = (
        f"must be a whole number of at least {least}"
        if most is None
        else f"must be a whole number from {least} to {most}"
    )

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{rule}, got {text!r}") from None
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{rule}, got {text}")
        return value

    return read


count = whole(1)
seed = whole(-(2**63), 2**63 - 1)


def positive(most: float = math.inf) -> Callable[[str], float]:
    """Return a reader of numbers above 0, up to `most`.

    Example: `positive(1.0)("0.5")` is 0.5.
    """
    rule = "must be a number above 0" if most == math.inf else f"must be a number above 0, at most {most:g}"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{rule}, got {text!r}") from None
        if not 0 < value <= most or value == math.inf:
            raise argparse.ArgumentTypeError(f"{rule}, got {text}")
        return value

    return read


def share(text: str) -> float:
    """Read a number above 0 and below 1.

    Example: `share("0.999")` is 0.999.
    """
    with suppress(ValueError):
        if 0 < float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number above 0 and below 1, got {text}")


def some_text(text: str) -> str:
    """Read a text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def device(text: str) -> str:
    """Read the name of a device. `pick_device` checks that it exists, because that needs torch.

    Example: `device("cuda:0")`.
    """
    if re.fullmatch(r"(cpu|cuda)(:\d+)?", text) is None:
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text!r}")
    return text


def sampler(text: str) -> "Sampler":
    """Read a sampler from its name and fields.

    Example: `sampler("threshold:tau=0.8,greedy=True")`.
    """
    values = import_quickly("dgemma.values")
    try:
        return values.parse_sampler(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def describe_samplers() -> str:
    """Return a list of the samplers, for the end of a help page."""
    lines = ["samplers, the noise they work with, and their fields:"]
    for name, kind in import_quickly("dgemma.values").SAMPLERS.items():
        summary = (kind.__doc__ or "").strip().splitlines()[0]
        defaults = ", ".join(map(_default, fields(kind)))
        lines += [f"  {name} ({', '.join(sorted(kind.valid_for))})", f"      {summary}"]
        lines += [f"      {defaults}"] if defaults else []
    return "\n".join(lines)


def writable_file(text: str) -> Path:
    """Read the path of a file that can be written."""
    path = Path(text)
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"must be a file that can be written, got {text!r}: {error.strerror}"
        ) from None
    if is_new:
        path.unlink()
    return path


def new_gif(text: str) -> Path:
    """Read the path of a GIF; refuse if the packages that draw it are missing."""
    if Path(text).suffix.lower() != ".gif":
        raise argparse.ArgumentTypeError(f"must be a file that ends in .gif, got {text!r}")
    if any(importlib.util.find_spec(name) is None for name in _PICTURE_PACKAGES):
        raise argparse.ArgumentTypeError("needs Pillow and matplotlib: pip install 'dgemma[plots]'")
    return writable_file(text)


def _default(field: Field[Any]) -> str:
    return field.name if field.default is MISSING else f"{field.name}={field.default}"
