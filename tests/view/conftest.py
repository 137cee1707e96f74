"""One recorded run for all tests of the pictures, and a browser where there is one."""

import pytest
import torch

import dgemma
from dgemma.data import sudoku
from view.browser import Browser, find_browser
from view.converging import Converging, record


@pytest.fixture(scope="session")
def recorded():
    """Two rows, two blocks, a text that ends inside the second."""
    return record(
        rows=2, canvas_len=64, text="Noise first, then sense: a text is found, not written from left to right."
    )


@pytest.fixture(scope="session")
def board():
    """A Sudoku of which the first four cells are frozen, and its 81 digits."""
    digits = [(3 * (y % 3) + y // 3 + x) % 9 + 1 for y in range(9) for x in range(9)]
    canvas = sudoku.canvas_tokens([digits])
    frozen = torch.arange(81)[None] < 4
    model = Converging(canvas[0], sudoku.NUM_CELLS, vocab_size=sudoku.VOCAB_SIZE)
    out = dgemma.generate(
        model,
        sudoku.prompt_tokens(torch.tensor([digits]) * frozen + 4 * (torch.arange(81) == 9)),
        canvas=torch.where(frozen, canvas, -1),
        frozen=frozen,
        noise=sudoku.sudoku_noise("mask"),
        sampler=dgemma.EntropyBound(bound=0.5),
        temperature=1.0,
        allowed=list(sudoku.DIGIT_TOKENS),
        max_new_tokens=81,
        record=True,
    )
    return out, "".join(map(str, digits))


@pytest.fixture(scope="module")
def browser():
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium or Chrome on this machine: apt-get install chromium")
    with Browser(executable) as browser:
        yield browser
