"""The symmetries of Sudoku: relabelled digits, permuted rows, columns, bands and stacks, the transpose.

1,218,998,108,160 (9! · 2 · 6⁸) transformations take a puzzle to an equivalent one. `equivalents` applies them to
batches in torch, on any device. Equivalent grids have the same `class_keys`, which decide the split.
"""

import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dgemma.checks import require, typed
from dgemma.data.sudoku.solver import read_board

NUM_UNIFORMS = 34  # uniforms per random transformation


@typed
def equivalents(digits: Tensor, u: Tensor) -> Tensor:
    """Transform puzzles or grids randomly: digits (B, ..., 81), u (B, 34) uniforms in [0, 1) → digits, same shape.

    Everything in a row, such as a puzzle and its solution, is transformed in the same way. 0 stays 0.

    Example: `puzzle, solution = equivalents(torch.stack([puzzle, solution], 1), torch.rand(1, 34)).unbind(1)`.
    """
    fits = u.shape == (digits.shape[0], NUM_UNIFORMS)
    require(fits, "equivalents u", f"have shape ({digits.shape[0]}, {NUM_UNIFORMS})", u)
    source, labels = _read_moves(u)
    rest = digits.shape[1:-1]
    spread = (-1, *[1] * len(rest))
    moved = digits.gather(-1, source.view(*spread, 81).expand(-1, *rest, 81))
    relabelled = labels.view(*spread, 10).expand(-1, *rest, 10).gather(-1, moved.long())
    return relabelled.to(digits.dtype)


@typed
def originals(digits: Tensor, u: Tensor) -> Tensor:
    """Invert `equivalents`: digits (B, 81) that were transformed by u (B, 34) → (B, 81).

    Example: `originals(equivalents(grid, u), u)` is `grid`.
    """
    source, labels = _read_moves(u)
    relabelled = labels.argsort(1).gather(1, digits.long()).to(digits.dtype)
    return torch.empty_like(digits).scatter(1, source, relabelled)


def _read_moves(u: Tensor) -> tuple[Tensor, Tensor]:
    """Return the source cell of each cell, (B, 81), and the new label of each digit, (B, 10), for uniforms (B, 34)."""
    label_u, row_u, column_u, flip_u = u.split([9, 12, 12, 1], dim=1)
    rows, columns = _line_order(row_u), _line_order(column_u)  # (B, 9)
    source = rows[:, :, None] * 9 + columns[:, None, :]  # (B, 9, 9)
    source = torch.where(flip_u[:, :, None] < 0.5, source, source.transpose(1, 2)).flatten(1)
    return source, torch.nn.functional.pad(label_u.argsort(1) + 1, (1, 0))  # a blank stays a blank


def _line_order(u: Tensor) -> Tensor:
    """Return nine rows in random order, with bands kept together: u (B, 12) → (B, 9)."""
    bands = u[:, :3].argsort(1)  # (B, 3)
    within = u[:, 3:].unflatten(1, (3, 3)).argsort(2)  # (B, 3, 3)
    return (bands[:, :, None] * 3 + within).flatten(1)


def class_keys(grids: NDArray[Any]) -> NDArray[np.int64]:
    """Return a key (N,) per full grid (N, 81) that is equal for equivalent grids.

    Two rows of a band define a permutation of the digits. Its cycle lengths do not depend on digit labels or on the
    order of columns. The key holds the sorted cycle lengths of all 18 such pairs of rows and of columns.
    Different keys prove that two grids are not equivalent; equal keys prove nothing.
    """
    square = read_board("class_keys grids", grids).reshape(-1, 9, 9) - 1
    require(square.min(initial=0) >= 0, "class_keys grids", "have no blanks", grids, "`solve` fills them.")
    by_rows, by_columns = _lines_key(square), _lines_key(square.transpose(0, 2, 1))
    low, high = np.minimum(by_rows, by_columns), np.maximum(by_rows, by_columns)  # the transpose swaps them
    return low << 31 | high


def _lines_key(square: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the cycle types of pairs of rows, sorted within each band, with bands sorted: (N, 9, 9) → (N,)."""
    bands = []
    for first in (0, 3, 6):
        pairs = itertools.combinations(range(first, first + 3), 2)
        types = np.sort(np.stack([_cycle_type(square[:, a], square[:, b]) for a, b in pairs], axis=1), axis=1)
        bands.append(types @ np.array([64, 8, 1]))
    return np.sort(np.stack(bands, axis=1), axis=1) @ np.array([1 << 18, 1 << 9, 1])


# Two rows of a band differ in every column, so no cycle has length 1. That leaves eight partitions of 9.
_PARTITIONS = ((9,), (2, 7), (3, 6), (4, 5), (2, 2, 5), (2, 3, 4), (3, 3, 3), (2, 2, 2, 3))


def _cycle_type(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the cycle structure, one of eight, of the permutation a → b: two (N, 9) → (N,)."""
    step = np.empty_like(a)
    np.put_along_axis(step, a, b, axis=1)
    digest = np.zeros(a.shape[0], dtype=np.int64)  # how many elements lie on cycles of each length, in base 16
    unseen = np.ones_like(a, dtype=np.bool_)
    now = np.arange(9)[None].repeat(a.shape[0], 0)
    for length in range(1, 10):
        now = np.take_along_axis(step, now, axis=1)
        closed = unseen & (now == np.arange(9))
        digest += closed.sum(1) * 16**length
        unseen &= ~closed
    names = np.array([sum(length * 16**length for length in parts) for parts in _PARTITIONS])
    order = names.argsort()
    return order[np.searchsorted(names[order], digest)]
