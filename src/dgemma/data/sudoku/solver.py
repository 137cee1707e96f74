"""Solver for thousands of Sudokus at once: constraint propagation on bit masks and depth-first search, in NumPy.

Puzzles are (N, 81) digits, row by row, 0 for a blank. Internally a cell is nine bits, one per digit that is still
possible. The N puzzles lie along the last axis, so that every operation reads contiguous memory.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dgemma.checks import Count, has_values, in_range, require, typed

Digits = NDArray[np.int8]  # (N, 81), 0 for a blank
Cells = NDArray[np.uint16]  # (3, 3, 3, 3, M): band, row in it, stack, column in it, puzzle

ANY_DIGIT = np.uint16(0b111_111_111)
_WIDTH = 2048  # search nodes propagated together, so that they fit into the cache


class Solutions(NamedTuple):
    """grids (N, 81): one solution per puzzle, or zeros. counts (N,): number of solutions up to the limit."""

    grids: Digits
    counts: NDArray[np.int64]


@typed
def solve(puzzles: Any, *, limit: Count = 2) -> Solutions:
    """Solve puzzles (N, 81) and count solutions up to `limit`; 2 suffices to test uniqueness.

    Example: `solve(parse("53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79")).counts`
    is `[1]`.
    """
    return search(candidates(read_board("solve puzzles", puzzles)), limit=limit)


def read_board(name: str, digits: Any) -> NDArray[Any]:
    """Return digits 0 to 9 of shape (N, 81) as an array."""
    read = read_digits(name, digits)
    require(read.dim() == 2, name, "be (N, 81) digits, 1 to 9 and 0 for a blank", digits, "See `parse`.")
    return read.cpu().numpy()


def read_digits(name: str, digits: Any) -> Tensor:
    """Return digits 0 to 9, in a tensor, array or list of shape (..., 81), as an int64 tensor."""
    try:
        read = torch.as_tensor(digits)
    except (TypeError, ValueError, RuntimeError):
        read = torch.empty(0)
    is_int = not (read.is_floating_point() or read.is_complex()) and read.dtype != torch.bool
    is_board = read.dim() >= 1 and read.shape[-1] == 81 and has_values(read)
    require(is_int and is_board and in_range(read, 10), name, "be digits of shape (..., 81)", digits)
    return read.long()


def candidates(digits: NDArray[Any]) -> NDArray[np.uint16]:
    """Return digits (N, 81) as bits (N, 81): one bit for a clue, nine for a blank."""
    bits = np.array([ANY_DIGIT, *(1 << d for d in range(9))], dtype=np.uint16)
    return bits[digits]


def search(
    bits: NDArray[np.uint16], *, limit: int, rng: np.random.Generator | None = None, width: int = _WIDTH
) -> Solutions:
    """Search solutions within candidate bits (N, 81), up to `limit` each; `rng` randomises the order of digits."""
    num_puzzles = bits.shape[0]
    grids = np.zeros((num_puzzles, 81), dtype=np.int8)
    counts = np.zeros(num_puzzles, dtype=np.int64)
    nodes, owners = np.ascontiguousarray(bits.T).reshape(3, 3, 3, 3, num_puzzles), np.arange(num_puzzles)
    while owners.size:
        # The newest `width` nodes first: depth-first search keeps the stack short.
        nodes, cells = nodes[..., :-width], nodes[..., -width:]
        owners, who = owners[:-width], owners[-width:]
        wanted = counts[who] < limit
        cells, who = np.ascontiguousarray(cells[..., wanted]), who[wanted]
        alive = propagate(cells)
        cells, who = cells[..., alive], who[alive]
        open_cells = (cells & (cells - 1)) != 0
        solved = ~open_cells.any((0, 1, 2, 3))
        grids[who[solved]] = (np.bitwise_count(cells[..., solved] - 1) + 1).reshape(81, -1).T  # the digit of one bit
        np.add.at(counts, who[solved], 1)
        children, parents = _branch(cells[..., ~solved], rng)
        nodes = np.concatenate((nodes, children), axis=-1)
        owners = np.concatenate((owners, who[~solved][parents]))
    return Solutions(grids, np.minimum(counts, limit))


def propagate(cells: Cells) -> NDArray[np.bool_]:
    """Apply naked and hidden singles in place; return (M,) False where a contradiction was found.

    A naked single is a cell with one possible digit, which is removed from its row, column and box. A hidden single is
    a digit with one possible cell in a row, column or box.
    """
    alive = np.ones(cells.shape[-1], dtype=np.bool_)
    active = np.arange(cells.shape[-1])
    while active.size:
        before = cells[..., active]
        after, consistent = _sweep(before)
        cells[..., active] = after
        alive[active] = consistent
        active = active[consistent & (after != before).any((0, 1, 2, 3))]
    return alive


def _sweep(cells: Cells) -> tuple[Cells, NDArray[np.bool_]]:
    single = np.where(cells & (cells - 1), np.uint16(0), cells)
    consistent = np.ones(cells.shape[-1], dtype=np.bool_)
    taken: Any = np.uint16(0)
    for once, twice in _tally(single):
        consistent &= ~twice.any(tuple(range(4)))  # a digit written twice in one unit
        taken = taken | once
    cells = np.where(single, single, cells & ~taken)
    lonely: Any = np.uint16(0)
    for once, twice in _tally(cells):
        consistent &= (once == ANY_DIGIT).all(tuple(range(4)))  # a digit without a place
        lonely = lonely | (once & ~twice)
    hidden = cells & lonely
    return np.where(hidden, hidden, cells), consistent


def _tally(cells: Cells) -> Iterator[tuple[Cells, Cells]]:
    """Yield the bits seen at least once and at least twice in rows, columns and boxes, broadcastable to the cells."""
    pairs = [(i, j) for i in range(3) for j in range(3)]
    row, column, box = (
        [cells[:, :, s, c] for s, c in pairs],
        [cells[b, r] for b, r in pairs],
        [cells[:, r, :, c] for r, c in pairs],
    )
    for members, spread in (
        (row, np.s_[:, :, None, None]),
        (column, np.s_[None, None]),
        (box, np.s_[:, None, :, None]),
    ):
        once, twice = members[0].copy(), np.zeros_like(members[0])
        for member in members[1:]:
            twice |= once & member
            once |= member
        yield once[spread], twice[spread]


def _branch(cells: Cells, rng: np.random.Generator | None) -> tuple[Cells, NDArray[np.int64]]:
    """Branch on the open cell with the fewest digits: (…, M) → children (…, M') and the parent of each (M',)."""
    flat = cells.reshape(81, -1)
    num_digits = np.bitwise_count(flat)
    num_digits[num_digits == 1] = 10
    cell = num_digits.argmin(0)
    parent = np.arange(flat.shape[1])
    bits = flat[cell, parent]
    order = np.arange(9)[:, None] if rng is None else rng.random((9, parent.size)).argsort(0)
    digit = np.uint16(1) << order.astype(np.uint16) & bits  # (9, M)
    # Nodes are searched from the end of the list. It ends with one child of each parent, the one to try first, so that
    # all puzzles advance together.
    rank = np.cumsum(digit != 0, axis=0)
    which, owner = np.nonzero(digit)
    newest_last = np.argsort(-rank[which, owner], kind="stable")
    which, owner = which[newest_last], owner[newest_last]
    children = flat[:, owner]
    children[cell[owner], np.arange(owner.size)] = digit[which, owner]
    return children.reshape(3, 3, 3, 3, -1), owner
