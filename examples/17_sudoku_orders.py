"""Compare orders of filling a Sudoku: the share of solved grids by number of steps, for one solver and many samplers.

Some samplers fill cells at random, by confidence, or by the margin between the two best digits, in a fixed number of
steps. Others use an entropy bound to decide how many cells to fill at once, until the grid no longer changes. The last
rows count the grids that are solved after retries. The second command made the figures for mask noise in docs/sudoku.md
on one GPU. The third is for a solver that you trained with 10_train_sudoku.py. On a GPU, the second command takes about
70 seconds for each of the two kinds of puzzles. On a CPU, the first command takes about a minute, and the others take
hours.

    python examples/17_sudoku_orders.py                       16 puzzles of each kind, one setting of each order
    python examples/17_sudoku_orders.py --num-tests 1000 --max-steps 81 --out runs/orders
    python examples/17_sudoku_orders.py --num-tests 1000 --max-steps 81 --model runs/uniform/checkpoint
"""

import argparse
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import dgemma
from dgemma.data import sudoku
from dgemma.sampling import Ancestral, BlockRefinement, Confidence, EntropyBound, StableAndConfident

KINDS = {"30-45 givens": (30, 45), "24-29 givens": (24, 29)}
STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 81)
BOUNDS = (0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 4.0)  # nats
CONFIDENT = (0.8, 0.95, 0.99)
RETRIES = 3


def until_stable(max_steps: int | None) -> dict[str, Any]:
    return {"steps": min(48, max_steps or 48), "stop": StableAndConfident()}


def list_settings(kind: str, max_steps: int | None) -> dict[str, dict[str, Any]]:
    """Return options of `sudoku.complete` by order and setting. Without `max_steps`, each order has one setting."""
    numbers = (6,) if max_steps is None else tuple(n for n in STEPS if n <= max_steps)
    bounds, sure = ((0.1,), (0.95,)) if max_steps is None else (BOUNDS, CONFIDENT)
    adaptive = until_stable(max_steps)

    def by_steps(sampler: Any) -> dict[str, Any]:
        return {f"{n} steps": {"sampler": sampler, "steps": n, "stop": None} for n in numbers}

    def by_bound(**more: Any) -> dict[str, Any]:
        return {f"{b} nats": {"sampler": EntropyBound(bound=b, greedy=True, **more), **adaptive} for b in bounds}

    if kind == "mask":
        settings = {
            order: by_steps(Confidence(order=order, greedy=True)) for order in ("random", "confidence", "margin")
        }
    else:  # `Confidence` is for mask noise only
        settings = {"random": by_steps(Ancestral()), "confidence": by_steps(BlockRefinement(tau=1.0, greedy=True))}
        settings["confident"] = {str(p): {"sampler": BlockRefinement(tau=p, greedy=True), **adaptive} for p in sure}
        settings["margin"] = by_bound(order="margin")
    settings["entropy"] = by_bound()
    settings["entropy, clues not frozen"] = {"0.1 nats": {**settings["entropy"]["0.1 nats"], "keep_clues": False}}
    return settings


def sudoku_task(model: dgemma.DiffusionGemma, tests: sudoku.Puzzles) -> Any:
    """Return a task for `sweep`. The task returns whether each grid is correct, and the run that wrote the grids."""
    solutions = torch.from_numpy(tests.solutions).to(model.device)

    def solve(options: dict[str, Any], seed: int) -> tuple[torch.Tensor, dgemma.Generation]:
        completion = sudoku.complete(model, tests.puzzles, temperature=1.0, seed=seed, progress=False, **options)
        return (completion.grids == solutions).all(1), completion.generation

    return solve


def list_orders(task: Any, orders: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the share of exact grids, its error and the mean steps of every setting of every order."""
    for order, settings in orders.items():
        for row in dgemma.sweep(task, settings, progress=False).rows:
            numbers = {"exact": row.quality, "error": row.error, "steps": row.forwards}
            yield {"order": order, "setting": row.label, **numbers}


def list_retries(
    model: dgemma.DiffusionGemma, tests: sudoku.Puzzles, max_steps: int | None
) -> Iterator[dict[str, Any]]:
    """Yield the share of exact grids, its error and the mean steps of all attempts, after 0, 1, 2, ... retries."""
    options = {"sampler": EntropyBound(bound=0.1, greedy=True), "temperature": 1.0, **until_stable(max_steps)}
    done = sudoku.complete(model, tests.puzzles, progress=False, **options)
    for attempt in range(RETRIES + 1):
        score = done.scores(tests.solutions)
        error = (score["exact"] * (1 - score["exact"]) / len(tests.puzzles)) ** 0.5
        setting = f"{attempt} times"
        yield {"order": "retry", "setting": setting, "exact": score["exact"], "error": error, "steps": score["steps"]}
        done = sudoku.retry(model, done, moves_seed=attempt, progress=False, **options)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot exact grids against steps: one colour per order, one line style per kind of puzzle."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(9, 4), layout="constrained").subplots()
    orders = list(dict.fromkeys(row["order"] for row in rows))
    for kind, dash in zip(KINDS, ("-", "--"), strict=True):
        for number, order in enumerate(orders):
            points = [row for row in rows if row["kind"] == kind and row["order"] == order]
            steps, exact = [row["steps"] for row in points], [100 * row["exact"] for row in points]
            axes.plot(steps, exact, f"{dash}o", color=f"C{number}", markersize=3.5, label=f"{order}, {kind}")
    axes.set(xlabel="mean steps", ylabel="exact grids, %", xscale="log", ylim=(0, 101))
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    axes.figure.savefig(path, dpi=110)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="dgemma/sudoku", help="the solver (%(default)s)")
parser.add_argument("--num-tests", type=int, default=16, help="puzzles of each kind (%(default)s)")
parser.add_argument(
    "--max-steps", type=int, help="try all settings with at most this many steps; default: one setting per order"
)
parser.add_argument("--puzzles", type=Path, help="folder for the puzzles")
parser.add_argument("--out", type=Path, help="folder for orders.json and steps.png")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()

dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
model = dgemma.DiffusionGemma.from_pretrained(args.model, dtype=dtype, device=args.device)
common = {"split": "test", "seed": 1, "folder": args.puzzles}
orders = list_settings(dgemma.learnt_noise(model).kind, args.max_steps)
rows = []
print(f"{'':52}{'exact':>8}{'± error':>9}{'steps':>7}")
for kind, givens in KINDS.items():
    tests = sudoku.generate_puzzles(args.num_tests, givens=givens, **common)
    task = sudoku_task(model, tests)
    for row in chain(list_orders(task, orders), list_retries(model, tests, args.max_steps)):
        rows.append({"kind": kind, **row})
        label = f"{kind}: {row['order']}, {row['setting']}"
        print(f"{label:52}{row['exact']:8.1%}{row['error']:9.1%}{row['steps']:7.1f}", flush=True)
if args.out is not None:
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "orders.json").write_text(json.dumps(rows, indent=1) + "\n")
    plot(rows, args.out / "steps.png")
