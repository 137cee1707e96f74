"""The entry point of the `dgemma` command: its parser, its exit codes, and one line per error."""

import errno
import io
import logging
import os
import re
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from dgemma.cli.parser import Parser, add_commands, import_quickly
from dgemma.location import find_local
from dgemma.printing import one_line, printable

_EPILOG = """\
examples:
  dgemma generate "It was a dark"
      write a text and watch it appear
  dgemma infill "Once upon a time there was a fox named Max. He lived ________, and he was happy."
      fill a hole; an underscore is about a word, and [...] any number of words
  dgemma sudoku
      make a puzzle and watch the model solve it
  dgemma info
      list the checkpoints that ship with dgemma

`dgemma COMMAND --help` explains a command. Nothing is downloaded unless you name a hub repository.
Exit codes: 0 success, 1 failure, 2 bad arguments, 130 Ctrl-C.
"""
_BAD_PATH = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR),
    *(errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
)


def build_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="dgemma",
        usage="dgemma COMMAND [OPTION ...]",
        description="Text diffusion: denoise a canvas of random tokens in parallel, step by step.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"dgemma {_version()}")
    commands = parser.add_subparsers(prog="dgemma", title="commands", dest="command", metavar="COMMAND")
    add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0, 1 for failure, 2 for bad arguments, 130 for Ctrl-C."""
    if not _open_streams():
        return _fail("dgemma", OSError("standard output is closed. Redirect it to a file or to /dev/null."), 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # replace characters that the terminal cannot show
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Printable())
    try:
        with _stopping_cleanly():
            code = _run(argv)
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has exited
        code = _discard_output(0)
    except OSError as error:
        code = _discard_output(_fail("dgemma", error, 1))
    return code


def _run(argv: Sequence[str] | None) -> int:
    """Run the command; print one line about an error; return the exit code."""
    name = "dgemma"
    try:
        parser = build_parser()
        arguments = parser.parse_args(argv)
        if arguments.command is None:
            parser.print_help()
            return 0
        name = f"dgemma {arguments.command}"
        _refuse_one_file_for_two(arguments)
        checkpoint = getattr(arguments, "model", None) or getattr(arguments, "checkpoint", None)
        if checkpoint and not checkpoint.endswith(".gguf"):
            find_local(checkpoint)  # reports a wrong path before torch is imported
        module = import_quickly(f"dgemma.cli.{arguments.module}")
        return getattr(module, f"run_{arguments.command}")(arguments) or 0
    except SystemExit as finished:  # argparse has printed its message, or a signal ends the command
        return int(finished.code or 0)
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except (ValueError, FileNotFoundError) as error:
        return _fail(name, error, 2)
    except OSError as error:
        return _fail(name, error, 2 if error.errno in _BAD_PATH else 1)
    except (RuntimeError, ArithmeticError, ImportError, MemoryError) as error:
        return _fail(name, error, 1)


def _refuse_one_file_for_two(arguments: Namespace) -> None:
    """Raise if two options name the same file, because one output would replace the other, or the input."""
    options: dict[Path, str] = {}
    for option in ("input", "out", "html", "gif"):
        path = getattr(arguments, option, None)
        is_special = path and Path(path).exists() and not Path(path).is_file()  # /dev/null is no output to lose
        other = options.setdefault(Path(path).resolve(), option) if path and not is_special else option
        if other != option:
            raise ValueError(f"--{option} must be another file than that of --{other}, got {str(path)!r}.")


def _fail(name: str, error: BaseException, code: int) -> int:
    text = f"{error.filename}: {error.strerror}." if isinstance(error, OSError) and error.filename else str(error)
    print(one_line(f"{name}: {text or type(error).__name__}"), file=sys.stderr)
    return code


class _Printable(logging.Formatter):
    """Formatter that makes control characters visible: names in a log line may come from files."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _open_streams() -> bool:
    """Open closed standard streams on /dev/null, and return False if standard output was closed.

    If a stream stayed closed, the next file that is opened would get its number.
    """
    has_output = sys.stdout is not None
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (until the process ends)
    return has_output


@contextmanager
def _stopping_cleanly() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the command like an error, so that the terminal gets its cursor back."""
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():  # other threads cannot catch signals
        names = []
    numbers = [number for name in names if signal.getsignal(number := getattr(signal, name)) is signal.SIG_DFL]

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    try:
        for number in numbers:
            signal.signal(number, stop)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _discard_output(code: int) -> int:
    """Redirect standard output to nothing, so that the interpreter's last flush succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _version() -> str:
    try:
        return metadata.version("dgemma")
    except metadata.PackageNotFoundError:  # run from its source
        project = Path(__file__).parents[3] / "pyproject.toml"
        version = re.search(r'^version = "(.*)"', project.read_text(), re.MULTILINE) if project.is_file() else None
        return f"{version[1] if version else 'unknown'}, not installed"
