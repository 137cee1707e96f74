"""The number of idle cores, from which a command chooses its number of threads."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class IdleTime(NamedTuple):
    """Seconds that all cores together have been idle until `time`; None if the system does not report them."""

    time: float
    idle: float | None


def read_idle_time() -> IdleTime:
    """Return the idle time until now."""
    idle = None
    with suppress(OSError, ValueError, IndexError):  # only on Linux
        idle = int(Path("/proc/stat").read_text().split()[4]) / os.sysconf("SC_CLK_TCK")
    return IdleTime(time.monotonic(), idle)


def idle_cores(start: IdleTime) -> float:
    """Return the mean number of idle cores since `start`; where it is unknown, estimate it from the load average.

    The load average alone would count the commands of the last minute, including the user's own.
    """
    now = read_idle_time()
    if now.idle is not None and start.idle is not None and now.time > start.time:
        return (now.idle - start.idle) / (now.time - start.time)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 1.0  # not on Windows
    return (os.cpu_count() or 1) - max(load, 1.0)  # this process counts in the load
