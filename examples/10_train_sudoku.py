"""Train a Sudoku solver from scratch, with mask or uniform noise: the puzzle is the prompt, the grid a canvas.

No training grid is equivalent to a test grid. The script solves test puzzles before and after training.
17_sudoku_orders.py compares orders of filling cells. The --out folder will contain `checkpoint` (bfloat16),
`results.json` and `run`, with the log of the losses. The second and the third command made `dgemma/sudoku`:

    python examples/10_train_sudoku.py                                without a GPU: three steps, to see that it runs
    python examples/10_train_sudoku.py --puzzles runs/puzzles --prepare-only
    python examples/10_train_sudoku.py --puzzles runs/puzzles --noise mask --minutes 7.3 --fast --out runs/mask
    python examples/10_train_sudoku.py --puzzles runs/puzzles --noise mask --minutes 7.3 --fast --out runs/mask \
        --own-updates 156                                             continues in `own`, on the solver's own steps

A command that was stopped continues where it was. The fourth may also be run without the third.
"""

import argparse
import json
import os
import tempfile
from contextlib import ExitStack
from dataclasses import replace
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
SAMPLER = dgemma.EntropyBound(bound=0.1, greedy=True)
TESTS = {"30-45 givens": (30, 45), "24-29 givens": (24, 29)}
RECIPE = {"lr": 1.5e-3, "warmup": 300, "final_lr": 0.01, "betas": (0.9, 0.98), "weight_decay": 0.05, "ema_decay": 0.999}
OWN_RECIPE = RECIPE | {"lr": 3e-4, "warmup": 20}  # of own steps, with half the batch; the rate is not tuned
NUM_OWN_STEPS = 5  # that an update of own steps takes from pure noise


def solve(model: dgemma.DiffusionGemma, tests: dict[str, sudoku.Puzzles], args: argparse.Namespace) -> dict[str, Any]:
    """Return exact grids, correct cells and steps for each kind of puzzle."""
    options = {"noise": sudoku.sudoku_noise(args.noise), "steps": args.denoising_steps, "temperature": 1.0}
    options |= {"sampler": SAMPLER, "stop": dgemma.StableAndConfident()}
    scores = {}
    for name, test in tests.items():
        scores[name] = sudoku.complete(model, test.puzzles, progress=False, **options).scores(test.solutions)
        print(f"  {name}: {scores[name]['exact']:.1%} exact, in {scores[name]['steps']:.1f} steps", flush=True)
    return scores


def main(args: argparse.Namespace, out: Path) -> None:
    if args.device == "cpu" and args.minutes is None and not args.prepare_only:
        print("Without a GPU this only shows that the script runs: a solver needs about 7 minutes of an H200.")
        print("`dgemma sudoku` solves puzzles with a solver that this script trained.", flush=True)
    common = {"seed": 1, "workers": args.workers, "folder": args.puzzles or out / "puzzles"}
    pool = sudoku.generate_puzzles(args.pool, givens=24, exact=False, split="train", **common)
    tests = {
        name: sudoku.generate_puzzles(args.num_tests, givens=g, split="test", **common) for name, g in TESTS.items()
    }
    if args.prepare_only:
        return
    shipped = dgemma.presets.sudoku()
    shape = shipped.replace(num_hidden_layers=args.layers, layer_types=shipped.layer_types[-args.layers :])
    torch.manual_seed(args.seed)
    model = dgemma.DiffusionGemma(shape, device=args.device)
    soften_attention(model)
    model.generation = dgemma.GenerationDefaults(max_new_tokens=81, max_denoising_steps=81, eos_token_id=(1,))
    print(f"{model.num_parameters():,} weights, untrained", flush=True)
    untrained = solve(model, tests, args)

    def save_and_solve() -> dict[str, Any]:
        model.to(torch.bfloat16).save_pretrained(out / "checkpoint")
        model.to(torch.float32)  # evaluate the weights as they were saved
        return solve(model, tests, args)

    objective = Objective(
        noise=sudoku.sudoku_noise(args.noise),
        canvas_len=sudoku.NUM_CELLS,
        allowed=sudoku.DIGIT_TOKENS,
        # Uniform noise does not show which tokens are noise.
        loss=CrossEntropy(scored="noised" if args.noise == "mask" else "all"),
        causal_weight=0.0,
    )
    common = {"seed": args.seed, "precision": "mixed" if model.device.type == "cuda" else "weights"}
    length = {"steps": args.steps} if args.minutes is None else {"minutes": args.minutes}
    config = TrainConfig(**length, batch_size=args.batch_size, **common, **RECIPE)
    source = sudoku.SudokuSource(pool=pool, seed=args.seed)
    with ExitStack() as stack:
        if args.fast:
            from dgemma_kernels import accelerate_training  # needs Triton

            stack.enter_context(accelerate_training(model))
        result = train(model, objective, source, config, out=out / "run")
    seconds = sum(result.log.column("seconds")[1])  # of earlier calls, too
    print(f"after {result.step} steps of {args.batch_size} puzzles in {seconds:.0f} s", flush=True)
    scores = {"untrained": untrained, "trained": save_and_solve()}
    if args.own_updates:
        config = TrainConfig(steps=args.own_updates, batch_size=max(1, args.batch_size // 2), **common, **OWN_RECIPE)
        own = OwnSteps(
            noise=objective.noise,
            canvas_len=sudoku.NUM_CELLS,
            steps=NUM_OWN_STEPS,
            knobs=Knobs(sampler=SAMPLER, temperature=1.0),
            allowed=sudoku.DIGIT_TOKENS,
        )
        train(model, RowMean(own), replace(source, seed=args.seed + 1), config, out=out / "own")
        print(f"after {args.own_updates} updates on own steps", flush=True)
        scores["own steps"] = save_and_solve()

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
        **scores,
    }
    (out / "results.json").write_text(json.dumps(results, indent=1, default=str) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", choices=["mask", "uniform"], default="mask")
    for name, (on_gpu, without, meaning) in NUMBERS.items():
        default = on_gpu if torch.cuda.is_available() else without
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (%(default)s)")
    parser.add_argument("--minutes", type=float, help="train for this long, instead of a number of steps")
    parser.add_argument(
        "--own-updates", type=int, default=0, help="then updates on the solver's own steps (%(default)s)"
    )
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
