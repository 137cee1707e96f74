"""The number of idle cores decides whether a small model uses a second thread."""

import os
from pathlib import Path

import pytest

from dgemma.cli import cores
from dgemma.cli.cores import IdleTime, idle_cores, read_idle_time


def test_idle_cores_are_the_idle_seconds_per_second_since_the_start(monkeypatch):
    monkeypatch.setattr(cores, "read_idle_time", lambda: IdleTime(12.0, 33.0))
    assert idle_cores(IdleTime(10.0, 32.0)) == 0.5


@pytest.mark.parametrize(("load", "idle"), [(0.1, 3.0), (2.5, 1.5)], ids=["only-this-command", "busy"])
def test_without_idle_times_the_load_average_of_the_last_minute_decides(load, idle, monkeypatch):
    monkeypatch.setattr(cores, "read_idle_time", lambda: IdleTime(12.0, None))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 9.0, 9.0), raising=False)
    assert idle_cores(IdleTime(10.0, None)) == idle


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux reports idle times")
def test_idle_time_never_decreases():
    first, second = read_idle_time(), read_idle_time()
    assert first.idle is not None
    assert second.time >= first.time
    assert second.idle >= first.idle
