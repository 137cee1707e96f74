"""The `dgemma` command: its parser, and what becomes of errors, of Ctrl-C and of a reader that has left."""

import io
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from dgemma.cli import study, sudoku, training, writing
from dgemma.cli.parser import Parser

_EPILOG = """\
examples:
  dgemma generate "It was a dark"
      watch text appear out of noise
  dgemma infill "The ____ sat down."
      a hole of one token for every underscore
  dgemma sudoku
      make a puzzle and watch it solved
  dgemma info dgemma/text
      what is in a checkpoint

`dgemma COMMAND --help` explains a command. Nothing is downloaded unless -m names a hub repository.
The exit code is 0, 1 when the work failed, 2 for bad arguments, 130 after Ctrl-C.
"""
_LONGEST_ERROR = 1000  # characters


def build_parser() -> Parser:
    """The parser of all commands.

    Example: `build_parser().parse_args(["generate", "Once upon"]).prompt`.
    """
    parser = Parser(
        prog="dgemma",
        usage="dgemma COMMAND [OPTION ...]",
        description="Text diffusion: a canvas of noise, denoised all at once, step after step.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"dgemma {_version()}")
    commands = parser.add_subparsers(prog="dgemma", title="commands", dest="command", metavar="COMMAND", required=True)
    for family in (writing, sudoku, study, training):
        family.add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0, 1 when the work failed, 2 for bad arguments, 130 for Ctrl-C.

    Example: `main(["info", "dgemma/text"])`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character still gets the others
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever was reading has seen enough
        code = _discard_output(0)
    except OSError as error:
        code = _discard_output(_fail("dgemma", error, 1))
    return code


def _run(argv: Sequence[str] | None) -> int:
    """The command's exit code, after one sentence about whatever went wrong."""
    name = "dgemma"
    try:
        arguments = build_parser().parse_args(argv)
        name = f"dgemma {arguments.command}"
        return arguments.run(arguments) or 0
    except SystemExit as finished:  # argparse has said all there is to say
        return int(finished.code or 0)
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except (ValueError, FileNotFoundError) as error:
        return _fail(name, error, 2)
    except OSError as error:
        return _fail(name, error, 2 if error.filename else 1)  # a path that was given, or a full disk
    except (RuntimeError, ArithmeticError, ImportError, MemoryError) as error:
        return _fail(name, error, 1)


def _fail(name: str, error: BaseException, code: int) -> int:
    text = f"{error.filename}: {error.strerror}." if isinstance(error, OSError) and error.filename else str(error)
    print(f"{name}: {textwrap.shorten(text, _LONGEST_ERROR, placeholder=' …')}", file=sys.stderr)
    return code


def _discard_output(code: int) -> int:
    """Let the interpreter's last flush find somewhere to write to."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _version() -> str:
    try:
        return metadata.version("dgemma")
    except metadata.PackageNotFoundError:  # run from its source
        project = Path(__file__).parents[3] / "pyproject.toml"
        version = re.search(r'^version = "(.*)"', project.read_text(), re.MULTILINE) if project.is_file() else None
        return f"{version[1] if version else 'unknown'}, not installed"
