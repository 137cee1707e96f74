"""`dgemma serve`: a local server with an OpenAI-compatible API."""

import argparse
import os
import socket
import sys
from contextlib import suppress

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.cli import loading
from dgemma.cli.commands import API_KEY
from dgemma.files import read_text

_LOCAL = ("127.0.0.1", "localhost", "::1")


def run_serve(arguments: argparse.Namespace) -> None:
    """Serve a model on this machine."""
    from dgemma.serve.app import create_app
    from dgemma.serve.gate import Limits, PatientProtocol, QuickServer

    replay = None if arguments.replay is None else read_text(arguments.replay)
    tokenizer = Tokenizer.from_pretrained(arguments.model)
    limits = Limits(tokens=arguments.max_tokens, queue=arguments.max_queue, seconds=arguments.max_seconds)
    listening = _bind(arguments.host, arguments.port)  # now, because loading the model may take minutes
    is_local = arguments.host in _LOCAL
    key = os.environ.get(API_KEY) or None
    if not is_local and key is None:
        print(
            f"Anybody who reaches {arguments.host} can use this server. Set {API_KEY} to require a key.",
            file=sys.stderr,
        )
    app = create_app(
        loading.load_denoiser(arguments),
        tokenizer,
        name=arguments.name or arguments.model,
        batch_size=arguments.batch_size,
        api_key=key,
        limits=limits,
        hosts=(*_LOCAL, "[::1]") if is_local else None,
        replay=replay,
    )
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host  # IPv6
    address = f"http://{host}:{arguments.port}{'' if replay is None else '/replay'}"
    print(f"Serving {arguments.model} at {address}", file=sys.stderr)
    import uvicorn  # not earlier: without the extra, dgemma.serve says how to install it

    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=75,  # longer than clients keep unused connections, so that they close them first
    )
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after it has stopped
        QuickServer(config).run(sockets=[listening])


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket at the address."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        # Without this option, a port stays reserved for a minute after its server ends. On Windows the option would let
        # two servers share the port.
        if os.name == "posix":
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise OSError(f"--host {host} --port {port} cannot be used: {error.strerror}. Choose another one.") from None
    return listening
