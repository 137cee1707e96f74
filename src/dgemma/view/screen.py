"""Lines of a terminal that are redrawn in place, without flicker and without wrapping."""

import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TextIO

from dgemma.view.pieces import width

BOLD, FAINT = "1", "2"  # styles of an `Ink`
_HIDE_CURSOR, _SHOW_CURSOR, _RESET = "\x1b[?25l", "\x1b[?25h", "\x1b[0m"
_BEGIN_FRAME, _END_FRAME = "\x1b[?2026h", "\x1b[?2026l"  # synchronised output, where the terminal supports it
_CLEAR_LINE, _CLEAR_BELOW = "\x1b[K", "\x1b[J"
_FRAMES_A_SECOND = 30
_TAB = "    "


class Ink(NamedTuple):
    """A piece of text and its style: codes such as "1" (bold), "2" (faint) or "38;5;97" (a colour).

    A line may break before and after a `loose` piece, as at a space.
    """

    text: str
    style: str = ""
    loose: bool = False


class Screen:
    """Draws lines below the cursor, over the previous ones, if `file` is a suitable terminal.

    Without one (a pipe, TERM=dumb) `live` is False and `draw` does nothing. `has_colour` is False with NO_COLOR or
    with less than 256 colours.
    """

    def __init__(self, file: TextIO) -> None:
        kind = os.environ.get("TERM", "")
        self.file = file
        self.live = file.isatty() and kind != "dumb"
        rich = "256color" in kind or os.environ.get("COLORTERM", "") in ("truecolor", "24bit")
        self.has_colour = self.live and rich and not os.environ.get("NO_COLOR")
        self._widths: list[int] = []  # widths of the lines on the screen
        self._last_drawn = -math.inf

    @property
    def columns(self) -> int:
        """The width for lines: one less than the terminal's, so that no line wraps."""
        return max(self._size().columns - 1, 1)

    @property
    def lines(self) -> int:
        return max(self._size().lines - 1, 1)

    @property
    def is_due(self) -> bool:
        """True if enough time has passed for another frame."""
        return self.live and time.monotonic() - self._last_drawn >= 1 / _FRAMES_A_SECOND

    def open(self) -> None:
        """Hide the cursor until `close`."""
        self._write(_HIDE_CURSOR)

    def draw(self, lines: Sequence[Sequence[Ink]]) -> None:
        """Replace the previous lines."""
        visible = [_fit(line, self.columns) for line in lines[-self.lines :]]
        text = f"{_CLEAR_LINE}\r\n".join(self._styled(line) for line in visible)
        widths = [sum(width(ink.text) for ink in line) for line in visible]
        try:
            # Return to the first column: an echoed ^C could wrap at the last one.
            self._write(f"{_BEGIN_FRAME}{self._to_top()}{text}{_CLEAR_LINE}{_CLEAR_BELOW}\r{_END_FRAME}")
        finally:  # Ctrl-C usually arrives here, and the frame must be erased
            self._widths = widths
        self._last_drawn = time.monotonic()

    def erase(self) -> None:
        """Remove the lines."""
        if self._widths:
            self._write(f"{self._to_top()}{_CLEAR_BELOW}")
        self._widths = []

    def close(self) -> None:
        """Keep the lines and restore the terminal."""
        self._write(_RESET + ("\r\n" if self._widths else "") + _SHOW_CURSOR)
        self._widths = []

    def _size(self) -> os.terminal_size:
        try:
            size = os.get_terminal_size(self.file.fileno())
        except (OSError, ValueError):
            return shutil.get_terminal_size()
        return size if size.columns else shutil.get_terminal_size()  # some terminals report no size

    def _to_top(self) -> str:
        """Return the codes that move to the first line. If the terminal became narrower, it has wrapped the lines."""
        rows = sum(max(1, math.ceil(drawn / (self.columns + 1))) for drawn in self._widths)
        return "\r" + (f"\x1b[{rows - 1}A" if rows > 1 else "")

    def _styled(self, line: Iterable[Ink]) -> str:
        parts = []
        for style, inks in groupby(line, key=lambda ink: ink.style):
            text = "".join(ink.text for ink in inks)
            parts.append(f"\x1b[{style}m{text}{_RESET}" if style else text)
        return "".join(parts)

    def _write(self, text: str) -> None:
        if not self.live:
            return
        encoding = getattr(self.file, "encoding", None) or "utf-8"
        self.file.write(text.encode(encoding, errors="replace").decode(encoding))
        self.file.flush()


class Wrap:
    """Breaks pieces of text into lines, between words if possible. Words stay on their lines from frame to frame.

    A piece that began a line in the last frame begins one again if a word starts there. If the line before has become
    too long, its last words move to the beginning of the next line, and the piece follows them.

    Example: `Wrap()([Ink("two words")], 5)` is `[[Ink("two")], [Ink("words")]]`.
    """

    def __init__(self) -> None:
        self._starts: set[int] = set()  # pieces that began a line of the last frame
        self._columns = 0

    def forget(self) -> None:
        """Forget the last frame: the next one has other pieces."""
        self._starts = set()

    def __call__(self, inks: Iterable[Ink], columns: int) -> list[list[Ink]]:
        """Return lines of at most `columns` cells."""
        old_starts, starts = self._starts if columns == self._columns else set(), set()
        lines: list[list[Ink]] = [[]]
        used, overflowed = 0, False  # cells of the last line; True after a line that the last frame did not have

        def break_line() -> None:
            while lines[-1] and lines[-1][-1].text.isspace():
                lines[-1].pop()
            lines.append([])

        for index, begins_piece, word in _words(inks, columns):
            needed, is_space = sum(width(part.text) for part in word), word[0].text.isspace()
            is_old_start = begins_piece and index in old_starts and used > 0 and not overflowed
            overflowed = overflowed and not (begins_piece and index in old_starts)
            if word[0].text == "\n":
                break_line()
                used, overflowed = 0, True
            elif is_old_start or (used + needed > columns and (used or is_space)):
                break_line()
                starts.add(index)
                overflowed = not is_old_start and (overflowed if is_space else index not in old_starts)
                used = 0 if is_space else needed
                lines[-1] += [] if is_space else word
            else:
                lines[-1] += word
                used += needed
        self._starts, self._columns = starts, columns
        return lines


def _words(inks: Iterable[Ink], columns: int) -> Iterator[tuple[int, bool, list[Ink]]]:
    """Yield words, spaces and line breaks: the piece that each begins in, whether it begins this piece, and its parts.

    A word of several pieces has several parts. A word longer than a line is cut somewhere.
    """
    word: list[Ink] = []
    at, begins_piece, previous = 0, False, " "
    for index, ink in enumerate(inks):
        is_new = ink.loose or ink.text[:1].isspace() or previous[-1:].isspace()
        if word and is_new:
            yield at, begins_piece, word
            word = []
        for part in re.findall(r"\n|[^\S\n]+|\S+", ink.text):
            used = sum(width(each.text) for each in word)
            for piece in [part] if part.isspace() or used + width(part) <= columns else part:
                if word and (piece.isspace() or sum(width(each.text) for each in word) + width(piece) > columns):
                    yield at, begins_piece, word
                    word = []
                if not word:
                    at, begins_piece, is_new = index, is_new, False
                word.append(Ink(piece.replace("\t", _TAB), ink.style))
                if piece.isspace():
                    yield at, begins_piece, word
                    word = []
        if word and ink.loose:
            yield at, begins_piece, word
            word = []
        previous = ink.text or previous
    if word:
        yield at, begins_piece, word


def _fit(line: Sequence[Ink], columns: int) -> list[Ink]:
    """Return a line, cut at the last column."""
    fitted, used = [], 0
    for text, style, _ in line:
        part = cut(text, columns - used)
        fitted.append(Ink(part, style))
        used += width(part)
        if part != text:
            break
    return fitted


def cut(text: str, cells: int) -> str:
    """Return the longest beginning of a text that fits.

    Example: `cut("né語", 3)` is "né": the wide character needs two cells.
    """
    while width(text) > cells:
        text = text[:-1]
    return text
