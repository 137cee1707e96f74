"""Generation of Sudoku puzzles with one solution, divided into splits.

All grids equivalent to a base grid are in the same split. So no seed and no symmetry puts a test grid into the training
data.
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dgemma.checks import Words, at_least, at_most, require, typed
from dgemma.data.sudoku.solver import ANY_DIGIT, Digits, candidates, read_board, search
from dgemma.data.sudoku.symmetry import class_keys
from dgemma.files import read_text, write_text

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

_MOST_BYTES = 1 << 32  # limit for a file; a puzzle with its solution has 164 bytes
_CHUNK = 512  # puzzles per stream of random numbers, for any number of workers


@dataclass(frozen=True, kw_only=True)
class Puzzles:
    """N puzzles and their only solutions, (N, 81) digits row by row; 0 is a blank."""

    puzzles: Digits
    solutions: Digits

    def __len__(self) -> int:
        return len(self.puzzles)

    def __getitem__(self, rows: Any) -> "Puzzles":
        return Puzzles(puzzles=self.puzzles[rows], solutions=self.solutions[rows])

    @property
    def givens(self) -> NDArray[np.int64]:
        """The number of clues of each puzzle, (N,)."""
        return (self.puzzles > 0).sum(1)

    def save(self, path: str | Path) -> None:
        """Write one line per puzzle: its 81 digits, a space, its solution. The file is complete or absent.

        Example: `puzzles.save("test.txt")`.
        """
        lines = [f"{p} {s}" for p, s in zip(to_text(self.puzzles), to_text(self.solutions), strict=True)]
        write_text(path, "\n".join(lines) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Puzzles":
        """Read a file that `save` wrote."""
        pairs = [line.split() for line in read_text(path, most=_MOST_BYTES).splitlines()]
        are_pairs = bool(pairs) and all(len(pair) == 2 for pair in pairs)
        require(are_pairs, str(path), "have a puzzle, a space and its solution in each line", Words("other lines"))
        puzzles, solutions = zip(*pairs, strict=True)
        return cls(puzzles=parse(puzzles), solutions=parse(solutions))


@typed
def generate_puzzles(
    count: Annotated[int, at_least(1), at_most(2**31 - 1)],
    *,
    givens: int | tuple[int, int] = (24, 45),
    split: Split = "train",
    seed: Annotated[int, at_least(0)] = 0,
    exact: bool = True,
    workers: Annotated[int, at_least(1), at_most(1024)] = 1,
    folder: str | Path | None = None,
) -> Puzzles:
    """Return `count` puzzles with one solution, from grids of one split; the number of clues is uniform in `givens`.

    The same arguments give the same puzzles for any number of `workers` (processes). With `exact=False`, a puzzle may
    have more clues if none can be removed, which halves the work at 24 clues. With a `folder`, puzzles are cached in
    a file that is named after the arguments.

    Example: `generate_puzzles(1000, givens=(30, 45), split="test")`.
    """
    low, high = givens if isinstance(givens, tuple) else (givens, givens)
    fix = "With fewer clues random removal finds hardly any puzzle."
    require(23 <= low <= high <= 81, "generate_puzzles givens", "lie within 23 to 81, lowest first", givens, fix)
    file = None
    if folder is not None:
        file = Path(folder) / f"{split}-{low}-{high}{'' if exact else '-or-more'}-seed-{seed}-count-{count}.txt"
        if file.exists():
            return Puzzles.load(file)
    targets = low + np.arange(count) % (high - low + 1)
    chunks = np.split(targets, range(_CHUNK, count, _CHUNK))
    tasks = [(chunk, split, seed, number, exact) for number, chunk in enumerate(chunks)]
    if workers == 1 or len(tasks) == 1:
        parts = [_generate_chunk(*task) for task in tasks]
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            parts = list(pool.map(_generate_chunk, *zip(*tasks, strict=True)))
    puzzles = Puzzles(
        puzzles=np.concatenate([part.puzzles for part in parts]),
        solutions=np.concatenate([part.solutions for part in parts]),
    )
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        puzzles.save(file)
    return puzzles


def _generate_chunk(targets: NDArray[np.int64], split: Split, seed: int, number: int, exact: bool) -> Puzzles:
    rng = np.random.default_rng([seed, SPLITS.index(split), number])
    targets = rng.permutation(targets)
    result = Puzzles(puzzles=np.zeros((len(targets), 81), np.int8), solutions=np.zeros((len(targets), 81), np.int8))
    missing = np.arange(len(targets))
    while missing.size:
        fresh = dig(rng, _split_grids(rng, missing.size, split), targets[missing])
        good = (fresh.givens == targets[missing]) | (not exact)
        result.puzzles[missing[good]], result.solutions[missing[good]] = fresh.puzzles[good], fresh.solutions[good]
        missing = missing[~good]
    return result


def _split_grids(rng: np.random.Generator, count: int, split: Split) -> Digits:
    parts: list[Digits] = []
    while sum(map(len, parts)) < count:
        grids = full_grids(rng, max(count, 64))
        parts.append(grids[split_of(grids) == SPLITS.index(split)])
    return np.concatenate(parts)[:count]


def full_grids(rng: np.random.Generator, count: int) -> Digits:
    """Return random full grids (count, 81): random boxes on the diagonal, the rest by randomised search."""
    bits = np.full((count, 3, 3, 3, 3), ANY_DIGIT)
    for box in range(3):
        digits = rng.random((count, 9)).argsort(1).astype(np.uint16)
        bits[:, box, :, box, :] = (np.uint16(1) << digits).reshape(count, 3, 3)
    return search(bits.reshape(count, 81), limit=1, rng=rng).grids


def dig(rng: np.random.Generator, grids: Digits, givens: NDArray[Any] | int) -> Puzzles:
    """Remove clues in random order while the solution stays unique, down to `givens` (N,) if possible.

    A clue can be removed if its cell admits no other digit. This is tested for all N grids at once.
    """
    num_grids = len(grids)
    order = rng.random((num_grids, 81)).argsort(1)
    is_clue = np.ones((num_grids, 81), dtype=np.bool_)
    for turn in range(81):
        (rows,) = np.nonzero(is_clue.sum(1) > givens)
        cell = order[rows, turn]
        bits = candidates(np.where(is_clue[rows], grids[rows], 0))
        bits[np.arange(rows.size), cell] = ANY_DIGIT ^ candidates(grids[rows, cell])
        unique = search(bits, limit=1).counts == 0
        is_clue[rows[unique], cell[unique]] = False
    return Puzzles(puzzles=np.where(is_clue, grids, np.int8(0)), solutions=grids)


def split_of(grids: NDArray[Any]) -> NDArray[np.int64]:
    """Return the split of full grids (N, 81), an index into SPLITS: 3/4 train, 1/8 validation, 1/8 test.

    Equivalent grids are always in the same split.
    """
    # A multiplicative hash (Knuth), because the low bits of the keys are not uniform.
    share = (class_keys(grids).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(61)
    train, validation, test = range(3)
    return np.select([share == 0, share == 1], [test, validation], train)


@typed
def parse(text: str | list[str] | tuple[str, ...]) -> Digits:
    """Return the digits (N, 81) of texts of 81 characters, 0 or . for a blank.

    Example: `parse("53..7...." + "." * 72)`.
    """
    lines = [text] if isinstance(text, str) else text
    for line in lines:
        require(len(line) == 81, "a puzzle", "have 81 characters", len(line))
        require(not set(line) - set("0123456789."), "a puzzle", "have digits, and 0 or . for a blank", line)
    joined = "".join(lines).replace(".", "0").encode()
    return (np.frombuffer(joined, dtype=np.uint8) - ord("0")).astype(np.int8).reshape(-1, 81)


def to_text(digits: Any) -> list[str]:
    """Return 81 characters per puzzle of digits (N, 81), 0 for a blank."""
    return ["".join(map(str, row)) for row in read_board("to_text digits", digits).tolist()]
