"""Detection of patterns whose automata would have too many states, before these fill the memory.

If a repetition such as `.*` comes before a counted one that accepts the same characters, each further count can double
the states: `.*a.{30}` has billions. So every pattern is first built in another process, with limits.
"""

import json
import subprocess
import sys
from functools import lru_cache

from dgemma.checks import require

MOST_BYTE_STATES = 100_000  # before equivalent states are merged
_SECONDS = 5  # limit of CPU time; 100,000 states take about one second
_TIMEOUT = 60  # seconds of wall-clock time, for a busy machine
_GIBIBYTES = 1
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
    opening has every ASCII character of the pattern, also those in negated sets. It contains y, which [^y]
    does not match. So the opening cannot occur inside [^y]{0,30}, and no second match starts there.

    Example: `opening_of("[^b]")` contains b, and begins with a zero byte, as every opening does.
    """
    named = sorted({char for char in pattern if char.isascii()} - {"\0", "\n"})
    return "".join(f"\\x{ord(char):02x}" for char in ["\0", "\n", *named, " ", "0", "a"])


def framed(pattern: str) -> str:
    """Return the pattern that outlines-core gets: the opening, the pattern, and a byte that no text has.

    If a state already matches, outlines-core drops transitions that go on from it, such as "," after "a" in `a(,a)*`.
    With the last byte, nothing matches before the end.
    """
    return f"{opening_of(pattern)}(?:{pattern})\\x00"


@lru_cache(maxsize=32)
def try_pattern(pattern: str, owner: str) -> None:
    """Build the automaton of a pattern in another process, and raise a ValueError if that exceeds a limit.

    The limits are 5 s of CPU time, 1 GiB of memory and 60 s of wall-clock time. Windows has only the last one. Other
    errors are ignored.

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
    # A repetition such as .* before a counted one such as .{30} can double the states with each character.
    rule = f"have at most {MOST_BYTE_STATES} states over bytes, built in {_SECONDS} s and {_GIBIBYTES} GiB"
    fix = "Shorten counted repetitions after .*, or separate them by a character that the first one excludes."
    require(not is_too_large, owner, rule, pattern, fix)
