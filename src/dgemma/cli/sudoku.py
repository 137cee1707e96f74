"""`dgemma sudoku`: a board from noise, with a live view. Texts do without it, because it loads training."""

import argparse
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dgemma.cli import loading, output
from dgemma.data import sudoku
from dgemma.run.options import warn_of_noise
from dgemma.sampling import EntropyBound, StableAndConfident
from dgemma.view.board import Board
from dgemma.view.terminal import BoardView

_BLANKS = ".0_*"
_SOLVER = EntropyBound(bound=0.1, greedy=True)


def run_sudoku(arguments: argparse.Namespace) -> int:
    """Solve a puzzle; return 1 if the answer breaks a rule."""
    puzzles = _read_puzzle(arguments)
    solution = sudoku.solve(puzzles)
    if solution.counts[0] == 0:
        raise ValueError("The puzzle must have a solution, but its clues contradict each other.")
    denoiser = loading.load_denoiser(arguments)
    noise = sudoku.sudoku_noise(arguments.noise) if arguments.noise else None
    if noise is not None:
        warn_of_noise(denoiser, noise)  # now, before the live view starts
    is_watched = output.is_watched(arguments)
    settings: dict[str, Any] = {
        "keep_clues": not arguments.write_clues,
        "noise": noise,
        "sampler": arguments.sampler or _SOLVER,
        "steps": arguments.steps,
        "stop": StableAndConfident(),
        "temperature": 1.0,
        "seed": arguments.seed,
        "record": output.is_recorded(arguments),
        "progress": not arguments.quiet,
    }
    with BoardView(givens=puzzles[0].tolist(), leave=True) if is_watched else nullcontext() as view:
        completion = sudoku.complete(denoiser, puzzles, on_step=view, **settings)
    is_shown = view is not None and view.has_room and sys.stdout.isatty()
    runs = [completion.generation]
    while not bool(completion.solved[0]) and len(runs) <= arguments.retry:
        with BoardView() if is_watched else nullcontext() as view:
            completion = sudoku.retry(denoiser, completion, moves_seed=len(runs), on_step=view, **settings)
        runs.append(completion.generation)
    output.write_pictures(arguments, Board(), *(run.recorded for run in runs))
    is_right, num_steps = bool(completion.solved[0]), int(completion.steps[0])
    (puzzle,), (answer,) = sudoku.to_text(puzzles), sudoku.to_text(completion.grids)
    if arguments.json:
        result = {"puzzle": puzzle, "solution": answer, "right": is_right, "steps": num_steps, "attempts": len(runs)}
        output.print_json(result)
        return 0 if is_right else 1
    if not is_shown and not arguments.puzzle:
        print(puzzle)
    if not is_shown or len(runs) > 1:  # otherwise the board shows it
        print(answer)
    verdict = "Solved" if is_right else "Wrong: the answer breaks a rule"
    steps, blanks = output.counted(num_steps, "step"), output.counted(int((puzzles == 0).sum()), "blank")
    attempts = f" and {len(runs)} attempts" if len(runs) > 1 else ""
    several = "" if solution.counts[0] == 1 else " The puzzle has more than one solution."
    hint = "" if is_right or arguments.retry else " --retry 3 would try again."
    print(f"{verdict}, in {steps}{attempts}, {blanks}.{several}{hint}", file=sys.stderr)
    return 0 if is_right else 1


def _read_puzzle(arguments: argparse.Namespace) -> NDArray[np.int8]:
    """Return the puzzle (1, 81), or a new one from grids that no checkpoint of dgemma was trained on."""
    if not arguments.puzzle:
        return sudoku.generate_puzzles(1, givens=arguments.givens, split="test", seed=arguments.seed).puzzles
    text = loading.read_input() if arguments.puzzle == ["-"] else "".join(arguments.puzzle)
    return sudoku.parse("".join(text.split()).translate(str.maketrans(_BLANKS, "0" * len(_BLANKS))))
