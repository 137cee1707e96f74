"""Ctrl-C and SIGTERM as a wish, which the training loop grants between two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_outer: threading.Event | None = None  # of the main thread


@contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """Set by Ctrl-C or SIGTERM, so that a step is never cut in two; a second Ctrl-C does what it always does.

    Within another one it is the same wish: what stops the inner loop stops the outer one.
    """
    global _outer
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only there can signals be caught
        yield asked
        return
    if _outer is not None:
        yield _outer
        return
    previous = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: Any) -> None:
        asked.set()
        signal.signal(number, previous[signal.Signals(number)])

    _outer = asked
    try:
        for name in previous:
            signal.signal(name, ask)
        yield asked
    finally:
        _outer = None
        for name, handler in previous.items():
            signal.signal(name, handler)
