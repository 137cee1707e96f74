"""Runs the command in its own process, on a terminal, a pipe or both; returns its output and exit code."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn

_PATIENCE = 120  # seconds
_COMMAND = """
import sys
sys.stdout = open(1, "w", encoding=sys.argv.pop(1))
from dgemma.cli import main
raise SystemExit(main(sys.argv[1:]))
"""


class Ended(NamedTuple):
    code: int
    terminal: str  # all that was written to it, escapes included
    piped: bytes


def run(
    *words: object,
    columns: int = 80,
    lines: int = 24,
    kind: str = "xterm-256color",
    react: Callable[[str, int], bytes] | None = None,
    pipe_out: bool = False,
    encoding: str = "utf-8",
) -> Ended:
    """Run the command on a terminal. `react` gets all output so far and the process, and returns the keys to type.

    With `pipe_out`, standard output goes into a pipe instead, in this encoding.
    """
    read_end, write_end = os.pipe()
    child, terminal = pty.fork()
    if child == 0:
        os.close(read_end)
        if pipe_out:
            os.dup2(write_end, 1)
        os.close(write_end)
        _become_the_command(words, columns, encoding, lines, kind)
    os.close(write_end)
    seen, piped, deadline = b"", b"", time.monotonic() + _PATIENCE
    open_ends = {terminal, read_end}
    while open_ends and time.monotonic() < deadline:
        for end in select.select(list(open_ends), [], [], 1.0)[0]:
            data = b""
            with contextlib.suppress(OSError):  # a terminal raises this when the child has closed it
                data = os.read(end, 1 << 16)
            if not data:
                open_ends.remove(end)
            elif end == terminal:
                seen += data
                if react is not None and (typed := react(seen.decode(errors="replace"), child)):
                    os.write(terminal, typed)
            else:
                piped += data
    if open_ends:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for end in (terminal, read_end):
        os.close(end)
    return Ended(code, seen.decode(errors="replace"), piped)


def run_with_a_reader_that_leaves(*words: object) -> Ended:
    """Run the command with output and error in pipes; close the reader of the output at once."""
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(out_read)
        os.dup2(out_write, 1)
        os.dup2(err_write, 2)
        for end in (out_write, err_write, err_read):
            os.close(end)
        _become_the_command(words)
    for end in (out_read, out_write, err_write):
        os.close(end)
    with open(err_read, "rb") as errors:
        said = errors.read()
    return Ended(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.decode(), b"")


def run_with_closed_streams(*words: object, closed: tuple[int, ...]) -> Ended:
    """Run the command with output and error in pipes, without the standard streams whose numbers are in `closed`."""
    redirected = " ".join(f"{number}>&-" for number in closed)
    code = _COMMAND.replace('sys.stdout = open(1, "w", encoding=sys.argv.pop(1))', "")
    command = ["sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, "-c", code, *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=_PATIENCE, check=False
    )
    return Ended(done.returncode, done.stderr.decode(), done.stdout)


def _become_the_command(
    words: tuple[object, ...],
    columns: int = 80,
    encoding: str = "utf-8",
    lines: int = 24,
    kind: str = "xterm-256color",
) -> NoReturn:
    """Replace this process by the command in a new interpreter, because a fork may inherit torch's locks."""
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    environment |= {"TERM": kind, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if os.isatty(2):
        fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    os.execve(sys.executable, [sys.executable, "-c", _COMMAND, encoding, *map(str, words)], environment)
