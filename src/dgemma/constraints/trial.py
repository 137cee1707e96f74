"""Patterns whose automata would have too many states, found before they fill the memory.

A repetition such as `.*`, before a counted one that the same characters match, can double the states with each
character: `.*a.{30}` has billions. Such patterns are first built in another process, with limits.
"""

import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from typing import Any

from dgemma.checks import show

MOST_BYTE_STATES = 100_000  # before equivalent states are merged
_SECONDS = 5  # limit of CPU time; 100,000 states take about one second
_TIMEOUT = 60  # seconds of wall-clock time, for a busy machine
_GIBIBYTES = 1
_RISKY_CHARS = 12  # overlapping characters that are a risk; fewer double the states too few times
_LONG = 8  # a repetition is a risk if `most` exceeds `least` by so many
_MOST_PARSED = 100_000  # characters of a pattern; longer ones are tried without a look at them
_SCRIPT = """
import json, sys
path, pattern, seconds, gibibytes = json.load(sys.stdin)
sys.path = path
import outlines_core
try:
    import resource
except ImportError:
    pass  # Windows cannot limit a process, so only the timeout applies
else:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (gibibytes << 30, gibibytes << 30))
vocabulary = outlines_core.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
try:
    outlines_core.Index(pattern, vocabulary)
except MemoryError:
    sys.exit(3)
except Exception:
    pass  # the caller builds it again, and explains this
"""


def opening_of(pattern: str) -> str:
    """Return the opening of a pattern: fixed characters that come before the pattern when outlines-core builds it.

    outlines-core also builds an automaton that may start anywhere in a text. For "x[^y]{0,30}y", where [^y] also
    matches x, that automaton has billions of states. With an opening, a match can start only after the opening. The
    opening has every ASCII character of the pattern, including those that a negated set excludes. So a set of the
    pattern, such as [^y], rarely contains all characters of the opening.

    Example: `opening_of("[^b]")` begins with a zero byte.
    """
    named = sorted({char for char in pattern if char.isascii()} - {"\0", "\n"})
    return "".join(f"\\x{ord(char):02x}" for char in ["\0", "\n", *named, " ", "0", "a"])


def framed(pattern: str) -> str:
    """Return the pattern that outlines-core gets: the opening, the pattern, and a byte that no text has.

    outlines-core drops transitions from a state that matches before the text ends, such as "," in `a(,a)*`. With the
    last byte, nothing matches before the end.
    """
    return f"{opening_of(pattern)}(?:{pattern})\\x00"


@lru_cache(maxsize=32)
def try_pattern(pattern: str, owner: str) -> None:
    """Build the automaton of a pattern in another process, and raise a ValueError if it needs over 5 s or 1 GiB.

    Other errors are ignored.

    Example: `try_pattern(".*a.{30}", "Regex")` raises.
    """
    if not sys.executable:
        return  # Python is part of another program
    command = [sys.executable, "-I", "-c", _SCRIPT]
    task = json.dumps([sys.path, framed(pattern), _SECONDS, _GIBIBYTES]).encode()
    try:
        done = subprocess.run(command, input=task, capture_output=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        is_too_large = True
    else:
        is_too_large = done.returncode < 0 or done.returncode == 3  # Rust aborts if memory is short
    if is_too_large:
        raise ValueError(
            f"{owner} must have at most {MOST_BYTE_STATES} states over bytes, got more than can be built in {_SECONDS} "
            f"s and {_GIBIBYTES} GiB: {show(pattern)}. A repetition such as .* before a counted one such as .{{30}} "
            "doubles the states with each character. Shorten the counted one, or separate them by a character that the "
            "first one excludes."
        )


def may_explode(pattern: str) -> bool:
    """Guess from the syntax whether a repetition overlaps many of the characters that follow it.

    Example: `may_explode(".*a.{30}")` is True, and `may_explode("[^a]*a.{30}")` is False.
    """
    if len(pattern) > _MOST_PARSED:
        return True
    try:
        parser = importlib.import_module("re._parser")  # private, so Python may change it
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # for nested sets and their intersections, which only Rust has
            sequence = _read(parser.parse(pattern))
        _look_for_risk(sequence, 0, [])
    except Exception:  # also for other syntax of Rust
        return True
    return False


# A set of characters has one bit for each of ASCII, with capitals as small letters, and one for all others.
_Set = int
_OTHERS, _ALL = 1 << 128, (1 << 129) - 1
_CATEGORIES = {"DIGIT": str.isdigit, "SPACE": str.isspace, "WORD": lambda char: char.isalnum() or char == "_"}


@dataclass
class _Sequence:
    """Characters and repetitions, one after the other."""

    nodes: "list[_Set | _Repetition]"
    first: _Set  # the characters that can begin it
    can_be_empty: bool


@dataclass
class _Repetition:
    """One of the alternatives, `least` to `most` times in a row: `(ab|c){2,5}`. For `(ab|c)` both limits are 1."""

    least: int
    most: int
    alternatives: list[_Sequence]
    first: _Set
    can_be_empty: bool


class _ExplosionError(Exception):
    """A repetition overlaps too many of the characters that follow it."""


def _read(items: Any) -> _Sequence:
    """Read a sequence of Python's parser."""
    read = _Sequence([], 0, True)
    for op, value in items:
        node: _Set | _Repetition
        if str(op).endswith("_REPEAT"):
            node = _repeat(int(value[0]), int(value[1]), [_read(value[2])])
        elif str(op) in ("BRANCH", "SUBPATTERN"):
            node = _repeat(1, 1, [_read(each) for each in (value[1] if str(op) == "BRANCH" else value[-1:])])
        else:
            node = _set_of(str(op), value)
        read.nodes.append(node)
        if read.can_be_empty:
            read.first |= node if isinstance(node, int) else node.first
            read.can_be_empty = not isinstance(node, int) and node.can_be_empty
    return read


def _repeat(least: int, most: int, alternatives: list[_Sequence]) -> _Repetition:
    first = reduce(or_, (each.first for each in alternatives))
    can_be_empty = least == 0 or any(each.can_be_empty for each in alternatives)
    return _Repetition(least, most, alternatives, first, can_be_empty)


def _set_of(op: str, value: Any) -> _Set:
    if op == "IN":
        is_negated = str(value[0][0]) == "NEGATE"
        joined = 0
        for item, its_value in value[is_negated:]:
            joined |= _set_of(str(item), its_value)
        return _ALL & ~joined | _OTHERS if is_negated else joined
    if op in ("LITERAL", "NOT_LITERAL"):
        one = 1 << ord(chr(value).lower()) if value < 128 else _OTHERS
        return one if op == "LITERAL" else _ALL & ~one | _OTHERS
    if op == "RANGE":
        first, last = value
        small = sum({1 << ord(chr(char).lower()) for char in range(first, min(last, 127) + 1)})
        return small | (_OTHERS if last > 127 else 0)
    if op == "CATEGORY":
        kind = str(value).removeprefix("CATEGORY_")
        test = _CATEGORIES[kind.removeprefix("NOT_")]
        chars = sum({1 << ord(chr(char).lower()) for char in range(128) if test(chr(char))})
        return (_ALL & ~chars if kind.startswith("NOT_") else chars) | _OTHERS
    if op == "ANY":
        return _ALL
    raise ValueError(f"A pattern must consist of characters and repetitions, got {op}.")


def _look_for_risk(sequence: _Sequence, following: _Set, after: list[_Set | _Repetition]) -> bool:
    """Raise `_ExplosionError` if a long repetition overlaps many characters. Return True if the sequence is ambiguous.

    It is ambiguous if two of its parts can match the same next character, such as `a*` and `a` in `a*a`. following: the
    characters that can come directly after the sequence. after: all nodes that can come after it.
    """
    is_ambiguous, after = False, [*after]
    for node in reversed(sequence.nodes):
        if isinstance(node, int):
            following = node
        else:
            is_long = node.most - node.least >= _LONG
            can_end = node.least != node.most and bool(node.first & following)
            risk = _overlap(after, node.first) if is_long and can_end else 0
            # If it repeats, its own characters can follow it.
            inside, rest = (following | node.first, [*after, node]) if node.most > 1 else (following, after)
            is_node_ambiguous, first_of_earlier = False, 0
            for each in node.alternatives:
                first = each.first | (inside if each.can_be_empty else 0)
                is_node_ambiguous |= _look_for_risk(each, inside, rest) or bool(first & first_of_earlier)
                first_of_earlier |= first
            if is_long and is_node_ambiguous:
                risk += sum(_overlap(each.nodes, node.first) for each in node.alternatives)
            if risk >= _RISKY_CHARS:
                raise _ExplosionError
            is_ambiguous |= is_node_ambiguous or can_end
            following = node.first | following if node.can_be_empty else node.first
        after.append(node)
    return is_ambiguous


def _overlap(nodes: Sequence[_Set | _Repetition], chars: _Set) -> int:
    """Count the sets that share a character with `chars`. A set in a repetition counts once per repetition."""
    count = 0
    for node in nodes:
        if isinstance(node, int):
            count += bool(node & chars)
        else:
            times = node.most if node.most < _MOST_PARSED else max(node.least, 1)
            count += times * sum(_overlap(each.nodes, chars) for each in node.alternatives)
    return count
