"""On a real terminal the live view shows the canvas, Ctrl-C cleans up, and pipes get plain text."""

import os
import re
import signal

import pytest

from cli import terminal
from cli.test_sudoku import SOLUTION
from view.test_terminal import Terminal

pytestmark = pytest.mark.slow

LONG = ("-n", "32", "--steps", "5000")  # would take minutes


def screen(ended, columns=80):
    """Return the terminal as it is at the end."""
    shown = Terminal(columns)
    shown.write(ended.terminal)
    return shown


def press_ctrl_c_when(words):
    pressed = []

    def react(seen, child):
        if words in seen and not pressed:
            pressed.append(True)
            return b"\x03"
        return b""

    return react


@pytest.mark.parametrize("columns", [80, 40])
def test_ctrl_c_leaves_the_terminal_clean(checkpoint, columns):
    words = ("generate", "-m", checkpoint, *LONG, "The prompt is here, and is longer than a line of forty.")
    ended = terminal.run(*words, columns=columns, react=press_ctrl_c_when("step"))
    left = screen(ended, columns)
    assert ended.code == 130
    assert left.cursor_shown
    assert left.screen.strip() == "Stopped."
    assert left.wrapped == 0
    when_pressed = Terminal(columns)
    when_pressed.write(ended.terminal.partition("^C")[0])
    assert when_pressed.x == 0  # in the last column, the echo of ^C would wrap to a new line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_a_signal_that_ends_the_command_leaves_the_cursor_visible(checkpoint, number):
    sent = []

    def react(seen, child):
        if "step" in seen and not sent:
            sent.append(True)
            os.kill(child, number)
        return b""

    ended = terminal.run("generate", "-m", checkpoint, *LONG, "Once", react=react)
    assert ended.code == 128 + number
    assert "\x1b[?25l" in ended.terminal, "the view hides the cursor"
    assert screen(ended).cursor_shown
    assert screen(ended).screen.strip() == ""


@pytest.mark.parametrize(
    ("closed", "code", "message"),
    [
        ((0,), 0, None),
        ((1,), 1, "dgemma: standard output is closed. Redirect it to a file or to /dev/null.\n"),
        ((2,), 0, None),
        ((0, 1, 2), 1, None),
    ],
    ids=["input", "output", "errors", "all"],
)
def test_a_closed_standard_stream_is_no_crash(checkpoint, closed, code, message, tmp_path):
    page = tmp_path / "page.html"
    words = ("generate", "-m", checkpoint, "-n", "8", "--steps", "2", "--quiet", "Once", "--html", page)
    ended = terminal.run_with_closed_streams(*words, closed=closed)
    assert ended.code == code
    assert bool(ended.piped) == (1 not in closed)
    assert message is None or ended.terminal == message
    assert page.exists() == (code == 0)
    if code == 0:  # a file that gets the number of a closed stream would also get its messages
        assert page.read_text().startswith("<!doctype html>")
        assert page.read_text().endswith("</html>\n")


def test_the_text_and_a_line_of_counts_remain_after_the_live_view(checkpoint, command):
    words = ("generate", "-m", checkpoint, "-n", "32", "--steps", "3", "Once")
    ended = terminal.run(*words)
    left = screen(ended)
    assert ended.code == 0
    assert "step 1/3" in ended.terminal
    assert left.screen.startswith("Once")
    assert "step" not in left.screen
    assert re.fullmatch(r"32 tokens, 3 forwards, \d+\.\d s", left.screen.split("\n")[-1])
    assert left.cursor_shown


def test_piped_output_is_plain_while_the_view_shows(checkpoint, command):
    words = ("generate", "-m", checkpoint, "-n", "32", "--steps", "3", "Once")
    ended = terminal.run(*words, pipe_out=True)
    assert ended.piped.decode() == command(*words).out
    assert "step 1/3" in ended.terminal
    assert screen(ended).screen.startswith("32 tokens, 3 forwards, ")


def test_a_conversation_on_a_terminal_ends_with_ctrl_d(checkpoint):
    typed = []

    def react(seen, child):
        if seen.count("> ") == len(typed) + 1 and len(typed) < 2:
            typed.append(b"Who?\n" if not typed else b"\x04")
            return typed[-1]
        return b""

    ended = terminal.run("chat", "-m", checkpoint, "-n", "32", "--steps", "2", "--quiet", react=react)
    assert ended.code == 0
    assert len(typed) == 2
    assert "> Who?" in ended.terminal


def test_without_a_prompt_and_without_a_pipe_a_prompt_is_requested(checkpoint):
    ended = terminal.run("generate", "-m", checkpoint)
    assert ended.code == 2
    assert "A text is needed. Write it in quotes, or pipe it in" in ended.terminal


@pytest.mark.parametrize("words", [("--help",), ("info", "--tensors")], ids=["help", "a long list"])
def test_a_closed_pipe_is_not_an_error(checkpoint, words):
    ended = terminal.run_with_a_reader_that_leaves(*words, *([checkpoint] if words[0] == "info" else []))
    assert ended == (0, "", b"")


@pytest.mark.parametrize(
    ("terminal_options", "is_printed"),
    [({}, False), ({"pipe_out": True}, True), ({"kind": "dumb"}, True), ({"columns": 25}, True), ({"lines": 14}, True)],
    ids=["board", "piped", "dumb", "narrow", "low"],
)
def test_the_answer_is_printed_if_the_board_is_not_shown(solver, terminal_options, is_printed):
    """A board and its last line are 14 lines of 25 characters. The cursor needs one more column and line."""
    almost = "0" + SOLUTION[1:]
    ended = terminal.run("sudoku", "-m", solver, "--steps", "1", almost, **terminal_options)
    printed = ended.piped.decode() if "pipe_out" in terminal_options else ended.terminal
    assert (SOLUTION[1:] in printed) is is_printed
