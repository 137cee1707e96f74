"""A trial of a client's pattern in another process, with limits: some short patterns have billions of states."""

import subprocess
import sys

from dgemma.constraints.languages import opening_of
from dgemma.serve.errors import ApiError

_SECONDS = 15.0
_SCRIPT = """
import resource, sys
import outlines_core
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
vocabulary = outlines_core.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
outlines_core.Index(sys.stdin.read(), vocabulary)
"""


def try_pattern(pattern: str) -> None:
    """Raise a 400 if building the automaton of a pattern takes over 1 GiB or 15 seconds. Other errors are ignored.

    Example: `try_pattern(".*a.{30}")` raises.
    """
    text = f"{opening_of(pattern)}(?:{pattern})\\x00"  # as `read_pattern` passes it
    command = [sys.executable, "-I", "-c", _SCRIPT]
    try:
        done = subprocess.run(
            command, input=text.encode(errors="replace"), capture_output=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        is_too_large = True
    else:
        is_too_large = done.returncode < 0 or b"MemoryError" in done.stderr  # Rust aborts if memory is short
    if is_too_large:
        raise ApiError(400, "The schema has too many states. Shorten its patterns and lengths.", code="invalid_value")
