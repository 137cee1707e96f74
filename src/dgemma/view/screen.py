"""Lines of a terminal that are redrawn in place, without flicker and without wrapping."""

import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Sequence
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
        filled = _Lines(columns, self._starts if columns == self._columns else set())
        for index, ink in enumerate(inks):
            filled.add(index, ink)
        filled.end_word()
        self._starts, self._columns = filled.starts, columns
        return filled.lines


class _Lines:
    """The lines of a frame while they are filled, and the pieces that begin them. `old_starts`: the last frame's."""

    def __init__(self, columns: int, old_starts: set[int]) -> None:
        self.lines: list[list[Ink]] = [[]]
        self.starts: set[int] = set()
        self._columns, self._old_starts = columns, old_starts
        self._used = 0  # cells of the last line
        self._word: list[Ink] = []  # the word that is not yet on a line
        self._word_width = self._word_start = 0
        self._overflowed = False  # True after a line that the last frame did not have
        self._previous = " "

    def add(self, index: int, ink: Ink) -> None:
        """Add a piece of text."""
        text, style, loose = ink
        starts_word = loose or text[:1].isspace() or self._previous[-1:].isspace()
        if loose:
            self.end_word()
        if index in self._old_starts and starts_word:
            self.end_word()
            if self._used and not self._overflowed:
                self._new_line(index)
                text = text.lstrip(" ")
            self._overflowed = False
        for part in re.findall(r"\n|[^\S\n]+|\S+", text):
            if part == "\n":
                self.end_word()
                self._new_line()
                self._overflowed = True
            elif part.isspace():
                self._add_space(part.replace("\t", _TAB), style, index)
            else:
                self._add_letters(part, style, index)
        if loose:
            self.end_word()
        self._previous = text or self._previous

    def _add_space(self, spaces: str, style: str, index: int) -> None:
        self.end_word()
        if self._used + len(spaces) <= self._columns:
            self.lines[-1].append(Ink(spaces, style))
            self._used += len(spaces)
        else:
            self._new_line(index)

    def _add_letters(self, letters: str, style: str, index: int) -> None:
        """Add to the word. A word longer than a line is broken somewhere."""
        for piece in [letters] if width(letters) + self._word_width <= self._columns else letters:
            if self._word_width + width(piece) > self._columns:
                self.end_word()
            if not self._word:
                self._word_start = index
            self._word.append(Ink(piece, style))
            self._word_width += width(piece)

    def end_word(self) -> None:
        """Put the word on the last line, or on a new one if it does not fit."""
        if self._used + self._word_width > self._columns and self._used:
            self._new_line(self._word_start)
            self._overflowed = self._word_start not in self._old_starts
        self.lines[-1].extend(self._word)
        self._used, self._word_width, self._word = self._used + self._word_width, 0, []

    def _new_line(self, start: int | None = None) -> None:
        """Begin a line. start: the number of its first piece, if that should begin a line in the next frame too."""
        while self.lines[-1] and self.lines[-1][-1].text.isspace():
            self.lines[-1].pop()
        self.lines.append([])
        self._used = 0
        if start is not None:
            self.starts.add(start)


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
