"""Ctrl-C and SIGTERM as a wish, which the training loop grants between two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """Set by Ctrl-C or SIGTERM, so that a step is never cut in two; a second Ctrl-C does what it always does."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only there can signals be caught
        yield asked
        return
    previous = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: Any) -> None:
        asked.set()
        signal.signal(number, previous[signal.Signals(number)])

    for name in previous:
        signal.signal(name, ask)
    try:
        yield asked
    finally:
        for name, handler in previous.items():
            signal.signal(name, handler)
