"""`dgemma sudoku`: solve a puzzle, or make one and watch it solved."""

import argparse
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dgemma.cli import options, output
from dgemma.data import sudoku
from dgemma.sampling import EntropyBound, StableAndConfident
from dgemma.view.terminal import BoardView

_BLANKS = ".0_*"


def add_commands(commands: Any) -> None:
    """Put the command on the parser."""
    parser = commands.add_parser(
        "sudoku",
        help="solve a Sudoku and watch the board fill",
        description="Solve a Sudoku by diffusion: all cells at once, the surest first. The answer is checked against "
        "the rules, and says so when it is wrong.",
        epilog="example: dgemma sudoku "
        "530070000600195000098000060800060003400803001700020006060000280000419005000080079",
    )
    parser.add_argument(
        "puzzle", nargs="*", help="81 characters, 0 . _ or * for a blank; left out: a new puzzle is made"
    )
    parser.add_argument("--givens", type=int, default=30, metavar="N", help="clues of a new puzzle (%(default)s)")
    parser.add_argument("--write-clues", action="store_true", help="let the model write the clues, too, unpinned")
    options.add_model_options(parser, default="dgemma/sudoku")
    parser.add_argument("--noise", choices=("mask", "uniform"), default="mask", help="(%(default)s)")
    parser.add_argument("--sampler", metavar="NAME[:FIELD=VALUE,…]", help="as for generate (entropy-bound, greedy)")
    parser.add_argument("--steps", type=int, default=48, metavar="N", help="at most (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of the new puzzle and of the draws (%(default)s)"
    )
    output.add_view_options(parser)
    parser.set_defaults(run=_sudoku)


def _sudoku(arguments: argparse.Namespace) -> None:
    puzzles = _read_puzzle(arguments)
    known = sudoku.solve(puzzles)
    if known.counts[0] == 0:
        raise ValueError("this puzzle has no solution: its clues contradict each other.")
    _, denoiser = options.load_denoiser(arguments)
    sampler = options.read_sampler(arguments.sampler) if arguments.sampler else EntropyBound(bound=0.1, greedy=True)
    shows = output.somebody_looks(arguments)
    with BoardView(givens=puzzles[0].tolist(), leave=True) if shows else nullcontext() as view:
        solved = sudoku.complete(
            denoiser,
            puzzles,
            keep_clues=not arguments.write_clues,
            noise=sudoku.sudoku_noise(arguments.noise),
            sampler=sampler,
            steps=arguments.steps,
            stop=StableAndConfident(),
            temperature=1.0,
            seed=arguments.seed,
            on_step=view,
            record=bool(arguments.html or arguments.gif),
        )
    output.write_pictures(arguments, solved.generation.trajectory)
    grid = solved.grids[0].cpu().numpy().astype(puzzles.dtype)
    keeps_clues = bool(((grid == puzzles[0]) | (puzzles[0] == 0)).all())
    is_right = keeps_clues and bool((grid > 0).all()) and sudoku.solve(grid[None]).counts[0] == 1
    num_steps = int(solved.steps[0])
    (given,), (answer,) = sudoku.to_text(puzzles), sudoku.to_text(grid[None])
    if arguments.json:
        output.print_json(puzzle=given, solution=answer, right=is_right, steps=num_steps)
        return
    if not shows:  # else the board stands there
        print(answer)
    several = "" if known.counts[0] == 1 else " (the puzzle has more than one solution)"
    verdict = "Solved" if is_right else "Wrong: the answer breaks a rule"
    print(f"{verdict}, in {num_steps} steps, {int((puzzles == 0).sum())} blanks{several}.", file=sys.stderr)


def _read_puzzle(arguments: argparse.Namespace) -> NDArray[np.int8]:
    """The puzzle given, or a new one from grids that no checkpoint of ours was trained on; (1, 81)."""
    text = "".join("".join(arguments.puzzle).split())
    if text == "-":
        text = "".join(sys.stdin.read().split())
    if text:
        return sudoku.parse(text.translate(str.maketrans(_BLANKS, "0" * len(_BLANKS))))
    return sudoku.generate_puzzles(1, givens=arguments.givens, split="test", seed=arguments.seed).puzzles
