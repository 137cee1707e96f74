"""The `dgemma` command: its parser, and what becomes of errors and of Ctrl-C."""

import argparse
import sys
from collections.abc import Sequence

from dgemma.cli import study, sudoku, training, writing

_EPILOG = """\
examples:
  dgemma generate "It was a dark"                 watch text appear out of noise
  dgemma infill "The ____ sat on the ____ mat."   a hole of one token for every underscore
  dgemma sudoku                                   make a puzzle and watch it solved
  dgemma info dgemma/text                         what is in a checkpoint

`dgemma COMMAND --help` explains a command. Nothing is downloaded unless -m names a hub repository.
"""


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors in one sentence."""

    def error(self, message: str) -> "None":  # type: ignore[override]
        self.exit(2, f"{self.prog}: {message}. Try `{self.prog} --help`.\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands.

    Example: `build_parser().parse_args(["generate", "Once upon"]).prompt`.
    """
    parser = _Parser(
        prog="dgemma",
        description="Text diffusion: a canvas of noise, denoised all at once, step after step.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for family in (writing, sudoku, study, training):
        family.add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0, 1 when the work failed, 2 for bad arguments, 130 for Ctrl-C.

    Example: `main(["info", "dgemma/text"])`.
    """
    arguments = build_parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever was reading has seen enough
        sys.stderr.close()
        return 0
    except ValueError as error:
        print(f"dgemma {arguments.command}: {error}", file=sys.stderr)
        return 2
    except (OSError, RuntimeError, ImportError) as error:
        print(f"dgemma {arguments.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, FileNotFoundError) else 1
    return 0
