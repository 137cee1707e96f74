"""Train a Sudoku solver with mask or uniform noise: the puzzle is the prompt, the grid a canvas.

No training grid is equivalent to a test grid. The script solves test puzzles before and after training.
17_sudoku_orders.py compares orders of filling cells. The --out folder will contain `checkpoint` (bfloat16),
`results.json` and `run`, with the log of the losses. All but the first command made `dgemma/sudoku`:

    python examples/10_train_sudoku.py                                without a GPU: three steps, to see that it runs
    python examples/10_train_sudoku.py --puzzles runs/puzzles --prepare-only
    python examples/10_train_sudoku.py --puzzles runs/puzzles --noise mask --minutes 7.3 --fast --out runs/mask
    python examples/10_train_sudoku.py --puzzles runs/puzzles --start runs/mask/checkpoint --seed 1 --batch-size 512 \
        --pool 8192 --minutes 7.6 --fast --out runs/own

A command that was stopped continues where it was. With --start, a checkpoint trains on its own steps, with few clues:
`OwnSteps` takes steps of `generate` from pure noise, with gradients. After training, the script chooses a bound of
`EntropyBound` on validation puzzles, the most exact one in at most 6 mean steps, and measures it on test puzzles.
"""

import argparse
import json
import os
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dgemma
from dgemma.data import sudoku
from dgemma.run.knobs import Knobs
from dgemma.train import CrossEntropy, Objective, RowMean, TrainConfig, soften_attention, train
from dgemma.train.learning import OwnSteps

NUMBERS = {  # defaults with and without a GPU
    "steps": (8000, 3, "training steps"),
    "batch-size": (1024, 2, "puzzles per step"),
    "layers": (8, 1, "layers of the model"),
    "pool": (32_768, 4, "base puzzles to train on, each with 1.2e12 equivalents"),
    "num-tests": (1000, 2, "test puzzles of each kind"),
    "denoising-steps": (48, 2, "steps per test puzzle, at most"),
}
TESTS = {"30-45 givens": (30, 45), "24-29 givens": (24, 29)}
BOUNDS, MOST_STEPS = (0.1, 0.2, 0.3, 0.5), 6.0  # of the sampler, in nats; mean steps of the chosen one
RECIPE = {"warmup": 300, "final_lr": 0.01, "betas": (0.9, 0.98), "weight_decay": 0.05, "ema_decay": 0.999}
LEARNING_RATE, OWN_LEARNING_RATE = 1.5e-3, 6e-4  # the second one is not tuned
NUM_OWN_STEPS, OWN_GIVENS = 5, (24, 32)  # of an update on own steps; clues of its puzzles


def sampler(bound: float) -> dgemma.EntropyBound:
    return dgemma.EntropyBound(bound=bound, greedy=True)


def solve(model: dgemma.DiffusionGemma, puzzles: sudoku.Puzzles, bound: float, args: argparse.Namespace) -> dict:
    """Return exact grids with their standard error, correct cells and steps."""
    options = {"noise": sudoku.sudoku_noise(args.noise), "steps": args.denoising_steps, "temperature": 1.0}
    options |= {"sampler": sampler(bound), "stop": dgemma.StableAndConfident(), "progress": False}
    scores = sudoku.complete(model, puzzles.puzzles, **options).scores(puzzles.solutions)
    error = (scores["exact"] * (1 - scores["exact"]) / len(puzzles)) ** 0.5
    print(f"{scores['exact']:.1%} ± {error:.1%} exact, in {scores['steps']:.1f} steps, bound {bound}", flush=True)
    return scores | {"standard_error": error, "bound": bound}


def main(args: argparse.Namespace, out: Path) -> None:
    if args.device == "cpu" and args.minutes is None and not args.prepare_only:
        print("Without a GPU this only shows that the script runs: a solver needs about 7 minutes of an H200.")
        print("`dgemma sudoku` solves puzzles with a solver that this script trained.", flush=True)
    common = {"seed": 1, "workers": args.workers, "folder": args.puzzles or out / "puzzles"}
    pool = sudoku.generate_puzzles(args.pool, givens=24, exact=False, split="train", **common)
    make = partial(sudoku.generate_puzzles, args.num_tests, **common)
    validation = make(givens=TESTS["24-29 givens"], split="validation")
    tests = {name: make(givens=givens, split="test") for name, givens in TESTS.items()}
    if args.prepare_only:
        return
    canvases = {
        "noise": sudoku.sudoku_noise(args.noise),
        "canvas_len": sudoku.NUM_CELLS,
        "allowed": sudoku.DIGIT_TOKENS,
    }
    if args.start:
        model = dgemma.DiffusionGemma.from_pretrained(args.start, dtype=torch.float32, device=args.device)
        knobs = Knobs(sampler=sampler(BOUNDS[0]), temperature=1.0)
        objective: Any = RowMean(OwnSteps(steps=NUM_OWN_STEPS, knobs=knobs, **canvases))
        source = sudoku.SudokuSource(pool=pool, seed=args.seed, givens=OWN_GIVENS)
    else:
        shipped = dgemma.presets.sudoku()
        shape = shipped.replace(num_hidden_layers=args.layers, layer_types=shipped.layer_types[-args.layers :])
        torch.manual_seed(args.seed)
        model = dgemma.DiffusionGemma(shape, device=args.device)
        soften_attention(model)
        model.generation = dgemma.GenerationDefaults(max_new_tokens=81, max_denoising_steps=81, eos_token_id=(1,))
        # Uniform noise does not show which tokens are noise.
        loss = CrossEntropy(scored="noised" if args.noise == "mask" else "all")
        objective = Objective(loss=loss, causal_weight=0.0, **canvases)
        source = sudoku.SudokuSource(pool=pool, seed=args.seed)

    def solve_tests(bound: float) -> dict[str, Any]:
        scores = {}
        for name, test in tests.items():
            print(f"  {name}: ", end="")
            scores[name] = solve(model, test, bound, args)
        return scores

    print(f"{model.num_parameters():,} weights, before training", flush=True)
    before = solve_tests(BOUNDS[0])
    config = TrainConfig(
        steps=args.steps if args.minutes is None else None,
        minutes=args.minutes,
        batch_size=args.batch_size,
        lr=args.lr or (OWN_LEARNING_RATE if args.start else LEARNING_RATE),
        seed=args.seed,
        precision="mixed" if model.device.type == "cuda" else "weights",
        **RECIPE,
    )
    with ExitStack() as stack:
        if args.fast:
            from dgemma_kernels import accelerate_training  # needs Triton

            stack.enter_context(accelerate_training(model))
        result = train(model, objective, source, config, out=out / "run")
    if result.interrupted:
        return
    seconds = sum(result.log.column("seconds")[1])  # of earlier calls, too
    print(f"after {result.step} steps of {args.batch_size} puzzles in {seconds:.0f} s, validation puzzles:", flush=True)
    model.to(torch.bfloat16).save_pretrained(out / "checkpoint")
    model.to(torch.float32)  # evaluate the weights as they were saved
    of_bounds = [solve(model, validation, bound, args) for bound in BOUNDS]
    quick = [scores for scores in of_bounds if scores["steps"] <= MOST_STEPS]
    chosen = max(quick, key=lambda s: s["exact"]) if quick else min(of_bounds, key=lambda s: s["steps"])
    print("test puzzles:")
    trained = solve_tests(chosen["bound"])

    train_keys = sudoku.class_keys(pool.solutions)  # equivalent grids have the same key
    shared = [np.isin(sudoku.class_keys(test.solutions), train_keys).sum() for test in tests.values()]
    results = {
        "options": vars(args),
        "parameters": model.num_parameters(),
        "train_steps": result.step,
        "train_seconds": seconds,
        "puzzles_per_second": result.step * args.batch_size / seconds,
        "gpu": torch.cuda.get_device_name() if model.device.type == "cuda" else None,
        "test_grids_with_a_key_trained_on": int(sum(shared)),
        "before": before,
        "validation": of_bounds,
        "trained": trained,
    }
    (out / "results.json").write_text(json.dumps(results, indent=1, default=str) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", choices=["mask", "uniform"], default="mask")
    for name, (on_gpu, without, meaning) in NUMBERS.items():
        default = on_gpu if torch.cuda.is_available() else without
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (%(default)s)")
    parser.add_argument("--minutes", type=float, help="train for this long, instead of a number of steps")
    parser.add_argument("--start", help="checkpoint that trains on its own steps; default: random weights")
    parser.add_argument("--lr", type=float, help="peak learning rate; default: that of the recipe")
    parser.add_argument("--puzzles", type=Path, help="folder for the puzzles; default: puzzles in --out")
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1), help="processes that make puzzles")
    parser.add_argument("--prepare-only", action="store_true", help="only make the puzzles")
    parser.add_argument("--out", type=Path, help="default: a temporary folder")
    parser.add_argument("--fast", action="store_true", help="train with kernels, on a GPU: slower start, faster steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as scratch:
        arguments = parser.parse_args()
        main(arguments, arguments.out or Path(scratch))
