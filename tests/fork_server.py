"""A server that has imported torch and dgemma, and forks processes in milliseconds instead of seconds."""

import os
import random
import socket
import sys
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext, ForkServerProcess
from unittest.mock import patch

import torch


@cache
def fork_server() -> ForkServerContext:
    """Start the server and return its context. The server runs no tensor code, so its forks inherit no threads."""
    context = get_context("forkserver")
    commands = [f"dgemma.cli.{name}" for name in ("main", "writing", "training")]
    context.set_forkserver_preload(["several_processes", "dgemma._public", *commands])
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # the server reads its import path from here
        forkserver.ensure_running()
    return context


def free_port() -> int:
    """Return a port below those that systems give to connections, so that no connection takes it before its use."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):  # another process listens there
            probe.bind(("127.0.0.1", port))
            return port


def start_script(source: str, *arguments: object) -> ForkServerProcess:
    """Start a process that runs the source with these arguments, as `python -c` does."""
    process = fork_server().Process(target=_run_script, args=(source, tuple(map(str, arguments))))
    process.start()
    return process


def _run_script(source: str, arguments: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # the same arithmetic as in the tests
    sys.argv = ["-c", *arguments]
    exec(source, {"__name__": "__main__"})
