"""Runs the command in its own process, on a terminal, a pipe or both; returns its output and exit code."""

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
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from dgemma.cli import main
from fork_server import fork_server

_PATIENCE = 120  # seconds


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
    terminal, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    context = fork_server()
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(
        target=_be_the_command, args=(os.ttyname(inner), writer if pipe_out else None, kind, encoding, words)
    )
    process.start()
    writer.close()
    seen, piped, deadline = b"", b"", time.monotonic() + _PATIENCE
    open_ends = {terminal, reader.fileno()}
    while time.monotonic() < deadline:
        ready = select.select([*open_ends, process.sentinel], [], [], 1.0)[0]
        if ready == [process.sentinel]:  # it has ended, and everything is read
            break
        for end in open_ends.intersection(ready):
            data = os.read(end, 1 << 16)
            if not data:
                open_ends.remove(end)
            elif end == terminal:
                seen += data
                if react is not None and (typed := react(seen.decode(errors="replace"), process.pid)):
                    os.write(terminal, typed)
            else:
                piped += data
    process.kill()  # does nothing if it has ended
    process.join()
    os.close(terminal)
    os.close(inner)
    reader.close()
    return Ended(process.exitcode, seen.decode(errors="replace"), piped)


def _be_the_command(screen: str, pipe: Connection | None, kind: str, encoding: str, words: tuple[object, ...]) -> None:
    os.setsid()
    terminal = os.open(screen, os.O_RDWR)  # the first terminal that a session opens receives its Ctrl-C
    for end in (0, 1, 2):
        os.dup2(pipe.fileno() if pipe is not None and end == 1 else terminal, end)
    streams = open(0), open(1, "w", encoding=encoding), open(2, "w")  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = streams
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        os.environ.pop(name, None)
    os.environ["TERM"] = kind
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup pytest` would let the command ignore it
    torch.set_num_threads(1)
    sys.exit(main(list(map(str, words))))


def run_with_a_reader_that_leaves(*words: object) -> Ended:
    """Run the command in a new interpreter with output and error in pipes; close the reader of the output at once."""
    command = [sys.executable, "-m", "dgemma", *map(str, words)]
    with subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        errors = process.stderr.read()
        return Ended(process.wait(_PATIENCE), errors.decode(), b"")


def run_with_closed_streams(*words: object, closed: tuple[int, ...]) -> Ended:
    """Run the command with output and error in pipes, without the standard streams whose numbers are in `closed`."""
    redirected = " ".join(f"{number}>&-" for number in closed)
    command = ["sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, "-m", "dgemma", *map(str, words)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, env=_environment(), timeout=_PATIENCE, check=False
    )
    return Ended(done.returncode, done.stderr.decode(), done.stdout)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
