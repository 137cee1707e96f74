"""Builds of automata in other processes, at most two at a time and with limits; results of builds that are kept."""

import json
import os
import pickle
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from dgemma.constraints.builder import MOST_STATES, build_tokens
from dgemma.constraints.token_automaton import TokenAutomaton, TooLarge

SECONDS = 5  # of CPU time
GIBIBYTES = 1
_TIMEOUT = 300  # seconds of wall-clock time, which a busy machine may need for the seconds above
_SCRIPT = """
import json, sys
sys.path, *limits = json.loads(sys.stdin.buffer.readline())
from dgemma.constraints.builder import main
main(*limits)
"""
_COUNTS = re.compile(r"(?<!\\)\{(?:\d*,)?(\d+)\}")
_places = threading.BoundedSemaphore(2)  # of builds at the same time
_running: set["subprocess.Popen[bytes]"] = set()


def build_automaton(pattern: str, texts: list[bytes | None], owner: str) -> TokenAutomaton:
    """Build the automaton of a pattern over tokens with these texts. Raise a ValueError if that exceeds a limit.

    The limits are 5 s of CPU time and 1 GiB of memory, but not on Windows. After 300 s of wall-clock time, which say
    nothing about the pattern, raise a TimeoutError.

    Example: `build_automaton(".*a.{30}", token_texts(tokenizer), "Regex")` raises.
    """
    try:
        if any(len(count) > 9 or int(count) >= MOST_STATES for count in _COUNTS.findall(pattern)):
            raise TooLarge("a longer repetition")
        if not sys.executable:  # Python is part of another program
            return build_tokens(pattern, texts)
        with _places:
            result = pickle.loads(_run(pickle.dumps((pattern, texts))))
        if isinstance(result, Exception):
            raise result
        return result
    except TooLarge as error:
        # A repetition such as .* before a counted one such as .{30} can double the states with each character.
        rule = f"have at most {MOST_STATES} states, built in {SECONDS} s and {GIBIBYTES} GiB"
        fix = "Shorten counted repetitions such as {0,1000}, a schema's maxLength and maxItems, and long texts."
        raise ValueError(f"{owner} must {rule}, got {error}. {fix}") from None


def stop_builds() -> None:
    """End all builds; they raise a ValueError."""
    for process in list(_running):
        process.kill()


def _run(task: bytes) -> bytes:
    """Run `builder.main` in another process; return its output."""
    head = json.dumps([sys.path, SECONDS, GIBIBYTES]).encode() + b"\n"
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # its threads would reserve memory
    command, pipe = [sys.executable, "-I", "-c", _SCRIPT], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        _running.add(process)
        try:
            out, error = process.communicate(head + task, timeout=_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            message = f"A constraint was not built in {_TIMEOUT} s. Try again when this machine is less busy."
            raise TimeoutError(message) from None
        finally:
            _running.discard(process)
    if process.returncode < 0:
        raise TooLarge("more time or memory")  # Rust aborts if memory is short
    if process.returncode > 0:
        raise RuntimeError(f"The build of a constraint failed: {error.decode(errors='replace')[-500:]}")
    return out


class KeptResults:
    """The last results of builds by their keys, up to `most_bytes`. Runs and requests with one constraint share it."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._kept = most_bytes, OrderedDict[Any, tuple[Any, int]]()

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def find(self, key: Any, build: Callable[[], tuple[Any, int]]) -> Any:
        """Return the result for a key. `build` makes it and counts its bytes, unless it is kept."""
        found = self._kept.get(key) or self._kept.setdefault(key, build())
        while len(self._kept) > 1 and sum(size for _, size in list(self._kept.values())) > self._most_bytes:
            self._kept.popitem(last=False)
        return found[0]
