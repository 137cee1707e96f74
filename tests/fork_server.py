"""A server that has imported torch and dgemma, and forks processes in milliseconds instead of seconds."""

import os
import sys
from functools import cache
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext


@cache
def fork_server() -> ForkServerContext:
    """Start the server and return its context. The server runs no tensor code, so its forks inherit no threads."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["several_processes", "dgemma.cli"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the server reads its import path from here
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
    return context
