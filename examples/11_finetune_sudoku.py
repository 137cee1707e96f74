"""Fine-tune a text model on Sudoku written as text, 81 digits in and 81 out: all weights, and LoRA of rank 8.

The objective is the published one: uniform noise over the whole vocabulary, every position scored, plus the
autoregressive loss. Clues are not frozen: the model must write all 81 digits. The same test puzzles are solved before
and after.

    python examples/11_finetune_sudoku.py                                       without a GPU: two steps of each
    python examples/11_finetune_sudoku.py --minutes 2 --compile --out runs/finetuned        writes results.json there
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch

import dgemma
from dgemma.data import sudoku
from dgemma.train import LoRA, TrainConfig, add_lora, merge_lora, recipes, train

NUMBERS = {  # defaults with and without a GPU
    "steps": (2000, 2, "training steps"),
    "batch-size": (512, 2, "puzzles per step"),
    "pool": (16_384, 8, "base puzzles to train on"),
    "num-tests": (500, 2, "test puzzles of each kind"),
    "denoising-steps": (48, 2, "steps per test puzzle, at most"),
}
TESTS = {"40-45 givens": (40, 45), "30-39 givens": (30, 39)}
LEARNING_RATES = {"full": 5e-4, "lora": 2e-3}


def load(args: argparse.Namespace) -> dgemma.DiffusionGemma:
    model = dgemma.DiffusionGemma.from_pretrained(args.model, dtype=torch.float32, device=args.device)
    model.config = model.config.replace(canvas_length=sudoku.NUM_CELLS)  # no weight depends on the length of a canvas
    return model


def solve(model: dgemma.DiffusionGemma, text: sudoku.TextSudoku, puzzles: sudoku.Puzzles, num_steps: int) -> dict:
    """Solve with the published sampler and return the scores. No clue is frozen, and every token is allowed."""
    prompt = text.prompt_tokens(puzzles.puzzles).to(model.device)
    # A loose bound, because a tuned model is certain of most digits.
    options = {"sampler": dgemma.EntropyBound(bound=12.0), "temperature": dgemma.LinearTemperature(start=1.0, end=0.3)}
    out = dgemma.generate(model, prompt, max_new_tokens=sudoku.NUM_CELLS, steps=num_steps, progress=False, **options)
    grids, clues = text.canvas_digits(out.new_tokens), torch.from_numpy(puzzles.puzzles).to(model.device)
    completion = sudoku.Completion(puzzles=clues, grids=grids, steps=out.steps[:, 0], generation=out)
    return completion.scores(puzzles.solutions)


def tune(how: str, args: argparse.Namespace, text: sudoku.TextSudoku, out: Path) -> tuple[dgemma.DiffusionGemma, dict]:
    model = load(args)
    if how == "lora":
        add_lora(model, LoRA(rank=8))
    config = TrainConfig(
        steps=args.steps if args.minutes is None else None,
        minutes=args.minutes,
        batch_size=args.batch_size,
        lr=LEARNING_RATES[how],
        betas=(0.9, 0.98),
        ema_decay=0.995,
        precision="mixed" if model.device.type == "cuda" else "weights",
        compile=args.compile,
    )
    num_trained, began = sum(p.numel() for p in model.parameters() if p.requires_grad), time.perf_counter()
    result = train(model, recipes.dgemma(model.config), text, config, out=out)
    if how == "lora":
        merge_lora(model)
    return model, {"trained_weights": num_trained, "steps": result.step, "seconds": time.perf_counter() - began}


def main(args: argparse.Namespace, out: Path) -> None:
    if args.device == "cpu" and args.minutes is None:
        print("Without a GPU this only shows that the script runs: fine-tuning needs some minutes of a large GPU.")
        print("`dgemma sudoku` solves puzzles with a solver that ships.", flush=True)
    common = {"seed": 1, "workers": args.workers, "folder": args.puzzles}
    tests = {
        name: sudoku.generate_puzzles(args.num_tests, givens=g, split="test", **common) for name, g in TESTS.items()
    }
    pool = sudoku.generate_puzzles(args.pool, givens=30, **common)
    source = sudoku.SudokuSource(pool=pool, givens=(30, 45), skew=1.0)
    text = sudoku.TextSudoku(source, dgemma.Tokenizer.from_pretrained(args.model))

    def report(label: str, model: dgemma.DiffusionGemma) -> dict[str, dict]:
        scores = {name: solve(model, text, test, args.denoising_steps) for name, test in tests.items()}
        for name, s in scores.items():
            numbers = f"{s['exact']:8.1%}{s['cells']:8.1%}{s['clues']:8.1%}{s['steps']:8.1f}"
            print(f"{label:8}{name:14}{numbers}", flush=True)
        return scores

    print(f"{'':22}{'exact':>8}{'cells':>8}{'clues':>8}{'steps':>8}")
    results = {"options": vars(args), "before": report("before", load(args))}
    for how in args.how:
        model, summary = tune(how, args, text, out / how)
        results[how] = {**summary, "after": report(how, model)}
    (out / "results.json").write_text(json.dumps(results, indent=1, default=str) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dgemma/text", help="a checkpoint with a tokenizer (%(default)s)")
    parser.add_argument("--how", nargs="+", choices=LEARNING_RATES, default=list(LEARNING_RATES))
    for name, (on_gpu, without, meaning) in NUMBERS.items():
        default = on_gpu if torch.cuda.is_available() else without
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (%(default)s)")
    parser.add_argument("--minutes", type=float, help="length of each training, instead of a number of steps")
    parser.add_argument("--puzzles", type=Path, help="folder for the puzzles")
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1), help="processes that make puzzles")
    parser.add_argument("--out", type=Path, help="default: a temporary folder")
    parser.add_argument("--compile", action="store_true", help="compile the layers: slower start, faster steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as scratch:
        arguments = parser.parse_args()
        main(arguments, arguments.out or Path(scratch))
