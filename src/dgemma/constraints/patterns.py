"""Parts of regular expressions for schemas and grammars: alternatives, ranges of numbers, limits on size and depth."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dgemma.checks import require

_MOST_CHARS = 10_000_000  # of the patterns of all parts of a schema
_MOST_DIGITS, _MOST_DECIMALS = 15, 12  # float64 tells numbers of 15 digits apart, so rounding moves none to a bound


def either(patterns: Sequence[str | None]) -> str | None:
    """Return a pattern of the texts that any of the patterns matches; None if there are none.

    Example: `either(["a", None, "b", "a"])` is "(?:a|b)".
    """
    kept = list(dict.fromkeys(pattern for pattern in patterns if pattern is not None))
    return None if not kept else kept[0] if len(kept) == 1 else f"(?:{'|'.join(kept)})"


@contextmanager
def refuse_deep(owner: str) -> Iterator[None]:
    """Raise a ValueError in place of a RecursionError."""
    try:
        yield
    except RecursionError:
        raise ValueError(f"{owner} must nest less deep, got one that Python cannot follow. Lower its depth.") from None


@dataclass
class Size:
    """The characters of all patterns of a schema or grammar, which are limited."""

    owner: str
    num_chars: int = 0

    def add(self, num_chars: int) -> None:
        """Refuse a source whose nested references or optional properties make its pattern too long."""
        self.num_chars += num_chars
        rule, fix = f"expand to at most {_MOST_CHARS} characters of patterns", "Use fewer references."
        require(self.num_chars <= _MOST_CHARS, self.owner, rule, self.num_chars, fix)


def integers(low: int | None, high: int | None) -> str | None:
    """Return a pattern of the integers in low .. high; None if there are none, or as a bound, no bound.

    Example: `integers(8, 12)` is "(?:[8-9]|1[0-2])".
    """
    parts = []
    if low is None or low < 0:
        most = None if low is None else -low
        least = 1 if high is None or high >= 0 else -high
        parts.append(_negative(_naturals(least, most)))
    if high is None or high >= 0:
        parts.append(_naturals(max(low or 0, 0), high))
    return either(parts)


def numbers(low: int | None, high: int | None, above: bool, below: bool) -> str | None:
    """Return a pattern of the decimal numbers between low and high; `above` excludes low, `below` excludes high."""
    parts = []
    if low is None or low < 0:
        least, most = max(-(high or 0), 0), None if low is None else -low
        parts.append(_negative(_decimals(least, most, below and (high or 0) <= 0, above)))
    if high is None or high >= 0:
        parts.append(_decimals(max(low or 0, 0), high, above and (low or 0) >= 0, below))
    return either(parts)


def _decimals(low: int, high: int | None, above: bool, below: bool) -> str | None:
    """The decimal numbers in low .. high, both at least 0."""
    if high is not None and high < low:
        return None
    inside = _naturals(low + above, None if high is None else high - 1)
    decimals = min(_MOST_DECIMALS, _MOST_DIGITS - len(str(high or low)))
    fraction = rf"(?:\.[0-9]{{1,{decimals}}})?" if decimals > 0 else ""
    parts = [None if inside is None else f"(?:{inside}){fraction}"]
    if above and (high is None or high > low) and decimals > 0:
        parts.append(rf"{low}\.[0-9]{{0,{decimals - 1}}}[1-9]")
    if high is not None and not below and not (above and high == low):
        parts.append(rf"{high}(?:\.0)?")
    return either(parts)


def _negative(pattern: str | None) -> str | None:
    return None if pattern is None else f"-(?:{pattern})"


def _naturals(low: int, high: int | None) -> str | None:
    """The integers in low .. high, both at least 0, without leading zeros."""
    if high is not None and high < low:
        return None
    if high is None:
        digits = len(str(low))
        longer = f"[1-9][0-9]{{{digits},}}" if low > 0 else "[1-9][0-9]*"
        return either([_naturals(low, 10**digits - 1) if low > 0 else "0", longer])
    parts = []
    while low <= high:
        # Each iteration adds one part: fixed digits, a range of one digit, n arbitrary digits, as in 4[2-7][0-9]{2}.
        # `size` is 10^n. If low is 0, it is 1. Otherwise it is the largest power of 10 that divides low and for
        # which low + size - 1 <= high.
        size = 1
        while low > 0 and low % (size * 10) == 0 and low + size * 10 - 1 <= high:
            size *= 10
        lead = low // size
        last = lead - lead % 10 + 9
        while (last + 1) * size - 1 > high:
            last -= 1
        zeros = len(str(size)) - 1
        head = str(lead)[:-1]
        digit = str(lead)[-1] if last == lead else f"[{lead % 10}-{last % 10}]"
        parts.append(head + digit + (f"[0-9]{{{zeros}}}" if zeros else ""))
        low = (last + 1) * size
    return either(parts)
