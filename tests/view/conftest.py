"""One recorded run for all tests of the pictures, and a browser where there is one."""

import pytest

from view.browser import Browser, find_browser
from view.converging import record, record_board


@pytest.fixture(scope="session")
def recorded():
    """Two rows, two blocks, a text that ends inside the second."""
    return record(
        rows=2, canvas_len=64, text="Noise first, then sense: a text is found, not written from left to right."
    )


@pytest.fixture(scope="session")
def board():
    """A Sudoku of which the first four cells are frozen, and its 81 digits."""
    return record_board()


@pytest.fixture(scope="module")
def browser():
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium or Chrome on this machine: apt-get install chromium")
    with Browser(executable) as browser:
        yield browser
