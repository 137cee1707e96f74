"""Train a Sudoku solver from scratch and ask which order of solving is best, under masks and under uniform noise.

The puzzle is the prompt, the solution a canvas of 81 tokens. Test puzzles come from base grids of which no equivalent
was ever trained on. After training come a table of samplers, accuracy against steps, and the checkpoint in bfloat16.

    python examples/10_train_sudoku.py --size tiny                               seconds, to see that it runs
    python examples/10_train_sudoku.py --noise mask --minutes 8 --out runs/mask  one GPU; also --noise uniform
"""

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dgemma
from dgemma.config import FULL, SLIDING
from dgemma.data import sudoku
from dgemma.sampling import Ancestral, BlockRefinement, Confidence, EntropyBound, StableAndConfident
from dgemma.train.initial import soften_attention
from dgemma.train.loop import StepRecord, TrainConfig, train
from dgemma.train.objective import Objective


@dataclass(frozen=True, kw_only=True)
class Size:
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    num_experts: int
    moe_intermediate_size: int
    batch_size: int
    lr: float
    steps: int
    warmup: int
    pool: int  # base puzzles to train on, each in 1.2e12 equivalents
    num_tests: int  # puzzles in each of the test sets
    max_steps: int  # of denoising


SIZES = {
    "full": Size(
        hidden_size=256,
        num_layers=8,
        num_heads=8,
        intermediate_size=256,
        num_experts=4,
        moe_intermediate_size=64,
        batch_size=1024,
        lr=1.5e-3,
        steps=8000,
        warmup=300,
        pool=32_768,
        num_tests=1000,
        max_steps=81,
    ),
    "tiny": Size(
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=32,
        num_experts=2,
        moe_intermediate_size=16,
        batch_size=8,
        lr=1e-3,
        steps=3,
        warmup=1,
        pool=8,
        num_tests=2,
        max_steps=2,
    ),
}
TESTS = {"30-45 givens": (30, 45), "24-29 givens": (24, 29)}
STOP = StableAndConfident(stability=1, confidence=0.005)


def make_model(size: Size, device: str) -> dgemma.DiffusionGemma:
    head_dim = size.hidden_size // size.num_heads
    config = dgemma.ModelConfig(
        vocab_size=sudoku.VOCAB_SIZE,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        layer_types=(SLIDING,) * (size.num_layers - 1) + (FULL,),
        sliding_window=256,  # wider than prompt and canvas together: every layer sees everything
        canvas_length=sudoku.NUM_CELLS,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_heads,
        head_dim=head_dim,
        num_global_key_value_heads=size.num_heads,
        global_head_dim=head_dim,
        num_experts=size.num_experts,
        top_k_experts=2,
        moe_intermediate_size=size.moe_intermediate_size,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model = dgemma.DiffusionGemma(config, device=device)
    soften_attention(model)
    model.generation = dgemma.GenerationDefaults(
        max_new_tokens=sudoku.NUM_CELLS, max_denoising_steps=sudoku.NUM_CELLS, eos_token_id=(1,)
    )
    return model


def make_objective(noise: str) -> Objective:
    """Cross-entropy where there is noise to undo; a uniform token does not show whether it is noise, so there all."""
    return Objective(
        noise=sudoku.sudoku_noise(noise),
        canvas_len=sudoku.NUM_CELLS,
        allowed=sudoku.DIGIT_TOKENS,
        scored="noised" if noise == "mask" else "all",
        causal_weight=0.0,
    )


def fit(model: dgemma.DiffusionGemma, noise: str, size: Size, pool: sudoku.Puzzles, args: argparse.Namespace) -> Any:
    source = sudoku.SudokuSource(pool=pool, seed=args.seed)
    config = TrainConfig(
        steps=size.steps,
        batch_size=size.batch_size,
        lr=size.lr,
        betas=(0.9, 0.98),
        weight_decay=0.05,
        warmup=size.warmup,
        final_lr=0.01,
        ema_decay=0.999,
        precision="mixed" if args.device == "cuda" else "weights",
        compile=args.compile,
        checkpoint_every=10**9,  # the last step only, and where the run stops
        log_every=min(20, size.steps),
        seed=args.seed,
        progress=args.progress,
    )
    objective = make_objective(noise)
    if not args.minutes:
        return train(model, objective, source, config, out=args.out / "run")
    # The schedule must end when the time does, whatever else runs on the GPU: plan again as the pace shows itself.
    budget, began = 60 * args.minutes, time.perf_counter()
    for share in (0.1, 0.3, 0.6, 0.85, 1.1):
        clock: list[float] = []

        def overdue(record: StepRecord, clock: list[float] = clock, share: float = share) -> bool:
            clock.append(time.perf_counter())
            return len(clock) > 10 and clock[-1] - began > share * budget

        result = train(model, objective, source, config, out=args.out / "run", on_step=overdue, allow_changes=True)
        if not result.interrupted:
            break
        now, middle = time.perf_counter(), len(clock) // 2
        pace = (clock[-1] - clock[middle]) / (len(clock) - 1 - middle)
        steps = result.step + max(1, int((budget - (now - began)) / pace))
        print(
            f"{now - began:.0f} s: step {result.step} of {steps}, {config.batch_size / pace:.0f} puzzles/s", flush=True
        )
        config = replace(config, steps=steps)
    return result


def samplers(noise: str, max_steps: int) -> dict[str, dict[str, Any]]:
    """The table's rows: options of `complete`. Orders decide a fixed share a step; the bound adapts, and stops."""
    if noise == "mask":
        rows: dict[str, dict[str, Any]] = {
            f"{order}, {steps} steps": {"sampler": Confidence(order=order, greedy=True), "steps": steps}
            for steps in (min(12, max_steps), max_steps)
            for order in ("random", "confidence", "margin")
        }
        bounds = (0.01, 0.1, 0.5)
    else:
        rows = {
            "random (ancestral), 12 steps": {"sampler": Ancestral(), "steps": min(12, max_steps)},
            "random (ancestral), 81 steps": {"sampler": Ancestral(), "steps": max_steps},
            "confidence (refinement, 0.95)": {
                "sampler": BlockRefinement(tau=0.95, greedy=True),
                "steps": min(48, max_steps),
                "stop": STOP,
            },
            "margin, bound 0.1": {
                "sampler": EntropyBound(bound=0.1, order="margin", greedy=True),
                "steps": min(48, max_steps),
                "stop": STOP,
            },
        }
        bounds = (0.1, 0.5, 2.0)
    for bound in bounds:
        options = {"sampler": EntropyBound(bound=bound, greedy=True), "steps": min(48, max_steps), "stop": STOP}
        rows[f"entropy-bound {bound}"] = options
    return rows


def score(model: Any, noise: str, tests: dict[str, sudoku.Puzzles], **options: Any) -> dict[str, dict[str, float]]:
    settings = {"noise": sudoku.sudoku_noise(noise), "temperature": 1.0, "stop": None, "progress": False, **options}
    return {
        name: sudoku.complete(model, test.puzzles, **settings).scores(test.solutions) for name, test in tests.items()
    }


def show(label: str, scores: dict[str, dict[str, float]]) -> None:
    cells = "".join(f"{s['exact']:9.1%}{s['steps']:7.1f}" for s in scores.values())
    print(f"{label:36}{cells}", flush=True)


def plot(curves: dict[str, dict[str, list[list[float]]]], path: Path) -> None:
    """A colour for each order, a dash for each kind of puzzle."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("No plot: install it with pip install 'dgemma[plots]'.")
        return
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for (kind, orders), dash in zip(curves.items(), ("-", "--"), strict=True):
        for number, (order, points) in enumerate(orders.items()):
            steps, exact = [s for s, _ in points], [100 * e for _, e in points]
            axes.plot(steps, exact, dash, marker="o", markersize=3.5, color=f"C{number}", label=f"{order}, {kind}")
    axes.set(xlabel="mean steps", ylabel="exact grids, %", xscale="log", ylim=(0, 101))
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def accuracy_against_steps(model: Any, noise: str, test: sudoku.Puzzles, max_steps: int) -> dict[str, Any]:
    """Curves of (mean steps, exact): fixed numbers of steps by order, and the bound at many values."""
    budget = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48) if n <= max_steps]
    bounds = (0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 4.0)
    curves: dict[str, Any] = {"entropy-bound": []}
    for bound in bounds:
        options = {"sampler": EntropyBound(bound=bound, greedy=True), "steps": max_steps, "stop": STOP}
        found = score(model, noise, {"": test}, **options)[""]
        curves["entropy-bound"].append([found["steps"], found["exact"]])
    orders: dict[str, Any] = (
        {order: Confidence(order=order, greedy=True) for order in ("random", "confidence", "margin")}
        if noise == "mask"
        else {"random (ancestral)": Ancestral(), "confidence (refinement)": BlockRefinement(tau=1.0, greedy=True)}
    )
    for label, sampler in orders.items():
        points = [score(model, noise, {"": test}, sampler=sampler, steps=steps)[""] for steps in budget]
        curves[label] = [[point["steps"], point["exact"]] for point in points]
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--noise", choices=["mask", "uniform"], default="mask")
    parser.add_argument("--size", choices=SIZES, default="full" if device == "cuda" else "tiny")
    parser.add_argument("--steps", type=int, help="of training, instead of the size's own")
    parser.add_argument("--minutes", type=float, help="as many training steps as fit, instead of a number")
    parser.add_argument("--batch-size", type=int, help="instead of the size's own")
    parser.add_argument("--out", type=Path, help="where checkpoint, table and plots go; default: a temporary folder")
    parser.add_argument("--puzzles", type=Path, help="a folder that keeps the puzzles, to share or use again")
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1), help="processes that make puzzles")
    parser.add_argument("--prepare-only", action="store_true", help="make the puzzles, and stop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=device)
    parser.add_argument("--compile", action="store_true", help="compile the layers: longer to start, faster after")
    parser.add_argument("--progress", action="store_true", help="a progress bar")
    args = parser.parse_args()
    size = SIZES[args.size]
    size = replace(size, steps=args.steps or size.steps, batch_size=args.batch_size or size.batch_size)
    with tempfile.TemporaryDirectory() as scratch:
        args.out = args.out or Path(scratch)
        args.out.mkdir(parents=True, exist_ok=True)
        run(size, args)


def run(size: Size, args: argparse.Namespace) -> None:
    """Puzzles, training, table, curves: everything is written to `args.out`."""
    began = time.perf_counter()
    folder = args.puzzles or args.out
    pool = puzzles(folder / "pool.txt", size.pool, givens=24, exact=False, split="train", workers=args.workers)
    tests = {
        name: puzzles(folder / f"test-{low}-{high}.txt", size.num_tests, givens=(low, high), workers=args.workers)
        for name, (low, high) in TESTS.items()
    }
    num_tests, seconds = sum(map(len, tests.values())), time.perf_counter() - began
    print(f"{len(pool)} puzzles to train on, {num_tests} to test: {seconds:.0f} s", flush=True)
    if args.prepare_only:
        return

    model = make_model(size, args.device)
    head = "".join(f"{name:>16}" for name in tests)
    print(f"{model.num_parameters():,} parameters\n{'exact grids and mean steps':36}{head}")
    rows = samplers(args.noise, size.max_steps)
    best = rows["entropy-bound 0.1"]
    table = {"untrained": score(model, args.noise, tests, **best)}
    show("untrained", table["untrained"])

    began = time.perf_counter()
    result = fit(model, args.noise, size, pool, args)
    seconds = time.perf_counter() - began
    model.to(torch.bfloat16 if args.device == "cuda" else torch.float32).eval()
    model.save_pretrained(args.out / "checkpoint")
    for label, options in rows.items():
        table[label] = score(model, args.noise, tests, **options)
        show(label, table[label])
    label = "entropy-bound 0.1, clues not frozen"
    table[label] = score(model, args.noise, tests, keep_clues=False, **best)
    show(label, table[label])

    curves = {
        name: accuracy_against_steps(model, args.noise, test[: size.num_tests // 2], size.max_steps)
        for name, test in tests.items()
    }
    plot(curves, args.out / "steps.png")
    result.plot(args.out / "loss.png")
    trained = sudoku.class_keys(pool.solutions)
    summary = {
        "noise": args.noise,
        "parameters": model.num_parameters(),
        "train_steps": result.step,
        "batch_size": size.batch_size,
        "train_seconds": seconds,
        "puzzles_per_second": result.tokens_per_second / (2 * sudoku.NUM_CELLS),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "base_puzzles": len(pool),
        # Different keys prove that no symmetry takes one grid to the other.
        "test_grids_with_a_key_trained_on": sum(
            int(np.isin(sudoku.class_keys(test.solutions), trained).sum()) for test in tests.values()
        ),
        "table": table,
        "accuracy_against_steps": curves,
    }
    (args.out / "results.json").write_text(json.dumps(summary, indent=1) + "\n")


def puzzles(path: Path, count: int, *, split: Any = "test", **options: Any) -> sudoku.Puzzles:
    """Made once, then read from the file."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        sudoku.generate_puzzles(count, split=split, seed=1, **options).save(path)
    return sudoku.Puzzles.load(path)[:count]


if __name__ == "__main__":
    main()
