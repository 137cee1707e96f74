"""argparse from the tables of `commands.toml`, with errors of one line, and help that wraps at any width.

The readers of values report mistakes before torch is imported, except for samplers.
"""

import argparse
import gc
import importlib.util
import math
import os
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dgemma.printing import install_command, nearest, one_line

if TYPE_CHECKING:
    from dgemma.sampling import Sampler


TABLES = Path(__file__).with_name("commands.toml")


def add_commands(commands: Any) -> None:
    """Add the commands of `commands.toml` to a parser. Each sets `module`, the file that has its `run_COMMAND`."""
    content = tomllib.loads(TABLES.read_text("utf-8"))
    for name, command in content["commands"].items():
        epilog = command["epilog"]
        parser = commands.add_parser(
            name,
            help=command["help"],
            usage=f"dgemma {name} {command['usage']}",
            description=command["description"],
            epilog=epilog if name != "generate" else lambda text=epilog: f"{text}\n\n{describe_samplers()}",
        )
        groups = {None: parser}
        for table in command["tables"]:
            rows = dict(content["tables"][table])
            title, note, is_exclusive = (rows.pop(key, None) for key in ("title", "note", "exclusive"))
            if title not in groups:
                groups[title] = parser.add_argument_group(title, note)
            group = groups[title].add_mutually_exclusive_group() if is_exclusive else groups[title]
            for words, row in rows.items():
                _add_option(group, words, {"help": row} if isinstance(row, str) else dict(row))
        parser.set_defaults(module=command["module"], **command.get("defaults", {}))


def _add_option(group: Any, words: str, settings: dict[str, Any]) -> None:
    """Add a row. Its words are the names and the metavar, as in "-n, --max-new-tokens N"."""
    parts = words.replace(", ", " ").split()
    names = [part for part in parts if part.startswith("-")] or parts[:1]
    if parts[len(names) :]:
        settings["metavar"] = parts[-1]
    else:
        settings["action"] = "store_true"
    if "range" in settings:
        settings["type"] = whole(*settings.pop("range"))
    elif "type" in settings:
        settings["type"] = READERS[settings["type"]]
    group.add_argument(*names, **settings)


class Parser(argparse.ArgumentParser):
    """Parser whose description and epilog keep their indentation when they wrap.

    The epilog may be a function, which is called when help is printed.
    """

    def __init__(self, *, epilog: str | Callable[[], str] | None = None, **options: Any) -> None:
        # An abbreviation may become ambiguous when an option is added.
        super().__init__(formatter_class=_Help, allow_abbrev=False, **options)
        self._late_epilog = epilog

    def format_help(self) -> str:
        """Return the help page."""
        self.epilog = self._late_epilog() if callable(self._late_epilog) else self._late_epilog
        return super().format_help()

    def parse_known_args(self, *words: Any, **options: Any) -> Any:
        """Report unknown arguments with the name of the command."""
        arguments, unknown = super().parse_known_args(*words, **options)
        if unknown:
            known = {name.lstrip("-"): name for action in self._actions for name in action.option_strings}
            near = nearest(unknown[0].partition("=")[0].lstrip("-"), known)
            self.error(f"unknown: {' '.join(unknown)}" + (f", perhaps you meant {known[near]}" if near else ""))
        return arguments, unknown

    def error(self, message: str) -> NoReturn:
        # "argument --steps: must be …" becomes a sentence.
        sentence = re.sub(r"^argument (\S+): (must|needs) ", r"\1 \2 ", message).rstrip(".")
        sentence = re.sub(r"^argument (\S+): not allowed with argument (\S+)", r"\1 must not be used with \2", sentence)
        found = re.match(r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)$", sentence)
        if found:
            name, got, choices = found[1], found[2], found[3].replace("'", "")
            near = nearest(got.strip("'"), choices.split(", "))
            sentence = f"{name} must be one of {choices}, got {got}" + (f", perhaps you meant {near}" if near else "")
        self.exit(2, one_line(f"{self.prog}: {sentence}. See {self.prog} --help.") + "\n")


class _Help(argparse.HelpFormatter):
    def _format_usage(self, usage: str | None, *others: Any) -> str:
        if usage is None:
            return super()._format_usage(usage, *others)
        return "\n".join(_wrap(f"usage: {usage}", self._width)) + "\n\n"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrap(" ".join(text.split()), width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = []
        for line in text.splitlines():
            words = line.lstrip(" ")
            lines += _wrap(words, width, indent + " " * (len(line) - len(words))) or [""]
        return "\n".join(lines)


def _wrap(text: str, width: int, margin: str = "") -> list[str]:
    # --max-new-tokens is one word
    wrapper = textwrap.TextWrapper(max(width, 20), margin, margin, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)


def import_quickly(module: str) -> Any:
    """Import a module, and torch with it, with settings that must be made before torch is imported."""
    if "torch" in sys.modules:
        return importlib.import_module(module)
    # Idle threads sleep instead of spinning, which halves the time of a small model on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Modules stay until the process ends. Looking for garbage among them would take half a second.
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def _refuse(rule: str) -> NoReturn:
    raise argparse.ArgumentTypeError(rule) from None


def _number(convert: Callable[[str], Any], rule: str, fits: Callable[[Any], bool]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            _refuse(f"{rule}, got {text!r}")
        return value if fits(value) else _refuse(f"{rule}, got {text}")

    return read


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a reader of whole numbers within bounds."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    return _number(int, f"must be a whole number {bounds}", lambda n: n >= least and (most is None or n <= most))


def positive(most: float = math.inf) -> Callable[[str], float]:
    """Return a reader of numbers above 0, up to `most`."""
    bound = "" if most == math.inf else f", at most {most:g}"
    return _number(float, f"must be a number above 0{bound}", lambda number: 0 < number <= most and number != math.inf)


def device(text: str) -> str:
    """Read the name of a device. `pick_device` checks that it exists, because that needs torch."""
    return text if re.fullmatch(r"(cpu|cuda)(:\d+)?", text) else _refuse(f"must be cpu, cuda or cuda:N, got {text!r}")


def sampler(text: str) -> "Sampler":
    """Read a sampler from its name and fields."""
    try:
        return import_quickly("dgemma.sampling.named").parse_sampler(text)
    except ValueError as error:
        _refuse(str(error))


def describe_samplers() -> str:
    """Return a list of the samplers, for the end of a help page."""
    lines = ["samplers, the noise they work with, and their fields:"]
    for name, kind in import_quickly("dgemma.sampling.named").SAMPLERS.items():
        summary = (kind.__doc__ or "").strip().splitlines()[0]
        lines += [f"  {name} ({', '.join(sorted(kind.valid_for))})", f"      {summary}"]
        defaults = [field.name + ("" if field.default is MISSING else f"={field.default}") for field in fields(kind)]
        lines += [f"      {', '.join(defaults)}"] if defaults else []
    return "\n".join(lines)


def writable_file(text: str) -> Path:
    """Read the path of a file that can be written."""
    from dgemma.files import check_writable  # not at the top, because it imports NumPy

    try:
        check_writable(text)
    except OSError as error:
        _refuse(f"must be a file that can be written, got {text!r}: {error.strerror}")
    return Path(text)


def new_gif(text: str) -> Path:
    """Read the path of a GIF; refuse if the packages that draw it are missing."""
    if Path(text).suffix.lower() != ".gif":
        _refuse(f"must be a file that ends in .gif, got {text!r}")
    if any(importlib.util.find_spec(name) is None for name in ("PIL", "matplotlib")):
        _refuse(f"needs Pillow and matplotlib: {install_command('plots')}")
    return writable_file(text)


READERS: dict[str, Callable[[str], Any]] = {
    "count": whole(1),
    "seed": whole(-(2**63), 2**63 - 1),
    "positive": positive(),
    "level": positive(1.0),
    "share": _number(float, "must be a number above 0 and below 1", lambda number: 0 < number < 1),
    "text": lambda text: text or _refuse("must not be empty"),
    "device": device,
    "sampler": sampler,
    "path": Path,
    "file": writable_file,
    "gif": new_gif,
}
