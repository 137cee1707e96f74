"""A recorded run as an animated GIF. Every position has the width of its final token.

The prompt, or the end of a long one, is drawn before the text. A Sudoku is drawn as a board.
"""

import re
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import at_least, at_most, require, typed
from dgemma.files import new_file
from dgemma.printing import install_command
from dgemma.run.recorded.trajectory import Trajectory
from dgemma.view import board
from dgemma.view.board import Board
from dgemma.view.frames import Frames, check_canvas, read_frames, read_prompt
from dgemma.view.heat import DARK, LEVELS
from dgemma.view.pieces import STATIC, Pieces, width
from dgemma.view.screen import Ink, Wrap

_PAGE, _SOFT, _ACCENT, _FROZEN = "#101218", "#7d7a88", "#3ecfb4", "#82b4ff"
_PROMPT_TOKENS = 60
_MAX_FRAMES = 240
_RUN_MS = 5000  # length of the animation, if a frame then lasts 110 to 600 ms
_HOLD_MS = 2500  # the finished text stays this long
_LINE_HEIGHT = 1.55  # in font sizes


@typed
def to_gif(
    trajectory: Trajectory,
    path: str | Path,
    *,
    tokenizer: Tokenizer | Board | None = None,
    row: int = 0,
    columns: Annotated[int, at_least(16), at_most(200)] | None = None,
    max_lines: Annotated[int, at_least(1), at_most(100)] = 36,
) -> None:
    """Write a row's run to `path` as a looping animation. A text of more than `max_lines` lines scrolls.

    tokenizer: None shows token ids, `Board()` a Sudoku. columns: characters per line; None chooses a number that suits
    the text. Runs of more than 240 frames are thinned evenly.

    Example: `to_gif(out.trajectory, "run.gif", tokenizer=tokenizer)`.
    """
    require(Path(path).suffix.lower() == ".gif", "to_gif path", "end in .gif", Path(path).name)
    frames = read_frames(trajectory, row, owner="to_gif")
    check_canvas(trajectory, tokenizer, owner="to_gif")
    pieces = Pieces(tokenizer, mask_token=trajectory.plan.noise.mask_token)
    texts = [text for line in frames.final.tolist() for text in pieces(line)]
    for i in range(len(texts)):
        block, position = divmod(i, frames.canvas.shape[1])
        if position >= frames.kept[block] and frames.frozen[frames.block == block][-1, position]:
            texts[i] = ""  # padding takes no room
    prompt: list[str] = []
    if isinstance(tokenizer, Board):
        places = [Place(*board.place_of(cell), 1) for cell in range(board.NUM_CELLS)]
        columns, num_lines = len(board.LINES[0]), len(board.LINES)
    else:
        prompt = re.findall(r"\s*\S+|\s+", read_prompt(trajectory, row, pieces, num_tokens=_PROMPT_TOKENS))
        columns = columns or int(min(100, max(48, (3 * sum(map(width, prompt + texts))) ** 0.5)))
        places = lay_out(prompt + texts, columns, spaced=tokenizer is None)
        num_lines = min(places[-1].line + 1, max_lines)
    pen = _Pen(18 if num_lines <= 20 else 13)
    prompt_looks = [_Look(text, _SOFT) for text in prompt]
    indices = np.linspace(0, len(frames) - 1, min(len(frames), _MAX_FRAMES)).round().astype(int).tolist()
    images = []
    for index in [*indices, len(frames)]:
        image = pen.page(columns, num_lines, _footer(frames, index))
        if isinstance(tokenizer, Board):
            pen.frame(image)
        top = _top_line(frames, index, places[len(prompt) :], num_lines)
        for place, look in zip(places, prompt_looks + _looks(frames, index, texts, pieces), strict=False):
            if look is not None and place.cells and 0 <= place.line - top < num_lines:
                pen.put(image, place.line - top, place, look)
        images.append(image)
    frame_ms = min(600, max(110, _RUN_MS // len(images)))
    pen.save(images, path, [frame_ms] * (len(images) - 1) + [_HOLD_MS])


class Place(NamedTuple):
    """The place of a position, and its width in cells."""

    line: int
    column: int
    cells: int


class _Look(NamedTuple):
    text: str
    colour: str
    underlined: bool = False


def lay_out(texts: list[str], columns: int, *, spaced: bool = False) -> list[Place]:
    """Return the places of the pieces of a text. Words are not broken if they fit; `spaced` separates pieces.

    Example: `lay_out(["to", " be"], 4)` is `[Place(0, 0, 2), Place(1, 0, 2)]`.
    """
    parts = [Ink(text + " " * spaced, style=str(number)) for number, text in enumerate(texts)]
    found: dict[int, Place] = {}
    for line, inks in enumerate(Wrap()(parts, columns)):
        column = 0
        for ink in inks:
            if ink.text.strip():  # the first word of a piece
                number = int(ink.style)
                found.setdefault(number, Place(line, column, min(width(texts[number].strip()), columns)))
            column += width(ink.text)
    places = [Place(0, 0, 0)]
    for number, text in enumerate(texts):
        line, column, cells = places[-1]
        places.append(found.get(number, Place(line, column + cells, width(text))))  # by default, white space
    return places[1:]


def _looks(frames: Frames, index: int, texts: list[str], pieces: Pieces) -> list[_Look | None]:
    """Return the text and colour of each position in a frame. The frame after the last is the finished text."""
    at, canvas_len = min(index, len(frames) - 1), frames.canvas.shape[1]
    num_finished = frames.num_blocks if index == len(frames) else int(frames.block[at])
    frozen = [frames.frozen[frames.block == block][-1] for block in range(num_finished)]
    looks: list[_Look | None] = [
        _Look(text, _FROZEN if frozen[i // canvas_len][i % canvas_len] else DARK[0])
        if i % canvas_len < frames.kept[i // canvas_len]
        else None
        for i, text in enumerate(texts[: num_finished * canvas_len])
    ]
    if index == len(frames):
        return looks
    for i, text in enumerate(pieces(frames.canvas[at].tolist())):
        doubt = 1 - float(frames.confidence[at, i])  # 1 for the initial noise
        colour = _FROZEN if frames.frozen[at, i] else DARK[round(doubt * (LEVELS - 1))]
        looks.append(_Look(text, colour, bool(frames.accepted[at, i])))
    return looks


def _top_line(frames: Frames, index: int, places: list[Place], num_lines: int) -> int:
    """Return the first visible line. A block with more lines than the picture scrolls from its start to its end.

    A shorter block is visible as a whole, with the lines before it.
    """
    at, canvas_len = min(index, len(frames) - 1), frames.canvas.shape[1]
    block = int(frames.block[at])
    first, last = places[block * canvas_len].line, places[(block + 1) * canvas_len - 1].line
    beyond = last + 1 - num_lines
    if beyond <= first:
        return max(0, beyond)
    progress = (frames.step[at] + 1) / (frames.step[frames.block == block].max() + 1)
    return first + round((beyond - first) * progress)


def _footer(frames: Frames, index: int) -> str:
    if index == len(frames):
        return f"{sum(frames.kept)} tokens · {int((frames.step >= 0).sum())} forwards"
    step = f"step {frames.step[index] + 1}" if frames.step[index] >= 0 else "noise"
    return step if frames.num_blocks == 1 else f"block {frames.block[index] + 1} · {step}"


class _Pen:
    """Draws monospaced text with Pillow."""

    def __init__(self, size: int) -> None:
        try:
            import matplotlib
            from PIL import Image, ImageDraw, ImageFont
        except ImportError as error:
            raise ImportError(
                f"to_gif needs Pillow and matplotlib. Install them with: {install_command('plots')}."
            ) from error
        shipped = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf"
        self._font = ImageFont.truetype(str(shipped), size)
        self._image, self._draw = Image, ImageDraw
        self._size, self._margin = size, 2 * size
        self._cell, self._line = round(self._font.getlength("m")), round(size * _LINE_HEIGHT)
        self._missing = bytes(self._font.getmask("\uffff"))
        self._tile = lru_cache(maxsize=1 << 14)(self._make_tile)
        self._glyph = lru_cache(maxsize=1 << 12)(self._make_glyph)

    def page(self, columns: int, num_lines: int, footer: str) -> Any:
        """Return an empty page with a footer."""
        height = (num_lines + 1) * self._line + 2 * self._margin
        page = self._image.new("RGB", (columns * self._cell + 2 * self._margin, height), _PAGE)
        where = (self._margin, height - self._margin)
        self._draw.Draw(page).text(where, footer, font=self._font, fill=_SOFT, anchor="ls")
        return page

    def frame(self, page: Any) -> None:
        """Draw the lines of a board. Box-drawing glyphs would leave gaps."""
        draw = self._draw.Draw(page)
        across = [self._margin + (8 * box + 0.5) * self._cell for box in range(4)]
        down = [self._margin + (4 * box + 0.5) * self._line for box in range(4)]
        for x, y in zip(across, down, strict=True):
            draw.line((x, down[0], x, down[-1]), fill=_SOFT)
            draw.line((across[0], y, across[-1], y), fill=_SOFT)

    def put(self, page: Any, line: int, place: Place, look: _Look) -> None:
        where = (self._margin + place.column * self._cell, self._margin + line * self._line)
        page.paste(self._tile(look, place.cells), where)

    def save(self, pages: list[Any], path: str | Path, durations: list[int]) -> None:
        """Save with one palette for all pages, so that colours do not flicker."""
        few = pages[:: max(1, len(pages) // 6)]
        sheet = self._image.new("RGB", (few[0].width, few[0].height * len(few)))
        for i, page in enumerate(few):
            sheet.paste(page, (0, i * page.height))
        colours = sheet.quantize(colors=128)
        first, *rest = (page.quantize(palette=colours, dither=self._image.Dither.NONE) for page in pages)
        with new_file(path) as new:
            first.save(new, format="GIF", save_all=True, append_images=rest, duration=durations, loop=0)

    def _make_tile(self, look: _Look, cells: int) -> Any:
        tile = self._image.new("RGB", (cells * self._cell, self._line), _PAGE)
        draw = self._draw.Draw(tile)
        text = look.text.strip() or ("⏎" if "\n" in look.text else "")
        draw.text((0, 0), "".join(map(self._glyph, text)), font=self._font, fill=look.colour)
        if look.underlined:
            draw.rectangle((0, self._line - 4, tile.width, self._line - 3), fill=_ACCENT)
        return tile

    def _make_glyph(self, character: str) -> str:
        """Return the character, or a block symbol if the font lacks it."""
        if bytes(self._font.getmask(character)) != self._missing:
            return character
        return STATIC[ord(character) % len(STATIC)]
