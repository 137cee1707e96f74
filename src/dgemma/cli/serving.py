"""`dgemma serve`: a local server with an OpenAI-compatible API."""

import argparse
import os
import sys
from contextlib import suppress
from typing import Any

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.cli import options, types
from dgemma.files import read_text

_LOCAL = ("127.0.0.1", "localhost", "::1")
_KEY = "DGEMMA_API_KEY"


def add_commands(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "serve",
        help="serve a model on this machine",
        usage="dgemma serve [OPTION ...]",
        description="Serve a model with an OpenAI-compatible API, and a page to try it. Needs pip install "
        "'dgemma[serve]'.",
        epilog="examples:\n  dgemma serve\n      then open http://127.0.0.1:8000\n"
        "  dgemma serve -m google/diffusiongemma-26B-A4B-it --fast --slots 16\n"
        "  dgemma serve --replay run.html\n      then open /replay: click a word of the run, and the model writes it "
        "again\n\n"
        f"If the variable {_KEY} is set, requests need that key.",
    )
    options.add_model_options(parser, default="dgemma/text")
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", metavar="NAME", help="address to listen on (%(default)s)")
    group.add_argument("--port", type=types.count, default=8000, metavar="N", help="port to listen on (%(default)s)")
    group.add_argument("--name", metavar="NAME", help="the model's name for clients (as in -m)")
    group.add_argument(
        "--slots", type=types.count, default=8, metavar="N", help="requests that are denoised together (%(default)s)"
    )
    group.add_argument(
        "--max-queue", type=types.count, default=256, metavar="N", help="requests that may wait (%(default)s)"
    )
    group.add_argument(
        "--max-tokens", type=types.count, default=4096, metavar="N", help="maximum tokens per answer (%(default)s)"
    )
    group.add_argument(
        "--max-seconds",
        type=types.positive(),
        default=300.0,
        metavar="S",
        help="maximum seconds per answer (%(default)s)",
    )
    group.add_argument("--replay", metavar="FILE", help="web page that --html wrote, to show at /replay")
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> None:
    from dgemma.serve.app import create_app
    from dgemma.serve.gate import Limits, PatientProtocol, QuickServer

    replay = None if arguments.replay is None else read_text(arguments.replay)
    tokenizer = Tokenizer.from_pretrained(arguments.model)
    limits = Limits(tokens=arguments.max_tokens, queue=arguments.max_queue, seconds=arguments.max_seconds)
    is_local = arguments.host in _LOCAL
    key = os.environ.get(_KEY) or None
    if not is_local and key is None:
        print(
            f"Anybody who reaches {arguments.host} can use this server. Set {_KEY} to require a key.", file=sys.stderr
        )
    app = create_app(
        options.load_denoiser(arguments),
        tokenizer,
        name=arguments.name or arguments.model,
        slots=arguments.slots,
        api_key=key,
        limits=limits,
        hosts=(*_LOCAL, "[::1]") if is_local else None,
        replay=replay,
    )
    address = f"http://{arguments.host}:{arguments.port}{'' if replay is None else '/replay'}"
    print(f"Serving {arguments.model} at {address}", file=sys.stderr)
    import uvicorn  # not earlier: without the extra, dgemma.serve says how to install it

    config = uvicorn.Config(
        app,
        host=arguments.host,
        port=arguments.port,
        http=PatientProtocol,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=75,  # longer than clients keep unused connections, so that they close them first
    )
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after it has stopped
        QuickServer(config).run()
