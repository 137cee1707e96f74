"""A Sudoku as a picture: a frame of box-drawing characters, where each cell stands in it, its tokens as digits."""

from collections.abc import Sequence

NUM_CELLS = 81
_RULE = "───────".join
_ROW = "│       │       │       │"
_BAND = [_ROW] * 3
LINES = [_RULE("┌┬┬┐"), *_BAND, _RULE("├┼┼┤"), *_BAND, _RULE("├┼┼┤"), *_BAND, _RULE("└┴┴┘")]  # 13 of 25 characters


class Board:
    """Given to `to_html` and `to_gif` as their tokenizer, it makes the picture a board: the canvas is its 81 cells.

    Example: `to_html(solved.generation.trajectory, "run.html", tokenizer=Board())` after `sudoku.complete(...)`.
    """

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Digits of tokens as `dgemma.data.sudoku` encodes them; nothing for those that are no cell."""
        from dgemma.data.sudoku.encoding import token_text  # which imports more than a text's picture needs

        return "".join(map(token_text, tokens))


def place_of(cell: int) -> tuple[int, int]:
    """The line and column of a cell among `LINES`.

    Example: `place_of(80)` is (11, 22).
    """
    y, x = divmod(cell, 9)
    return 1 + y + y // 3, 2 + 2 * x + 2 * (x // 3)
