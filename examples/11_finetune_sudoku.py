"""Fine-tune a text model on Sudoku written as text: 81 digits in, 81 digits out; all weights, and LoRA of rank 8.

The objective is the published one: uniform noise over the whole vocabulary, every position scored, the causal loss
beside it. Clues are not frozen: the model must write all 81 digits. Before and after, the same test puzzles.

    python examples/11_finetune_sudoku.py                                     random weights: shows that it runs
    python examples/11_finetune_sudoku.py --model dgemma/text --minutes 2     one GPU; results.json goes to --out
"""

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dgemma
from dgemma.data import sudoku
from dgemma.train import recipes
from dgemma.train.batch import TrainBatch
from dgemma.train.loop import StepRecord, TrainConfig, train
from dgemma.train.lora import LoRA, add_lora, is_adapted, merge_lora

TESTS = {"40-45 givens": (40, 45), "30-39 givens": (30, 39)}
LEARNING_RATES = {"full": 5e-4, "lora": 2e-3}


@dataclass(frozen=True)
class TextSudoku:
    """`SudokuSource` in a text model's own digits: its start token, the puzzle, the solution."""

    source: sudoku.SudokuSource
    start: int
    digits: torch.Tensor  # (10,) the token of each digit

    def prompt(self, puzzles: torch.Tensor) -> torch.Tensor:
        """(B, 81) digits → (B, 82) tokens."""
        digits = self.digits.to(puzzles.device)
        return torch.nn.functional.pad(digits[puzzles.long()], (1, 0), value=self.start)

    def __call__(self, step: int, rows: range) -> TrainBatch:
        sample = self.source.sample(step, rows)
        prompt = self.prompt(sample.puzzle)
        tokens = torch.cat([prompt, self.digits[sample.solution]], dim=1)
        return TrainBatch(
            tokens=tokens,
            prompt_len=torch.full((len(rows),), prompt.shape[1]),
            length=torch.full((len(rows),), tokens.shape[1]),
            spans=((prompt.shape[1], tokens.shape[1]),) * len(rows),
        )


def load(args: argparse.Namespace) -> tuple[dgemma.DiffusionGemma, dgemma.Tokenizer]:
    if args.model is None:
        torch.manual_seed(0)
        model, tokenizer = dgemma.DiffusionGemma(dgemma.presets.tiny()), dgemma.ByteTokenizer()
    else:
        model = dgemma.DiffusionGemma.from_pretrained(args.model, dtype=torch.float32)
        tokenizer = dgemma.Tokenizer.from_pretrained(args.model)
    # A canvas may be as long as one likes: no weight knows its length.
    model.config = model.config.replace(canvas_length=sudoku.NUM_CELLS)
    return model.to(args.device), tokenizer


@torch.no_grad()
def score(
    model: Any, text: TextSudoku, tests: dict[str, sudoku.Puzzles], num_steps: int
) -> dict[str, dict[str, float]]:
    """The published sampler, free to write anything: exact grids, right cells, clues preserved, steps."""
    found = {}
    for name, test in tests.items():
        puzzles, solutions = (torch.from_numpy(a).to(model.device).long() for a in (test.puzzles, test.solutions))
        out = dgemma.generate(
            model,
            text.prompt(puzzles),
            max_new_tokens=sudoku.NUM_CELLS,
            steps=num_steps,
            eos_token_ids=[1],
            progress=False,
        )
        right = out.new_tokens == text.digits.to(model.device)[solutions]
        clue = puzzles > 0
        found[name] = {
            "exact": right.all(1).double().mean().item(),
            "cells": right[~clue].double().mean().item(),
            "clues": right[clue].double().mean().item(),
            "steps": out.steps.double().mean().item(),
        }
    return found


def show(label: str, scores: dict[str, dict[str, float]]) -> None:
    for name, s in scores.items():
        numbers = f"{s['exact']:8.1%}{s['cells']:8.1%}{s['clues']:8.1%}{s['steps']:7.1f}"
        print(f"{label:12}{name:16}{numbers}", flush=True)


def tune(how: str, args: argparse.Namespace, text: TextSudoku, out: Path) -> tuple[dgemma.DiffusionGemma, dict]:
    model, _ = load(args)
    if how == "lora":
        add_lora(model, LoRA(rank=8))
    config = TrainConfig(
        steps=args.steps,
        batch_size=args.batch_size,
        lr=LEARNING_RATES[how],
        betas=(0.9, 0.98),
        warmup=min(100, args.steps // 10),
        ema_decay=0.995,
        precision="mixed" if args.device == "cuda" else "weights",
        compile=args.compile,
        checkpoint_every=args.steps,
        progress=args.progress,
    )
    began = time.perf_counter()

    def too_late(record: StepRecord) -> bool:
        return args.minutes is not None and time.perf_counter() - began > 60 * args.minutes

    objective = recipes.dgemma(model.config, canvas_len=sudoku.NUM_CELLS)
    result = train(model, objective, text, config, out=out, on_step=too_late)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if is_adapted(model):
        merge_lora(model)
    seconds = time.perf_counter() - began
    return model, {"trained_weights": trained, "steps": result.step, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint of this library, such as dgemma/text; default: random weights")
    parser.add_argument("--how", choices=["full", "lora", "both"], default="both")
    parser.add_argument("--steps", type=int, help="of training; default: 2000 with a model, else 2")
    parser.add_argument("--minutes", type=float, help="stop each training after so long")
    parser.add_argument("--batch-size", type=int, help="default: 512 with a model, else 4")
    parser.add_argument("--pool", type=int, help="base puzzles; default: 16384 with a model, else 8")
    parser.add_argument("--num-tests", type=int, help="puzzles in each test set; default: 500 with a model, else 2")
    parser.add_argument("--denoising-steps", type=int, help="at most, of a canvas; default: 48 with a model, else 4")
    parser.add_argument("--workers", type=int, default=1, help="processes that make puzzles")
    parser.add_argument("--out", type=Path, help="default: a temporary folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the layers: longer to start, faster after")
    parser.add_argument("--progress", action="store_true", help="a progress bar")
    args = parser.parse_args()
    real = args.model is not None
    defaults = {"steps": (2000, 2), "batch_size": (512, 4), "pool": (16_384, 8), "num_tests": (500, 2)}
    defaults["denoising_steps"] = (48, 4)
    for name, (full, tiny) in defaults.items():
        setattr(args, name, getattr(args, name) or (full if real else tiny))

    pool = sudoku.generate_puzzles(args.pool, givens=30, seed=1, workers=args.workers)
    tests = {
        name: sudoku.generate_puzzles(args.num_tests, givens=givens, split="test", seed=1, workers=args.workers)
        for name, givens in TESTS.items()
    }
    model, tokenizer = load(args)
    digits = torch.tensor(tokenizer.encode("0123456789", bos=False))
    if digits.shape != (10,):
        raise ValueError(f"--model must have a tokenizer with one token a digit, got {len(digits)} for ten digits.")
    source = sudoku.SudokuSource(pool=pool, givens=(30, 45), skew=1.0, pinned=0.0)
    text = TextSudoku(source, tokenizer.bos_token_id, digits)

    print(f"{'':12}{'':16}{'exact':>8}{'cells':>8}{'clues':>8}{'steps':>7}")
    results: dict[str, Any] = {"model": args.model, "before": score(model, text, tests, args.denoising_steps)}
    show("before", results["before"])
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or Path(scratch)
        for how in ("full", "lora") if args.how == "both" else (args.how,):
            model, summary = tune(how, args, text, out / how)
            results[how] = {**summary, "after": score(model, text, tests, args.denoising_steps)}
            show(how, results[how]["after"])
        (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
