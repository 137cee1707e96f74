"""argparse with help that wraps at any width, and errors of one line."""

import argparse
import difflib
import re
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

from dgemma.printing import one_line


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
            known = [name for action in self._actions for name in action.option_strings]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1, cutoff=0.8)
            self.error(f"unknown: {' '.join(unknown)}" + (f", perhaps you meant {near[0]}" if near else ""))
        return arguments, unknown

    def error(self, message: str) -> NoReturn:
        # "argument --steps: must be …" becomes a sentence.
        sentence = re.sub(r"^argument (\S+): (must|needs) ", r"\1 \2 ", message).rstrip(".")
        sentence = re.sub(r"^argument (\S+): not allowed with argument (\S+)", r"\1 must not be used with \2", sentence)
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
            margin = indent + " " * (len(line) - len(words))
            lines += _wrap(words, width, margin) or [""]
        return "\n".join(lines)


def _wrap(text: str, width: int, margin: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        max(width, 20),
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,  # --max-new-tokens is one word
    )
