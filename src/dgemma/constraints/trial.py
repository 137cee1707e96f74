"""Patterns whose automata would have too many states, found before they fill the memory.

A repetition such as `.*`, before a counted one that the same characters match, can double the states with each
character: `.*a.{30}` has billions. Such patterns are first built in another process, with limits.
"""

import importlib
import json
import subprocess
import sys
import warnings
from collections import Counter
from functools import lru_cache
from typing import Any

from dgemma.checks import show

MOST_BYTE_STATES = 100_000  # before equivalent states are merged
_SECONDS = 5  # of computing; 100,000 states take about one
_PATIENCE = 60  # seconds in all, on a busy machine
_GIBIBYTES = 1
_RISKY_CHARS = 12  # 2**12 states are no risk
_LONG = 8  # repetitions with fewer optional turns are none
_MOST_PARSED = 100_000  # characters of a pattern; longer ones are tried without a look at them
_SCRIPT = """
import json, sys
path, pattern, seconds, gibibytes = json.load(sys.stdin)
sys.path = path
import outlines_core
try:
    import resource
except ImportError:
    pass  # on Windows, only the parent's patience is a limit
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
        done = subprocess.run(command, input=task, capture_output=True, timeout=_PATIENCE, check=False)
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
            warnings.simplefilter("ignore")
            tree = _simplify(parser.parse(pattern))
        _count(tree, 0, Counter())
    except Exception:  # also for syntax that only Rust has
        return True
    return False


# A node is a set of characters, or a repetition: the least and the most turns, and the alternatives of a turn. A set
# has one bit for each character of ASCII, with capitals as small letters, and one for all others.
_Set = int
_Node = _Set | tuple[int, int, list[list[Any]]]
_OTHERS, _ALL = 1 << 128, (1 << 129) - 1
_CATEGORIES = {"DIGIT": str.isdigit, "SPACE": str.isspace, "WORD": lambda char: char.isalnum() or char == "_"}


class _ExplosionError(Exception):
    """A repetition overlaps too many of the characters that follow it."""


def _simplify(items: Any) -> list[_Node]:
    """Turn a sequence of Python's parser into nodes."""
    nodes: list[_Node] = []
    for op, value in items:
        if str(op).endswith("_REPEAT"):
            nodes.append((int(value[0]), int(value[1]), [_simplify(value[2])]))
        elif str(op) == "BRANCH":
            nodes.append((1, 1, [_simplify(way) for way in value[1]]))
        elif str(op) == "SUBPATTERN":
            nodes.append((1, 1, [_simplify(value[-1])]))
        else:
            nodes.append(_set_of(str(op), value))
    return nodes


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


def _first(nodes: list[_Node]) -> tuple[_Set, bool]:
    """Return the characters that can begin a sequence, and True if it can be empty."""
    found = 0
    for node in nodes:
        if isinstance(node, int):
            return found | node, False
        ways = [_first(way) for way in node[2]]
        for chars, _ in ways:
            found |= chars
        if node[0] > 0 and not any(empty for _, empty in ways):
            return found, False
    return found, True


def _count(nodes: list[_Node], following: _Set, after: Counter[_Set]) -> tuple[Counter[_Set], bool]:
    """Count the characters of a sequence by their sets, and raise `_ExplosionError` if there is a risk.

    Also return True if a character can begin two ways through the sequence.
    following: the characters that can come next. after: the counts of all that follows, to which those of the sequence
    are added.
    """
    counts, is_ambiguous = Counter[_Set](), False
    for node in reversed(nodes):
        if isinstance(node, int):
            counts[node] += 1
            after[node] += 1
            following = node
            continue
        least, most, ways = node
        chars, can_be_empty = _first([node])
        is_long, can_end = most - least >= _LONG, least != most and bool(chars & following)
        risk = _overlap(after, chars) if is_long and can_end else 0
        inside = following | chars if most > 1 else following  # what can follow a turn
        of_turn, two_ways, begun = Counter[_Set](), False, 0
        for way in ways:
            begins, is_empty = _first(way)
            begins |= inside if is_empty else 0
            two_ways |= bool(begins & begun)
            begun |= begins
            of_way, its_two_ways = _count(way, inside, after)
            of_turn += of_way
            two_ways |= its_two_ways
        if is_long and two_ways:
            risk += _overlap(of_turn, chars)
        if risk >= _RISKY_CHARS:
            raise _ExplosionError
        turns = most if most < _MOST_PARSED else max(least, 1)
        for each, number in of_turn.items():
            counts[each] += number * turns
            after[each] += number * (turns - 1)
        is_ambiguous |= two_ways or can_end
        following = chars | following if can_be_empty else chars
    return counts, is_ambiguous


def _overlap(counts: Counter[_Set], chars: _Set) -> int:
    """Count the characters whose sets have one of `chars`."""
    return sum(number for each, number in counts.items() if each & chars)
