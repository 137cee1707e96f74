"""The live view shows the right screen on terminals of all kinds and cleans up after itself."""

import io
import random
import re
import sys
import unicodedata

import pytest
import torch

import dgemma
from dgemma.printing import progress_bar
from dgemma.view.screen import Ink, Screen, Wrap
from dgemma.view.terminal import BoardView, LiveView
from view.converging import Words, record_board, writer_of

TEXT = "Sense is found in noise, a little at a time, wherever the model is sure."
_ESCAPE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")


class Terminal(io.StringIO):
    """Emulates a terminal of `columns` with cursor movement, erasing and wrapping, and keeps its screen."""

    encoding = "utf-8"

    def __init__(self, columns: int = 80) -> None:
        super().__init__()
        self.columns, self.rows, self.x, self.y = columns, [[]], 0, 0
        self.styles: set[str] = set()
        self.cursor_shown, self.wrapped, self.raw = True, 0, ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.raw += text
        at = 0
        while at < len(text):
            if found := _ESCAPE.match(text, at):
                self._obey(*found.groups())
                at = found.end()
            else:
                self._put(text[at])
                at += 1
        return len(text)

    def _obey(self, number: str, command: str) -> None:
        if number == "?25":
            self.cursor_shown = command == "h"
        elif command == "A":
            self.y -= int(number)
            assert self.y >= 0
        elif command == "K":
            del self.rows[self.y][self.x :]
        elif command == "J":
            del self.rows[self.y][self.x :], self.rows[self.y + 1 :]
        elif command == "m":
            self.styles.add(number)
        else:
            assert (number, command) in (("?2026", "h"), ("?2026", "l")), f"escape {number}{command}"

    def _put(self, character: str) -> None:
        if character == "\r":
            self.x = 0
        elif character == "\n":
            self.y += 1
            self.rows += [[] for _ in range(self.y + 1 - len(self.rows))]
        else:
            assert character.isprintable(), f"U+{ord(character):04X} reached the terminal"
            cells = (
                0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
            )
            if self.x + cells > self.columns:
                self.wrapped += 1
            line = self.rows[self.y]
            line += [" "] * (self.x - len(line))
            if cells == 0:
                line[-1] += character
            else:
                line[self.x : self.x + cells] = [character, *[""] * (cells - 1)]
            self.x += cells

    @property
    def screen(self) -> str:
        return "\n".join("".join(row).rstrip() for row in self.rows).rstrip("\n")


@pytest.fixture(autouse=True)
def colour_terminal(monkeypatch):
    for name in ("NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setattr("dgemma.view.screen._FRAMES_A_SECOND", 1e9)


def run(view, text=TEXT, tokenizer=None, canvas_len=40, on_step=None, **options):
    tokenizer = tokenizer or dgemma.ByteTokenizer()
    model, ids = writer_of(text, tokenizer, canvas_len)
    prompt = torch.tensor([[tokenizer.bos_token_id, *ids[:2]]])
    chosen = {"sampler": dgemma.EntropyBound(bound=0.5), "max_new_tokens": len(ids), "temperature": 0.8}
    with view:
        return dgemma.generate(model, prompt, on_step=on_step or view, **(chosen | options))


def watched(view, read):
    """Return a callback that draws a step, and a list that gets `read(record)` after each step."""
    seen = []

    def look(record):
        view(record)
        seen.append(read(record))

    return look, seen


@pytest.mark.parametrize("columns", [120, 40])
def test_text_settles_in_place_at_any_width(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = Terminal(columns)
    view = LiveView(dgemma.ByteTokenizer(), file=screen, leave=True, prefix="Q: ")
    look, seen = watched(view, lambda record: screen.screen)
    run(view, on_step=look)
    text, _, status = screen.screen.rpartition("\n\n")
    assert " ".join(text.split()) == "Q: " + TEXT
    assert TEXT[:40] not in seen[0]
    assert "2;38;5;97" in screen.styles, "noise, faint"
    assert re.search(r"step 1/48 · .*\d of 40 accepted$", seen[0])
    assert re.search(r"step \d+/48 · .*\d\.\d tok", status)
    assert all(len(line) < columns for screen in seen for line in screen.split("\n"))
    assert screen.wrapped == 0
    assert screen.cursor_shown
    assert any(style.startswith("38;5;") for style in screen.styles)


def test_nothing_is_shown_after_a_decided_stop_token():
    screen = Terminal()
    view = LiveView(dgemma.ByteTokenizer(), file=screen)
    look, seen = watched(view, lambda record: screen.screen.partition("\n")[0])
    run(view, "The text ends here.<eos> What follows is not returned.", on_step=look)
    assert seen[-1] == "The text ends here."


def test_the_view_is_erased_unless_leave_is_set():
    screen = Terminal()
    screen.write("before\r\n")
    run(LiveView(dgemma.ByteTokenizer(), file=screen))
    assert screen.screen == "before"
    assert screen.cursor_shown


@pytest.mark.parametrize("leave", [True, False])
@pytest.mark.parametrize("kind", ["pipe", "dumb"])
def test_a_pipe_or_a_dumb_terminal_gets_the_final_text_or_nothing(monkeypatch, leave, kind):
    monkeypatch.setenv("TERM", kind)
    file = io.StringIO() if kind == "pipe" else Terminal()
    run(LiveView(dgemma.ByteTokenizer(), file=file, leave=leave))
    assert (file.getvalue() if kind == "pipe" else file.raw) == (TEXT + "\n" if leave else "")


@pytest.mark.parametrize("noise", ["uniform", "mask"])
def test_no_color_removes_colours_and_still_distinguishes_decided_tokens_and_guesses(monkeypatch, noise):
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Terminal()
    view = LiveView(dgemma.ByteTokenizer(), file=screen, leave=True)
    look, seen = watched(view, lambda record: (screen.screen.partition("\n")[0], int(record.accepted.sum())))
    process = dgemma.UniformNoise(384) if noise == "uniform" else dgemma.MaskNoise(384)
    run(view, on_step=look, noise=process, sampler=dgemma.EntropyBound(bound=0.5, greedy=True))
    assert screen.styles <= {"0", "1", "2"}
    assert TEXT in screen.screen.replace("\n", " ")
    (first, num_accepted), (later, _) = seen[0], seen[5]
    assert len(first) == 40
    assert 40 > first.count("░") > later.count("░")
    assert 40 - first.count("░") > num_accepted, "guesses are shown, too"


def test_noise_has_the_width_of_an_average_token_and_does_not_move_the_prompt(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    words = [f" {'w' * (1 + i % 9)}{i}" for i in range(200)]  # from 3 to 13 cells
    tokenizer, screen = Words(words), Terminal(40)
    text = "".join(words[7 * i % 200] for i in range(32))
    view = LiveView(tokenizer, file=screen, prefix="A prompt that ends near the line's end")
    look, seen = watched(view, lambda record: screen.screen.rpartition("\n\n")[0].split("\n"))
    run(view, text, tokenizer, canvas_len=32, on_step=look, steps=12)
    assert {lines[0] for lines in seen} == {"A prompt that ends near the line's end"}
    assert max(map(len, seen)) - min(map(len, seen)) <= 2


def test_an_interrupted_run_leaves_the_terminal_clean():
    screen = Terminal()
    view = LiveView(dgemma.ByteTokenizer(), file=screen)

    def interrupt(record):
        view(record)
        if int(record.step[0]) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(view, on_step=interrupt)
    assert screen.cursor_shown
    assert screen.screen == ""
    assert screen.raw.rstrip("\r\n").endswith("\x1b[0m\x1b[?25h")


def test_a_models_text_cannot_control_the_terminal():
    evil = ["\x1b[2J\x1b[31m", "\x1b]0;title\x07", "\r", "\x9b5A", "\u202e", "\x08\x08"]
    tokenizer = Words([*evil, " and"])
    screen = Terminal()
    run(LiveView(tokenizer, file=screen, leave=True), " and".join(evil), tokenizer, canvas_len=12)
    assert "␛[2J␛[31m and" in screen.screen  # `Terminal` itself refuses any other escape and any control


def test_wide_and_combining_characters_keep_their_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    screen = Terminal(20)
    text = "日本語の文章がここにあります cafe\u0301 한국어"
    run(LiveView(dgemma.ByteTokenizer(), file=screen, leave=True), text, canvas_len=96)
    assert screen.wrapped == 0
    assert "".join(screen.screen.rpartition("\n\n")[0].split()) == text.replace(" ", "")


def test_a_text_taller_than_the_terminal_shows_its_end(monkeypatch):
    monkeypatch.setenv("LINES", "6")
    monkeypatch.setenv("COLUMNS", "24")
    screen = Terminal(24)
    run(LiveView(dgemma.ByteTokenizer(), file=screen, leave=True), TEXT + " The end.", canvas_len=96)
    assert len(screen.rows) <= 7
    assert "end." in screen.screen


def test_a_stream_can_be_watched():
    tokenizer, screen = dgemma.ByteTokenizer(), Terminal()
    model, ids = writer_of(TEXT, tokenizer, 40)
    events = dgemma.stream(model, torch.tensor([[2, 200]]), max_new_tokens=len(ids), temperature=0.8)
    with LiveView(tokenizer, file=screen, leave=True) as view:
        for event in events:
            view(event)
    assert " ".join(screen.screen.split()) == view.text.strip()


def test_only_the_chosen_row_is_shown_and_finished_blocks_can_be_hidden():
    tokenizer = dgemma.ByteTokenizer()
    model, ids = writer_of(TEXT, tokenizer, 40)
    view = LiveView(tokenizer, row=1, file=Terminal(), keep_blocks=False)
    options = {"max_new_tokens": len(ids), "temperature": 0.8, "seed": 5}
    with view:
        out = dgemma.generate(model, torch.tensor([[2, 200]] * 2), on_step=view, **options)
        assert view.text == tokenizer.decode(out.new_tokens[1, 40:])
    assert view.num_forwards == int(out.steps[1].sum())


@pytest.mark.parametrize("tail", [None, 1], ids=["free tail", "given tail"])
def test_only_the_holes_of_a_text_are_counted(tail):
    tokenizer, screen = dgemma.ByteTokenizer(), Terminal()
    model, ids = writer_of(TEXT, tokenizer, 40)
    view = LiveView(tokenizer, file=screen, keep_blocks=False)
    look, seen = watched(view, lambda record: screen.screen.rpartition("\n")[2])
    # A text of 60 with canvases of 40: each hole has a canvas, and the second contains the end of the text.
    options = {"sampler": dgemma.EntropyBound(bound=0.5), "steps": 3, "stop": None, "tail_token_id": tail}
    with view:
        dgemma.infill(model, torch.tensor([ids[:60]]), [(2, 7), (45, 48)], on_step=look, **options)
    assert all(re.search(r" [0-5] of 5 accepted$", status) for status in seen[:2])
    assert all(re.search(r" [0-3] of 3 accepted$", status) for status in seen[3:5])
    # 5 tokens in 3 forwards, and then 5 + 3 in 6.
    assert [re.search(r"(\S+) tokens per forward", seen[at])[1] for at in (2, 5)] == ["1.7", "1.3"]


def test_an_edit_counts_only_its_own_steps():
    tokenizer, screen = dgemma.ByteTokenizer(), Terminal()
    model, ids = writer_of(TEXT, tokenizer, 40)
    view = LiveView(tokenizer, file=screen, keep_blocks=False)
    look, seen = watched(view, lambda record: re.search(r"step (\d+/\d+)", screen.screen)[1])
    with view:
        dgemma.edit(model, torch.tensor([ids[:40]]), noise_level=0.3, steps=10, stop=None, on_step=look)
    assert seen == ["1/3", "2/3", "3/3"]


def test_the_view_replaces_the_progress_bar(monkeypatch):
    asked = []
    spine = sys.modules["dgemma.run.generate"]

    def bar(*, show, **options):
        asked.append(show)
        return progress_bar(show=False, **options)

    monkeypatch.setattr(spine, "progress_bar", bar)
    view = LiveView(dgemma.ByteTokenizer(), file=io.StringIO())
    run(view)
    run(view, on_step=lambda record: None)
    assert asked == [False, True]


def test_after_the_terminal_becomes_narrower_wrapped_lines_are_overwritten(monkeypatch):
    screen = Terminal()
    drawn = Screen(screen)
    drawn.draw([[Ink("x" * 60)], [Ink("end")]])
    monkeypatch.setenv("COLUMNS", "30")
    screen.raw = ""
    screen.y, screen.rows = 2, [["x"] * 30, ["x"] * 30, list("end")]  # as the terminal wrapped it
    drawn.draw([[Ink("new")]])
    assert screen.screen == "new"


def shown(wrap, inks, columns):
    return ["".join(ink.text for ink in line) for line in wrap(inks, columns)]


def test_words_are_not_broken_if_they_fit_a_line():
    assert shown(Wrap(), [Ink("to be or not")], 6) == ["to be", "or not"]
    assert shown(Wrap(), [Ink("a\n\nb")], 6) == ["a", "", "b"]
    assert shown(Wrap(), [Ink("abcdefgh ij")], 3) == ["abc", "def", "gh", "ij"]
    assert shown(Wrap(), [Ink("end"), *[Ink("░", loose=True)] * 4], 5) == ["end░░", "░░"]
    assert shown(Wrap(), [Ink("spl"), Ink("it up", "1")], 6) == ["split", "up"]


def test_words_stay_on_their_lines_while_others_change_their_length():
    def frame(*words):
        return shown(wrap, [Ink(f" {word}" if i else word) for i, word in enumerate(words)], 12)

    wrap = Wrap()
    assert frame("aaaa", "bbbb", "cccc", "dddd", "eeee") == ["aaaa bbbb", "cccc dddd", "eeee"]
    assert frame("aa", "bb", "cccc", "dddd", "eeee") == ["aa bb", "cccc dddd", "eeee"]  # there is room for cccc above
    assert frame("aa", "bbbbbbbbbb", "cccc", "d", "eeee") == ["aa", "bbbbbbbbbb", "cccc d", "eeee"]
    assert shown(wrap, [Ink("aa"), Ink(" bb"), Ink("cc"), Ink(" d")], 12) == ["aa", "bbcc d"]  # no break inside bbcc


def test_every_frame_keeps_all_words_within_the_columns():
    generator = random.Random(0)
    wrap = Wrap()
    for _ in range(300):
        words = [generator.choice(["", " "]) + "x" * generator.randint(1, 6) for _ in range(20)]
        lines = shown(wrap, [Ink(word, loose=generator.random() < 0.2) for word in words], 13)
        assert "".join("".join(lines).split()) == "".join("".join(words).split())
        assert max(map(len, lines)) <= 13


def test_a_board_shows_clues_and_digits_in_their_places():
    screen = Terminal()
    with BoardView(file=screen, leave=True) as view:
        _, solution = record_board(on_step=view)
    board = screen.screen.split("\n")
    assert board[1] == "│ 1 2 3 │ 4 5 6 │ 7 8 9 │"
    assert "".join(d for line in board for d in line if d.isdigit() and "│" in line) == solution
    assert len(board) == 14
    assert "1" in screen.styles


def test_a_narrow_encoding_gets_replacements_and_no_error():
    screen = Terminal()
    screen.encoding = "ascii"
    run(LiveView(dgemma.ByteTokenizer(), file=screen, leave=True), "naïve text", canvas_len=16)
    assert "na?ve text" in screen.screen
