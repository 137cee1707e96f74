"""A Sudoku board as text: its frame, the place of each cell, and the digits of tokens."""

from collections.abc import Sequence

NUM_CELLS = 81
_RULE = "───────".join
_BAND = ["│       │       │       │"] * 3
# 13 lines of 25 characters
LINES = [_RULE("┌┬┬┐"), *_BAND, _RULE("├┼┼┤"), *_BAND, _RULE("├┼┼┤"), *_BAND, _RULE("└┴┴┘")]


class Board:
    """Tokenizer for `to_html` and `to_gif` that draws a canvas of 81 cells as a Sudoku board.

    Example: `to_html(solved.generation.trajectory, "run.html", tokenizer=Board())` after `sudoku.complete(...)`.
    """

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the digits of tokens that `dgemma.data.sudoku` encodes; other tokens give an empty text."""
        from dgemma.data.sudoku.encoding import token_text  # not needed for texts

        return "".join(map(token_text, tokens))


def place_of(cell: int) -> tuple[int, int]:
    """Return the line and column of a cell in `LINES`."""
    y, x = divmod(cell, 9)
    return 1 + y + y // 3, 2 + 2 * x + 2 * (x // 3)
