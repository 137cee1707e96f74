"""The progress bar appears in terminals and notebooks after a while, and never in a pipe."""

import io
import sys
import types

import pytest

from dgemma.printing import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(monkeypatch: pytest.MonkeyPatch, screen: io.StringIO, *, show: bool = True, seconds: float = 3.0) -> str:
    """Return the screen after one step that took `seconds`."""
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_bar(desc="denoising", unit="step", show=show, total=4) as bar:
        if not bar.disable:
            bar.start_t -= seconds  # as if it had begun that long ago
            bar.last_print_t -= seconds
        bar.update()
        return screen.getvalue()


@pytest.mark.parametrize(
    ("screen", "options"), [(Terminal, {"seconds": 0.5}), (io.StringIO, {}), (Terminal, {"show": False})]
)
def test_a_short_run_a_pipe_and_a_quiet_run_show_nothing(monkeypatch, screen, options):
    assert "denoising" in work(monkeypatch, Terminal())
    assert work(monkeypatch, screen(), **options) == ""


def test_a_process_without_standard_error_shows_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with progress_bar(desc="denoising", unit="step", show=True) as bar:
        assert bar.disable


def test_a_notebook_shows_the_bar(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    assert "denoising" in work(monkeypatch, io.StringIO())
