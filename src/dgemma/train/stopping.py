"""The end of a training run: on Ctrl-C or SIGTERM, or after a number of minutes."""

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

logger = logging.getLogger("dgemma")

_NUM_PACED = 10  # steps needed to measure a pace; the earlier half compiles and warms up, and does not count
_REPLAN = 0.1  # the plan is renewed after every tenth of the time
_PLANNED = 0.97  # the share of the time that steps are planned for; evaluating and saving take the rest
_EARLY = 0.9  # if steps became faster and the plan ends before this share, it is extended


@contextmanager
def stop_request() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C or SIGTERM sets, so that the current step can finish. A second signal acts at once."""
    request = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # other threads cannot catch signals
        yield request
        return
    previous = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: Any) -> None:
        request.set()
        logger.warning("Stopping after this step. A second signal stops at once.")
        signal.signal(number, previous[signal.Signals(number)])

    try:
        for name in previous:
            signal.signal(name, ask)
        yield request
    finally:
        for name, handler in previous.items():
            signal.signal(name, handler)


class TimeBudget:
    """Plans how many steps fit into `minutes`, of which `spent` seconds are already over.

    The number of steps is unknown before the run, and the pace changes on a shared GPU. So the plan is renewed after
    each tenth of the time, at the pace of the later half of the steps taken so far. The plan leaves
    some time for evaluating and saving. In its last step the learning rate reaches its floor. If steps are unexpectedly
    slow, the step during which the time ends is the last one, even if more were planned.
    """

    def __init__(self, minutes: float, spent: float) -> None:
        self.limit = 60 * minutes
        self.began = time.perf_counter() - spent
        self.shares = [self.share]  # the share of the time that is over: now, and after each step
        self.next_plan = self.share // _REPLAN * _REPLAN + _REPLAN

    @property
    def seconds(self) -> float:
        """Seconds since the run began, those of earlier calls included."""
        return time.perf_counter() - self.began

    @property
    def share(self) -> float:
        """The share of the time that is over."""
        return self.seconds / self.limit

    def plan(self, step: int, steps: int | None, share: float) -> int | None:
        """Return the number of steps for the whole run, or None while the pace is unknown; it was `steps` before.

        So far, `step` steps are done, in a `share` of the time.
        """
        self.shares.append(share)
        if share >= 1:
            return step
        # The shorter of the last two steps, because one of them may have compiled or evaluated.
        durations = [later - earlier for earlier, later in pairwise(self.shares[-3:])]
        if len(durations) == 2 and share + min(durations) >= 1:
            return step + 1 if steps is None else min(steps, step + 1)
        is_due = len(self.shares) > _NUM_PACED and share >= self.next_plan
        if step == steps:
            is_due = share < _EARLY
        if not is_due:
            return steps
        self.next_plan = share // _REPLAN * _REPLAN + _REPLAN
        half = self.shares[(len(self.shares) - 1) // 2 :]
        pace = (half[-1] - half[0]) / (len(half) - 1)
        return step + max(1, int((_PLANNED - share) / pace))
