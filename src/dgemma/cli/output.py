"""Output of the commands, without torch: text for pipes and terminals, JSON, pictures, and the list of `info`."""

import argparse
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.cli.parser import import_quickly
from dgemma.location import ASSETS
from dgemma.printing import printable, to_json, without_nan

if TYPE_CHECKING:
    from dgemma.checkpoint.tokenizer import Tokenizer
    from dgemma.run.recorded.trajectory import Trajectory
    from dgemma.view.board import Board


def is_watched(arguments: argparse.Namespace) -> bool:
    """Return whether to show a live view."""
    return sys.stderr.isatty() and not arguments.quiet and not arguments.json


def print_text(text: str) -> None:
    """Print a model's text: unchanged into a pipe; on a terminal with visible control characters and whole words."""
    print(wrapped(printable(text)) if sys.stdout.isatty() else text)


def wrapped(text: str) -> str:
    """Return a text whose lines break between words where the terminal ends."""
    wrapper = textwrap.TextWrapper(
        shutil.get_terminal_size().columns, replace_whitespace=False, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(map(wrapper.fill, text.split("\n")))


def print_json(content: dict[str, Any]) -> None:
    """Print one JSON object on one line and flush. NaN and infinity become null."""
    is_utf = (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")
    print(to_json(without_nan(content), ascii_only=not is_utf), flush=True)


def print_note(text: str) -> None:
    """Print a line for the user on standard error. It may hold names from files and arguments."""
    print(printable(text), file=sys.stderr)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 step" or "2 steps"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def is_recorded(arguments: argparse.Namespace) -> bool:
    """Return whether a picture was requested."""
    return bool(arguments.html or arguments.gif)


def write_pictures(
    arguments: argparse.Namespace, tokenizer: "Tokenizer | Board", *trajectories: "Trajectory | None"
) -> None:
    """Write the page of --html and the animation of --gif; further runs are written as NAME-2, NAME-3, and so on."""
    from dgemma.view.gif import to_gif
    from dgemma.view.html import to_html

    for path, write in ((arguments.html, to_html), (arguments.gif, to_gif)):
        for number, trajectory in enumerate(trajectories, start=1):
            if path and trajectory is not None:
                file = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
                write(trajectory, file, tokenizer=tokenizer)
                print_note(f"Wrote {file}.")


def run_info(arguments: argparse.Namespace) -> None:
    """Describe a checkpoint, or list those that ship with dgemma."""
    if arguments.checkpoint is not None:
        import_quickly("dgemma.cli.models").describe_checkpoint(arguments)
    elif arguments.json:
        print_json({"checkpoints": [f"dgemma/{folder.name}" for folder in shipped()]})
    else:
        print("\n".join(map(_introduce, shipped())) or "No checkpoint ships with this copy of dgemma.")


def shipped() -> list[Path]:
    """Return the folders of the checkpoints that ship with dgemma."""
    return [config.parent for config in sorted(ASSETS.glob("*/config.json"))]


def _introduce(folder: Path) -> str:
    """Return a shipped checkpoint's name, and the first sentence and first command of its README."""
    page = (folder / "README.md").read_text("utf-8")
    found = (re.search(rule, page, re.MULTILINE) for rule in (r"^([A-Z].*?\.)(?=\s)", r"^    (dgemma .*)"))
    return "\n  ".join([f"dgemma/{folder.name}", *(match[1] for match in found if match)])
