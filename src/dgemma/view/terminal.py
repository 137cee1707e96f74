"""Live views in the terminal: a text or a Sudoku board, redrawn while a model denoises it.

Views are callbacks for `generate`, `infill` and `edit`, and take the events of a `stream`. They draw on standard error
if that is a terminal, so that standard output stays plain.
"""

import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, TextIO

import torch
from torch import Tensor

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import typed
from dgemma.printing import printable
from dgemma.run.arguments import read_token_ids
from dgemma.run.records import BlockCommit, StepRecord
from dgemma.view import board
from dgemma.view.heat import TERMINAL
from dgemma.view.pieces import MASK, Pieces, width
from dgemma.view.screen import BOLD, FAINT, Ink, Screen, Wrap, cut

_SHOWN_FROM = 0.25  # less probable guesses are not shown
_SAMPLED = 64  # tokens sampled to estimate the width of a token


class _Position(NamedTuple):
    token: int  # the decision, or the best guess
    confidence: float
    decided: bool
    frozen: bool
    noise: int  # the canvas's token if undecided; -1 for a mask


class _Canvas(NamedTuple):
    """One row's canvas after a step, on the host."""

    block: int
    step: int  # 1-based, without the steps that an edit skips
    num_steps: int
    done: bool
    entropy: float  # mean over positions to decide
    num_awaited: int  # positions to decide: neither frozen nor after the end of the text
    num_decided: int  # of which already decided
    positions: list[_Position]


class View(ABC):
    """Base class of the views: watches one row, decides when to draw, and restores the terminal."""

    shows_progress = True  # `generate` then shows no progress bar

    @typed
    def __init__(self, *, row: int = 0, file: TextIO | None = None, leave: bool = False) -> None:
        self.row, self.leave = row, leave
        self.screen = Screen(sys.stderr if file is None else file)
        self.num_forwards = 0
        self.seconds = 0.0  # between the start and the end of the view
        self._canvas: _Canvas | None = None
        self._num_skipped = 0  # steps of this canvas
        self._is_done = False  # the row wrote its stop token; later blocks are padding

    @abstractmethod
    def draw(self) -> list[list[Ink]]:
        """Return the lines to show, at most `self.screen.columns` wide."""

    def __enter__(self) -> Self:
        self.seconds = -time.monotonic()
        self.screen.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.seconds += time.monotonic()
        if self.leave:
            self.screen.draw(self.draw())
        else:
            self.screen.erase()
        self.screen.close()

    def __call__(self, event: StepRecord | BlockCommit) -> None:
        """Read a step or a finished block, and draw."""
        if isinstance(event, BlockCommit):
            if not self._is_done:
                self._commit(event.tokens[self.row].tolist())
            self._is_done = bool(event.finished[self.row])
            return
        canvas = _read_canvas(event, self.row)
        if canvas is None:
            return
        if self._canvas is not None and canvas.block != self._canvas.block:
            self._commit([position.token for position in self._canvas.positions])
        if self._canvas is None or canvas.block != self._canvas.block:
            self._num_skipped = canvas.step - 1
        self.num_forwards += 1
        step, num_steps = canvas.step - self._num_skipped, canvas.num_steps - self._num_skipped
        self._canvas = canvas._replace(step=step, num_steps=num_steps)
        if self.screen.is_due:
            self.screen.draw(self.draw())

    @abstractmethod
    def _commit(self, tokens: list[int]) -> None:
        """Take a finished block."""

    def _style(self, position: _Position) -> str:
        """Return the style: bold if frozen, coloured if uncertain, and otherwise plain if decided or faint if not."""
        if position.frozen:
            return BOLD
        colour = TERMINAL[min(int((1 - position.confidence) * len(TERMINAL)), len(TERMINAL) - 1)]
        if colour is not None and self.screen.has_colour:
            return f"38;5;{colour}"
        return "" if position.decided else FAINT


class LiveView(View):
    """Live text: the prompt and frozen words bold, certain words plain, uncertain ones coloured, noise faint.

    Masks are shown as ░, and so is noise if the terminal has no colours. Noise is as wide as an
    average token, and words stay on their lines, so that the text moves little.

    The view shows one row, with `prefix` before the canvas. It is erased at the end unless `leave` is set. A pipe gets
    the final text if `leave` is set, else nothing. Finished blocks stay above the canvas, up to the first of
    `eos_token_ids` (by default the tokenizer's). Use `keep_blocks=False` for `infill` and `edit`, whose canvases
    overlap.

    Example:
        with LiveView(tokenizer) as view:
            out = dgemma.generate(model, prompt, on_step=view)
        print(tokenizer.decode(out.new_tokens[0]))
    """

    @typed
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        prefix: str = "",
        row: int = 0,
        file: TextIO | None = None,
        leave: bool = False,
        keep_blocks: bool = True,
        eos_token_ids: Sequence[int] | None = None,
    ) -> None:
        super().__init__(row=row, file=file, leave=leave)
        self.prefix, self.keep_blocks = prefix, keep_blocks
        self._pieces = Pieces(tokenizer)
        if eos_token_ids is None and tokenizer is not None:
            eos_token_ids = [tokenizer.eos_token_id, *filter(None, [tokenizer.token_id("<turn|>")])]
        self._ends = frozenset(() if eos_token_ids is None else read_token_ids("LiveView eos_token_ids", eos_token_ids))
        self._finished: list[int] = []
        self._num_filled = 0  # tokens of finished canvases that are not kept
        self._room = self._average_width()
        self._wrap = Wrap()

    @property
    def text(self) -> str:
        """The text so far."""
        draft = [] if self._canvas is None else self._cut([position.token for position in self._canvas.positions])
        return self._decode(self._finished + draft)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        super().__exit__(kind, *_)
        if self.leave and not self.screen.live and kind is None:
            file = self.screen.file
            print(printable(self.text) if file.isatty() else self.text, file=file)

    def draw(self) -> list[list[Ink]]:
        columns = self.screen.columns
        inks = [Ink(printable(self.prefix), BOLD), Ink(printable(self._decode(self._finished)))]
        if self._canvas is None:
            return self._wrap(inks, columns)
        positions = self._canvas.positions[: self._num_shown()]
        inks += map(self._ink, positions, self._pieces([position.token for position in positions]))
        return [*self._wrap(inks, columns), [], [Ink(self._status(columns), FAINT)]]

    def _ink(self, position: _Position, piece: str) -> Ink:
        if position.decided:
            is_frame = self._pieces.tokenizer is not None and self._decode([position.token]) == ""  # or a turn marker
            return Ink("" if is_frame else piece, self._style(position))
        if position.confidence >= _SHOWN_FROM:
            return Ink(piece.replace("\n", "⏎"), self._style(position))
        gap = " " if self._room > 1 else ""
        room = self._room - len(gap)
        if position.noise < 0 or not self.screen.has_colour:
            return Ink(gap + MASK * room, FAINT, loose=True)
        noise = cut(self._pieces.one(position.noise).strip().replace("\n", "⏎"), room)
        return Ink(gap + noise + " " * (room - width(noise)), f"{FAINT};{self._style(position)}", loose=True)

    def _average_width(self) -> int:
        """Return the median width of a token: 1 for bytes, about 5 for words."""
        tokenizer = self._pieces.tokenizer
        if not isinstance(tokenizer, Tokenizer):
            return 4
        sample = range(0, tokenizer.vocab_size, max(1, tokenizer.vocab_size // _SAMPLED))
        return round(statistics.median(width(self._pieces.one(token)) for token in sample))

    def _status(self, columns: int) -> str:
        """Return the progress of the canvas; after its end, its speed."""
        assert self._canvas is not None
        block, step, num_steps, done, entropy, num_awaited, num_decided, positions = self._canvas
        if done:
            num_new = len(self._finished) + len(positions) if self.keep_blocks else self._num_filled + num_awaited
            found = f"{num_new / self.num_forwards:.1f} tokens per forward"
        else:
            found = f"{num_decided} of {num_awaited} accepted"
        short = f"step {step}/{num_steps} · {found}"
        long = f"block {block + 1} · step {step}/{num_steps} · mean entropy {entropy:.2f} nats · {found}"
        return next((form for form in (long, short) if len(form) <= columns), found)

    def _commit(self, tokens: list[int]) -> None:
        if self.keep_blocks:
            self._finished += self._cut(tokens)
        elif self._canvas is not None:
            self._num_filled += self._canvas.num_awaited
        self._canvas = None
        self._wrap.forget()

    def _cut(self, tokens: list[int]) -> list[int]:
        ends = [i for i, token in enumerate(tokens) if token in self._ends]
        return tokens[: ends[0] + 1] if ends else tokens

    def _num_shown(self) -> int:
        """The number of positions up to the first decided, probable stop token. Later tokens will be padding."""
        assert self._canvas is not None
        ends = (
            at
            for at, position in enumerate(self._canvas.positions, start=1)
            if position.token in self._ends and position.decided and position.confidence >= _SHOWN_FROM
        )
        return next(ends, len(self._canvas.positions))

    def _decode(self, tokens: list[int]) -> str:
        tokenizer = self._pieces.tokenizer
        return " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens)


class BoardView(View):
    """Live Sudoku board: clues bold, digits coloured by confidence, · for cells without a confident guess.

    The first 81 positions of the canvas are the cells, in the tokens of `dgemma.data.sudoku`. Clues are the frozen
    cells, or `givens` (81,) if only the prompt has them. The options row, file and leave are those of `LiveView`.

    Example: `with BoardView() as view: generate(model, prompt, on_step=view, ...)`.
    """

    def __init__(self, *, givens: Sequence[int] | Tensor | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._givens = None if givens is None else torch.as_tensor(givens).tolist()

    @property
    def has_room(self) -> bool:
        """True if the terminal has room for the board and the line below it."""
        return self.screen.live and self.screen.columns >= len(board.LINES[0]) and self.screen.lines > len(board.LINES)

    def draw(self) -> list[list[Ink]]:
        from dgemma.data.sudoku import canvas_digits  # not needed for texts

        if self._canvas is None:
            return []
        cells = self._canvas.positions[: board.NUM_CELLS]
        digits = canvas_digits(torch.tensor([cell.token for cell in cells])).tolist()
        lines = [[Ink(character, FAINT) for character in line] for line in board.LINES]
        for cell in range(board.NUM_CELLS):
            line, column = board.place_of(cell)
            lines[line][column] = self._ink(cells[cell], digits[cell], cell)
        status = f"step {self._canvas.step}/{self._canvas.num_steps} · mean entropy {self._canvas.entropy:.2f} nats"
        return [*lines, [Ink(status, FAINT)]]

    def _commit(self, tokens: list[int]) -> None:
        """Keep the board of the last step."""

    def _ink(self, cell: _Position, digit: int, index: int) -> Ink:
        if self._givens is not None and self._givens[index]:
            return Ink(str(self._givens[index]), BOLD)
        shown = digit > 0 and (cell.decided or cell.confidence >= _SHOWN_FROM)
        return Ink(str(digit), self._style(cell)) if shown else Ink("·", FAINT)


def _read_canvas(record: StepRecord, row: int) -> _Canvas | None:
    """Return a row's canvas after a step: decided tokens, and the draft elsewhere. None after the row is done."""
    rows = record.rows.tolist()
    if row not in rows:
        return None
    at, state = rows.index(row), record.state
    frozen, accepted = state.frozen[at], record.accepted[at]
    decided = frozen | accepted | ~(record.renoised[at] | state.open[at])
    ended = state.done[at] | (state.step[at] >= state.num_steps[at])  # after the last step the draft is the text
    tokens = torch.where(decided & ~ended, state.canvas[at], state.draft[at])
    awaited = ~frozen if state.awaited is None else ~frozen & state.awaited[at]
    entropy = (record.entropy[at] * awaited).sum() / awaited.sum().clamp(min=1)
    noise = torch.where(state.noise.masked(state.canvas[at]), -1, state.canvas[at])
    columns = (tokens, record.confidence[at], decided | ended, frozen, noise)
    return _Canvas(
        block=int(record.block[at]),
        step=int(record.step[at]) + 1,
        num_steps=int(state.num_steps[at]),
        done=bool(ended),
        entropy=float(entropy),
        num_awaited=int(awaited.sum()),
        num_decided=int((awaited & decided).sum()),
        positions=[_Position(*values) for values in zip(*(column.tolist() for column in columns), strict=True)],
    )
