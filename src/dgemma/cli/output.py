"""What commands print and write: plain text for pipes, nothing that could steer a terminal, JSON, pictures."""

import argparse
import json
import math
import sys
from typing import Any

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.cli import types
from dgemma.run.trajectory import Trajectory
from dgemma.view.board import Board
from dgemma.view.gif import to_gif
from dgemma.view.html import to_html
from dgemma.view.pieces import printable


def add_json_option(parser: Any) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_view_options(parser: argparse.ArgumentParser, *, pictures: bool = True) -> None:
    """--json, --quiet, --html, --gif."""
    group = parser.add_argument_group("output", "The live view shows on a terminal only; what is piped is plain text.")
    add_json_option(group)
    group.add_argument("--quiet", action="store_true", help="no live view, no progress bar")
    if pictures:
        group.add_argument(
            "--html", type=types.new_file, metavar="FILE", help="write the denoising as a page to play and scrub"
        )
        group.add_argument(
            "--gif",
            type=types.new_gif,
            metavar="FILE",
            help="write it as an animation; needs pip install 'dgemma[plots]'",
        )


def is_watched(arguments: argparse.Namespace) -> bool:
    """Whether to show a live view."""
    return sys.stderr.isatty() and not arguments.quiet and not arguments.json


def print_text(text: str) -> None:
    """A model's text: as it is into a pipe, and on a terminal with its control characters made visible."""
    print("\n".join(map(printable, text.split("\n"))) if sys.stdout.isatty() else text)


def print_json(found: dict[str, Any]) -> None:
    """One JSON object on a line, at once; null for numbers that JSON cannot write."""
    shows_all = (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")  # else characters are escaped
    print(json.dumps(_finite(found), ensure_ascii=not shows_all), flush=True)


def counted(number: int, noun: str) -> str:
    """A number of things.

    Example: `counted(1, "step")` is "1 step".
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_recorded(arguments: argparse.Namespace) -> bool:
    """Whether a picture is asked for."""
    return bool(arguments.html or arguments.gif)


def write_pictures(
    arguments: argparse.Namespace, tokenizer: Tokenizer | Board, *trajectories: Trajectory | None
) -> None:
    """The page and the animation that --html and --gif ask for; those of further runs beside them, as NAME-2 etc."""
    for path, write in ((arguments.html, to_html), (arguments.gif, to_gif)):
        for number, trajectory in enumerate(trajectories, start=1):
            if path and trajectory is not None:
                file = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
                write(trajectory, file, tokenizer=tokenizer)
                print(f"Wrote {file}.", file=sys.stderr)
