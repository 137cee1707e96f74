"""The GIF loops, pauses at its end, is of limited size, and lays out words correctly."""

import numpy as np
import pytest

from dgemma.view import Board, to_gif
from dgemma.view.gif import Place, lay_out
from view.converging import Words, record

Image = pytest.importorskip("PIL.Image")


def frames_of(path):
    image = Image.open(path)
    pictures, durations = [], []
    for index in range(image.n_frames):
        image.seek(index)
        pictures.append(np.asarray(image.convert("RGB")).astype(int))
        durations.append(image.info["duration"])
    return image, pictures, durations


def test_the_animation_has_one_frame_per_step_loops_and_holds_its_end(recorded, tmp_path):
    out, tokenizer = recorded
    to_gif(out.trajectory, tmp_path / "run.gif", tokenizer=tokenizer)
    image, pictures, durations = frames_of(tmp_path / "run.gif")
    assert image.info["loop"] == 0
    assert len(pictures) == int(out.steps[0].sum()) + 3  # two blocks' noise, and the finished text
    assert len(set(durations[:-1])) == 1
    assert 110 <= durations[0] <= 600
    assert durations[-1] > 2000
    assert max(image.size) < 1000
    assert (tmp_path / "run.gif").stat().st_size < 1_000_000

    def violet(picture):  # the least certain colour
        return (np.abs(picture - [0x8F, 0x66, 0xC9]).sum(-1) < 40).sum()

    assert violet(pictures[0]) > 500
    assert violet(pictures[-1]) == 0


def test_a_long_text_scrolls_within_max_lines(tmp_path):
    tokenizer = Words([f" w{i}" for i in range(60)])
    text = "".join(f" w{i % 60}" for i in range(256))
    out, _ = record(text, tokenizer=tokenizer, canvas_len=256, steps=6, stop=None)
    to_gif(out.trajectory, tmp_path / "run.gif", tokenizer=tokenizer, columns=40, max_lines=8)
    image, _, _ = frames_of(tmp_path / "run.gif")
    assert image.height < 350  # eight lines of 28 pixels, a footer and margins; the whole text has 26 lines


def test_the_prompt_is_drawn_before_the_text_in_every_frame(tmp_path):
    tokenizer = Words(["What", " is", " it", "?", " Noise"])
    out, _ = record("What is it? Noise", tokenizer=tokenizer, canvas_len=8)  # its prompt is "What is it"
    to_gif(out.trajectory, tmp_path / "run.gif", tokenizer=tokenizer, columns=48)
    _, pictures, _ = frames_of(tmp_path / "run.gif")
    margin, cell = 36, 11  # for a font of 18 pixels
    prompt = [picture[margin : margin + 28, margin : margin + 10 * cell] for picture in pictures]
    assert all((picture == prompt[0]).all() for picture in prompt)
    assert (np.abs(prompt[0] - [0x7D, 0x7A, 0x88]).sum(-1) < 40).sum() > 20, "soft ink"


def test_a_sudoku_is_drawn_as_a_board_with_coloured_clues(board, tmp_path):
    out, _ = board
    to_gif(out.trajectory, tmp_path / "run.gif", tokenizer=Board())
    image, pictures, _ = frames_of(tmp_path / "run.gif")
    margin, cell, line = 36, 11, 28
    assert image.size == (25 * cell + 2 * margin, 14 * line + 2 * margin)

    def cells_in(colour):
        """Return the cells, of 81, that contain a colour."""
        inked = np.abs(pictures[-1] - colour).sum(-1) < 60
        places = [(1 + y + y // 3, 2 * x + 2 + 2 * (x // 3)) for y in range(9) for x in range(9)]
        tiles = [(margin + row * line, margin + column * cell) for row, column in places]
        return [i for i, (top, left) in enumerate(tiles) if inked[top : top + line, left : left + cell].sum() > 5]

    assert cells_in([0x82, 0xB4, 0xFF]) == [0, 1, 2, 3]
    assert cells_in([0xF5, 0xF1, 0xE8]) == list(range(4, 81))
    with pytest.raises(ValueError, match=r"to_gif trajectory must have one canvas of 81 tokens for a Board"):
        to_gif(record("short", canvas_len=8)[0].trajectory, tmp_path / "other.gif", tokenizer=Board())
    with pytest.raises(ValueError, match=r"to_gif path must end in \.gif, got 'run\.png'"):
        to_gif(out.trajectory, tmp_path / "run.png")


def test_words_stay_whole_and_lines_do_not_begin_with_space():
    assert lay_out(["to", " be"], 8) == [Place(0, 0, 2), Place(0, 3, 2)]
    assert lay_out(["to", " be"], 4) == [Place(0, 0, 2), Place(1, 0, 2)]
    assert lay_out(list("to be"), 4) == [Place(0, 0, 1), Place(0, 1, 1), Place(0, 2, 1), Place(1, 0, 1), Place(1, 1, 1)]
    assert lay_out(["a", "\n\n", "b"], 9) == [Place(0, 0, 1), Place(0, 1, 2), Place(2, 0, 1)]
    assert lay_out(["17", "4"], 9, spaced=True) == [Place(0, 0, 2), Place(0, 3, 1)]
    assert lay_out(["語", "", "!"], 9) == [Place(0, 0, 2), Place(0, 2, 0), Place(0, 2, 1)]
