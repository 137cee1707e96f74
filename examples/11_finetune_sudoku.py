"""Fine-tune a text model on Sudoku written as text, a board in and a board out: all weights, and LoRA.

The objective is the published one: uniform noise over the whole vocabulary, every position scored, plus the
autoregressive loss with weight 0.25. Clues are not frozen: the model must write all 81 digits. The published sampler
is run on the same test puzzles before and after. After 3.9 minutes on a shared H200, `dgemma/text`
solves 89.6 % of the puzzles with 30 to 39 clues in 7.5 steps, instead of 0 % in 38.2. LoRA reached 46.8 % in 2
minutes. docs/training.md has more.

With --own-minutes, the model with all weights trained then learns on its own steps (`OwnSteps`), to be right in fewer.
The bound and the stop rule are chosen on validation puzzles: the most exact in at most 3 mean steps.

    python examples/11_finetune_sudoku.py                                       without a GPU: two steps of each
    python examples/11_finetune_sudoku.py --how full --minutes 3.9 --fast --out runs/full
    python examples/11_finetune_sudoku.py --how lora --minutes 2 --fast --out runs/lora
    python examples/11_finetune_sudoku.py --how full --minutes 5 --own-minutes 6 --fast --out runs/own
"""

import argparse
import itertools
import json
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dgemma
from dgemma.data import sudoku
from dgemma.run.knobs import Knobs
from dgemma.train import LoRA, RowMean, TrainBatch, TrainConfig, add_lora, merge_lora, muon, recipes, train
from dgemma.train.learning import OwnSteps
from dgemma.train.log import TrainStep

NUMBERS = {  # defaults with and without a GPU
    "steps": (4000, 2, "training steps"),
    "batch-size": (256, 2, "puzzles per step"),
    "pool": (16_384, 8, "base puzzles to train on"),
    "num-tests": (500, 2, "test puzzles of each kind"),
    "denoising-steps": (48, 2, "steps per test puzzle, at most"),
}
TESTS = {"40-45 givens": (40, 45), "30-39 givens": (30, 39)}
LEARNING_RATES = {"full": 2.5e-3, "lora": 2e-3, "own": 1e-3}
ROW_NAMES = "ABCDEFGHI"
PUBLISHED: dict[str, Any] = {
    "sampler": dgemma.EntropyBound(bound=0.1),
    "temperature": dgemma.LinearTemperature(start=0.8, end=0.4),
    "stop": dgemma.StableAndConfident(),
}
NUM_OWN_STEPS, OWN_BOUND, MOST_STEPS = 4, 0.3, 3.0  # of an update; of its sampler, in nats; mean steps of the chosen
SETTINGS = [  # to choose from after own steps
    {
        "sampler": dgemma.EntropyBound(bound=bound, greedy=True),
        "temperature": 1.0,
        "stop": dgemma.StableAndConfident(stability=stability, confidence=confidence),
    }
    for bound, (stability, confidence) in itertools.product(
        (0.1, 0.3, 1.0, 3.0), ((1, 0.005), (0, 0.002), (0, 0.01), (0, 0.05))
    )
]


@dataclass(frozen=True)
class TextSudoku:
    """The rows of a `SudokuSource` as text: a start token and the puzzle, then the solution. Nothing is frozen.

    A model without absolute positions cannot see where row 4 begins in 81 bare digits, so a letter begins each row. The
    text of a board is "A530070000B600195000C098000060" and so on, with 0 for a blank. A board is 90 tokens, so each
    cell of the solution is 90 tokens after the same cell of the puzzle. The tokenizer must not merge digits.
    """

    source: sudoku.SudokuSource
    tokenizer: dgemma.Tokenizer

    board_len = 90  # tokens of a puzzle, and of a canvas

    @cached_property
    def digits(self) -> Tensor:
        """The tokens of the digits, (10,)."""
        return torch.tensor(self.tokenizer.encode("0123456789", bos=False))

    @cached_property
    def row_names(self) -> Tensor:
        """The tokens of the letters that begin the rows, (9,)."""
        return torch.tensor([self.tokenizer.encode(name, bos=False)[0] for name in ROW_NAMES])

    def board_tokens(self, digits: Any) -> Tensor:
        """Return boards (B, 90) of digits (B, 81), 0 for a blank."""
        cells = self.digits[torch.as_tensor(digits).long()].unflatten(-1, (9, 9))
        names = self.row_names[:, None].expand(*cells.shape[:-1], 1)
        return torch.cat([names, cells], dim=-1).flatten(-2)

    def prompt_tokens(self, puzzles: Any) -> Tensor:
        """Return the prompts (B, 91) of puzzles (B, 81), 0 for a blank."""
        return F.pad(self.board_tokens(puzzles), (1, 0), value=self.tokenizer.bos_token_id)

    def canvas_digits(self, tokens: Tensor) -> Tensor:
        """Return the digits (B, 81) of canvas tokens (B, 90), 0 for any other token."""
        cells = tokens.unflatten(-1, (9, 10))[..., 1:].flatten(-2)
        return (cells[..., None] == self.digits.to(tokens.device)).int().argmax(-1)

    def __call__(self, step: int, rows: range) -> TrainBatch:
        sample = self.source.sample(step, rows)
        prompt = self.prompt_tokens(sample.puzzle)
        prompt_len, length = prompt.shape[1], prompt.shape[1] + self.board_len
        return TrainBatch(
            tokens=torch.cat([prompt, self.board_tokens(sample.solution)], dim=1),
            prompt_len=torch.full((len(rows),), prompt_len),
            length=torch.full((len(rows),), length),
            spans=((prompt_len, length),) * len(rows),
        )


def load(args: argparse.Namespace) -> dgemma.DiffusionGemma:
    model = dgemma.DiffusionGemma.from_pretrained(args.model, dtype=torch.float32, device=args.device)
    # No weight depends on the length of a canvas.
    model.config = model.config.replace(canvas_length=TextSudoku.board_len)
    return model


def solve(
    model: dgemma.DiffusionGemma, text: TextSudoku, puzzles: sudoku.Puzzles, num_steps: int, setting: dict[str, Any]
) -> dict:
    """Solve with the sampler of `setting` and return the scores. No clue is frozen, and every token is allowed."""
    out = dgemma.generate(
        model,
        text.prompt_tokens(puzzles.puzzles).to(model.device),
        max_new_tokens=text.board_len,
        noise=dgemma.UniformNoise(model.config.vocab_size),
        steps=num_steps,
        progress=False,
        **setting,
    )
    grids, clues = text.canvas_digits(out.new_tokens), torch.from_numpy(puzzles.puzzles).to(model.device)
    completion = sudoku.CompletedPuzzles(puzzles=clues, grids=grids, steps=out.steps[:, 0], generation=out)
    return completion.scores(puzzles.solutions)


def tune(model: dgemma.DiffusionGemma, how: str, args: argparse.Namespace, text: TextSudoku, out: Path) -> dict:
    """Train in place and return a summary."""
    if how == "lora":
        add_lora(model, LoRA(rank=32, alpha=64))
    minutes = args.own_minutes if how == "own" else args.minutes
    config = TrainConfig(
        steps=args.steps if minutes is None else None,
        minutes=minutes,
        batch_size=args.batch_size,
        lr=LEARNING_RATES[how],
        betas=(0.9, 0.98),
        final_lr=0.02,
        ema_decay=0.995,
        precision="mixed" if model.device.type == "cuda" else "weights",
        checkpoint_every=5000,
        progress=False,
    )
    # The text model itself was trained with this optimizer and rate.
    optimizer = partial(muon, lr=LEARNING_RATES[how], momentum=0.9) if how != "lora" else None
    objective: Any = recipes.dgemma(model.config, causal_weight=0.25)  # as for the text model
    if how == "own":
        noise = dgemma.UniformNoise(model.config.vocab_size)
        knobs = Knobs(sampler=dgemma.EntropyBound(bound=OWN_BOUND, greedy=True), temperature=1.0)
        objective = RowMean(OwnSteps(noise=noise, canvas_len=text.board_len, steps=NUM_OWN_STEPS, knobs=knobs))
    num_trained, began = sum(p.numel() for p in model.parameters() if p.requires_grad), time.perf_counter()
    printed = began

    def show(record: TrainStep) -> None:
        nonlocal printed
        now = time.perf_counter()
        if now - printed > 20 or record.step == 1:
            printed = now
            losses = " ".join(f"{k} {float(v.sum() / record.counts[k].sum()):.4f}" for k, v in record.sums.items())
            print(f"  {how}: step {record.step}, {now - began:.0f} s, {losses}", flush=True)

    with ExitStack() as stack:
        if args.fast:
            from dgemma_kernels import accelerate_training  # needs Triton

            stack.enter_context(accelerate_training(model))
        result = train(model, objective, text, config, out=out, optimizer=optimizer, on_step=show)
    if how == "lora":
        merge_lora(model)
    return {"trained_weights": num_trained, "steps": result.step, "seconds": time.perf_counter() - began}


def main(args: argparse.Namespace, out: Path) -> None:
    if args.device == "cpu" and args.minutes is None:
        print("Without a GPU this only shows that the script runs: fine-tuning needs four minutes of an H200.")
        print("`dgemma sudoku` solves puzzles with a trained solver that ships with dgemma.", flush=True)
    make = partial(sudoku.generate_puzzles, seed=1, workers=args.workers, folder=args.puzzles)
    tests = {name: make(args.num_tests, givens=givens, split="test") for name, givens in TESTS.items()}
    pool = make(args.pool, givens=30)
    tokenizer = dgemma.Tokenizer.from_pretrained(args.model)
    text = TextSudoku(sudoku.SudokuSource(pool=pool, givens=(30, 45), skew=1.5), tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"options": vars(args)}

    def report(label: str, model: dgemma.DiffusionGemma, setting: dict[str, Any] = PUBLISHED) -> dict[str, dict]:
        scores = {name: solve(model, text, test, args.denoising_steps, setting) for name, test in tests.items()}
        for name, s in scores.items():
            numbers = f"{s['exact']:8.1%}{s['cells']:8.1%}{s['clues']:8.1%}{s['steps']:8.1f}"
            print(f"{label:8}{name:14}{numbers}", flush=True)
        return scores

    def save() -> None:
        (out / "results.json").write_text(json.dumps(results, indent=1, default=str) + "\n")

    print(f"{'':22}{'exact':>8}{'cells':>8}{'clues':>8}{'steps':>8}")
    results["before"] = report("before", load(args))
    save()
    for how in args.how:
        model = load(args)
        summary = tune(model, how, args, text, out / how)
        results[how] = {**summary, "after": report(how, model)}
        save()
        if how == "full" and args.own_minutes:
            own = TextSudoku(sudoku.SudokuSource(pool=pool, givens=TESTS["30-39 givens"], seed=1), tokenizer)
            summary = tune(model, "own", args, own, out / "own")
            validation = make(args.num_tests, givens=TESTS["30-39 givens"], split="validation")
            tried = [solve(model, text, validation, args.denoising_steps, setting) for setting in SETTINGS]
            for setting, scores in zip(SETTINGS, tried, strict=True):
                stop, bound = setting["stop"], setting["sampler"].bound
                print(f"bound {bound}, stability {stop.stability}, confidence {stop.confidence}:", end="")
                print(f"{scores['exact']:8.1%} of the validation puzzles in {scores['steps']:.1f} steps", flush=True)
            quick = [at for at, scores in enumerate(tried) if scores["steps"] <= MOST_STEPS]
            chosen = SETTINGS[max(quick or range(len(tried)), key=lambda at: tried[at]["exact"])]
            results["own"] = {**summary, "setting": chosen, "validation": tried, "after": report("own", model, chosen)}
            save()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dgemma/text", help="a checkpoint with a tokenizer (%(default)s)")
    parser.add_argument("--how", nargs="+", choices=("full", "lora"), default=["full", "lora"])
    for name, (on_gpu, without, meaning) in NUMBERS.items():
        default = on_gpu if torch.cuda.is_available() else without
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (%(default)s)")
    parser.add_argument("--minutes", type=float, help="length of each training, instead of a number of steps")
    parser.add_argument("--own-minutes", type=float, help="after --how full, train on own steps for this long")
    parser.add_argument("--puzzles", type=Path, help="folder for the puzzles")
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1), help="processes that make puzzles")
    parser.add_argument("--out", type=Path, help="default: a temporary folder")
    parser.add_argument("--fast", action="store_true", help="train with kernels, on a GPU: slower start, faster steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as scratch:
        arguments = parser.parse_args()
        main(arguments, arguments.out or Path(scratch))
