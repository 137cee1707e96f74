"""Compare the samplers and stop rules on the models that ship: quality against forwards.

Samplers for mask noise solve Sudokus with 24 to 29 clues. Samplers of either noise continue held-out text. The score is
the autoregressive negative log-likelihood of the new text under the same weights; a low value means fluent or dull
text. Stop rules end canvases early. The second command made most tables of docs/samplers.md on one H200.

    python examples/19_compare_samplers.py                              eight puzzles and two prompts, minutes on a CPU
    python examples/19_compare_samplers.py --num-tests 1000 --num-prompts 256 --max-steps 81 --out runs/samplers
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch

import dgemma
from dgemma.data import sudoku
from dgemma.sampling import (
    KLASS,
    P2,
    Ancestral,
    BlockRefinement,
    Confidence,
    ConfidenceGap,
    EntropyBound,
    FactorThreshold,
    FirstHitting,
    LeaveOneOutGibbs,
    ReMDM,
    StableAndConfident,
    StepCap,
    Threshold,
    TokenEditing,
    Unchanged,
)

Settings = dict[str, dict[str, Any]]
PUBLISHED = StableAndConfident()
GIBBS = LeaveOneOutGibbs(corrections=1, num_positions=8, choice_temperature=0.5)


def mask_samplers() -> Settings:
    """Return options of `generate` by label, for samplers that run under mask noise."""
    by_steps: dict[str, Any] = {
        "Ancestral": Ancestral(),
        "Confidence, random order": Confidence(order="random", greedy=True),
        "Confidence": Confidence(greedy=True),
        "Confidence, margin order": Confidence(order="margin", greedy=True),
        "P2": P2(greedy=True),
        "ReMDM, conf": ReMDM(strategy="conf"),
    }
    adaptive: dict[str, Any] = {
        "EntropyBound, 0.01 nats": EntropyBound(bound=0.01, greedy=True),
        "EntropyBound, 0.1 nats": EntropyBound(bound=0.1, greedy=True),
        "EntropyBound, 0.5 nats": EntropyBound(bound=0.5, greedy=True),
        "Threshold, 0.9": Threshold(tau=0.9, greedy=True),
        "Threshold, 0.99": Threshold(tau=0.99, greedy=True),
        "FactorThreshold": FactorThreshold(greedy=True),
        "KLASS": KLASS(greedy=True),
    }
    settings = {
        f"{label}, {steps} steps": {"sampler": sampler, "steps": steps, "stop": None}
        for label, sampler in by_steps.items()
        for steps in (6, 12, 48)
    }
    settings |= {label: {"sampler": sampler, "steps": 81, "stop": None} for label, sampler in adaptive.items()}
    settings["TokenEditing"] = {"sampler": TokenEditing(), "steps": 81, "stop": Unchanged()}
    settings["FirstHitting"] = {"sampler": FirstHitting(), "steps": 81, "stop": None}
    return settings


def mask_stop_rules() -> Settings:
    """Return options by label, for stop rules with `Confidence` and with `TokenEditing`, which may edit tokens."""
    quota = {"sampler": Confidence(order="margin", greedy=True), "steps": 48}
    editing = {"sampler": TokenEditing(), "steps": 48}
    return {
        "Confidence, no rule": {**quota, "stop": None},
        "Confidence, StepCap(12)": {**quota, "stop": StepCap(12)},
        "Confidence, ConfidenceGap()": {**quota, "stop": ConfidenceGap()},
        "Confidence, StableAndConfident()": {**quota, "stop": PUBLISHED},
        "TokenEditing, no rule": {**editing, "stop": None},
        "TokenEditing, Unchanged()": {**editing, "stop": Unchanged()},
    }


def uniform_samplers() -> Settings:
    """Return options by label, for samplers that run under uniform noise."""
    by_steps: dict[str, Any] = {
        "Ancestral": Ancestral(),
        "BlockRefinement": BlockRefinement(),
        "LeaveOneOutGibbs": GIBBS,
    }
    settings = {
        f"{label}, {steps} steps": {"sampler": sampler, "steps": steps, "stop": None}
        for label, sampler in by_steps.items()
        for steps in (16, 48)
    }
    for bound in (0.1, 3.0, 12.0, 30.0):
        settings[f"EntropyBound, {bound:g} nats"] = {
            "sampler": EntropyBound(bound=bound),
            "steps": 48,
            "stop": PUBLISHED,
        }
    return settings


def uniform_stop_rules() -> Settings:
    """Return options by label, for stop rules with the published sampler, which decides every position at each step."""
    published = {"sampler": EntropyBound(bound=12.0), "steps": 48}
    return {
        "EntropyBound, no rule": {**published, "stop": None},
        "EntropyBound, StableAndConfident()": {**published, "stop": PUBLISHED},
        "EntropyBound, StableAndConfident(confidence=0.1)": {**published, "stop": StableAndConfident(confidence=0.1)},
        "EntropyBound, StepCap(16)": {**published, "stop": StepCap(16)},
        "EntropyBound, ConfidenceGap()": {**published, "stop": ConfidenceGap()},
    }


def text_samplers() -> Settings:
    """Return options by label, for samplers that write text under mask noise."""
    by_steps = {"Ancestral": Ancestral(), "Confidence": Confidence(), "P2": P2(), "ReMDM, conf": ReMDM(strategy="conf")}
    adaptive = {
        "EntropyBound, 1 nat": EntropyBound(bound=1.0),
        "EntropyBound, 4 nats": EntropyBound(bound=4.0),
        "Threshold, 0.9": Threshold(tau=0.9),
        "FactorThreshold": FactorThreshold(),
        "KLASS": KLASS(),
    }
    settings: Settings = {
        f"{label}, {steps} steps": {"sampler": sampler, "steps": steps, "stop": None}
        for label, sampler in by_steps.items()
        for steps in (16, 48)
    }
    return settings | {label: {"sampler": sampler, "steps": 64, "stop": None} for label, sampler in adaptive.items()}


def sudoku_task(model: dgemma.DiffusionGemma, tests: sudoku.Puzzles) -> Any:
    """Return a task for `sweep`. The task returns whether each grid is correct, and the run that wrote the grids."""
    solutions = torch.from_numpy(tests.solutions).to(model.device)

    def solve(options: dict[str, Any], seed: int) -> tuple[torch.Tensor, dgemma.Generation]:
        completion = sudoku.complete(model, tests.puzzles, temperature=1.0, seed=seed, progress=False, **options)
        return (completion.grids == solutions).all(1), completion.generation

    return solve


def score_text(model: dgemma.DiffusionGemma, tokens: torch.Tensor, num_new: int) -> dict[str, torch.Tensor]:
    """Score the last num_new tokens of rows (B, N) up to their end-of-text: nats, repeats, distinct pairs; (B,) each.

    "nats" is the causal negative log-likelihood per token.
    """
    with torch.no_grad():
        log_probs = model.causal_logits(tokens[:, :-1]).float().log_softmax(-1)
    nats = -log_probs.gather(-1, tokens[:, 1:, None])[:, -num_new:, 0]
    new = tokens[:, -num_new:]
    is_end = torch.isin(new, torch.tensor(model.generation.eos_token_id, device=new.device))
    lengths = (is_end.cumsum(1) - is_end.long() == 0).sum(1)  # (B,), the first end-of-text included
    scores = []
    for row, row_nats, length in zip(new.tolist(), nats.tolist(), lengths.tolist(), strict=True):
        pairs = list(itertools.pairwise(row[:length])) or [(0, 1)]
        repeats = sum(one == other for one, other in pairs)
        scores.append((sum(row_nats[:length]) / length, repeats / len(pairs), len(set(pairs)) / len(pairs)))
    return dict(zip(("nats", "repeats", "distinct_pairs"), torch.tensor(scores).T, strict=True))


def held_out_rows(tokenizer: dgemma.Tokenizer, num_rows: int, row_len: int) -> torch.Tensor:
    """Return rows (num_rows, row_len) of the held-out text, each starting with the begin-of-text token."""
    text = (Path(dgemma.__file__).parent / "assets" / "text" / "held_out.txt").read_text()
    tokens = torch.tensor(tokenizer.encode(text, bos=False))
    starts = torch.linspace(0, len(tokens) - row_len, num_rows).long()  # rows overlap if there are many
    rows = torch.stack([tokens[start : start + row_len - 1] for start in starts.tolist()])
    return torch.nn.functional.pad(rows, (1, 0), value=tokenizer.bos_token_id)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--num-tests", type=int, default=8, help="Sudokus (%(default)s)")
parser.add_argument("--num-prompts", type=int, default=2, help="texts to continue (%(default)s)")
parser.add_argument(
    "--max-steps",
    type=int,
    default=12,
    help="most steps of a run; settings with more steps in their name are left out (%(default)s)",
)
parser.add_argument("--out", type=Path, help="a folder for samplers.json")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()


def within_cap(settings: Settings) -> Settings:
    """Cap the steps of all settings. A setting whose label names a larger number of steps is left out."""
    return {
        label: {**options, "steps": min(options["steps"], args.max_steps)}
        for label, options in settings.items()
        if options["steps"] <= args.max_steps or not label.endswith(" steps")
    }


results: dict[str, list[dict[str, Any]]] = {}

model = dgemma.DiffusionGemma.from_pretrained("dgemma/sudoku", dtype=torch.float32, device=args.device)
puzzles = sudoku.generate_puzzles(args.num_tests, givens=(24, 29), split="test", seed=1)
task = sudoku_task(model, puzzles)
for group, settings in (("mask", mask_samplers()), ("mask stop rules", mask_stop_rules())):
    print(f"\n{group + ', Sudoku with 24 to 29 clues':56}{'exact':>8}{'± error':>9}{'forwards':>10}")
    results[group] = []
    for label, options in within_cap(settings).items():
        (row,) = dgemma.sweep(task, {label: options}, progress=False).rows
        results[group].append({"label": label, "exact": row.quality, "error": row.error, "forwards": row.forwards})
        print(f"{label:56}{row.quality:8.1%}{row.error:9.1%}{row.forwards:10.1f}", flush=True)

model = dgemma.DiffusionGemma.from_pretrained("dgemma/text", dtype=torch.float32, device=args.device)
tokenizer = dgemma.Tokenizer.from_pretrained("dgemma/text")
num_new = model.config.canvas_length
rows = held_out_rows(tokenizer, args.num_prompts, 32 + num_new).to(args.device)
prompts = rows[:, :32]


def report(group: str, label: str, tokens: torch.Tensor, forwards: float) -> None:
    """Print and keep the scores of rows (B, 32 + 64)."""
    scores = score_text(model, tokens, num_new)
    error = scores["nats"].std().item() / len(tokens) ** 0.5
    found = {name: value.mean().item() for name, value in scores.items()}
    results[group].append({"label": label, **found, "error": error, "forwards": forwards})
    shares = f"{found['repeats']:9.1%}{found['distinct_pairs']:10.3f}"
    print(f"{label:56}{found['nats']:8.2f}{error:9.2f}{shares}{forwards:10.1f}", flush=True)


for group, settings in (
    ("uniform", uniform_samplers()),
    ("uniform stop rules", uniform_stop_rules()),
    ("mask text", text_samplers()),
):
    if group == "mask text":
        model = dgemma.DiffusionGemma.from_pretrained("dgemma/text-mask", dtype=torch.float32, device=args.device)
    print(f"\n{group + ', held-out text':56}{'nats':>8}{'± error':>9}{'repeats':>9}{'distinct':>10}{'forwards':>10}")
    results[group] = []
    if group == "uniform":
        report(group, "the text itself", rows, 0.0)
        written = dgemma.generate_causal(model, prompts, max_new_tokens=num_new, temperature=0.8, eos_token_ids=[])
        report(group, "autoregressive, temperature 0.8", torch.cat((prompts, written), 1), float(num_new))
    for label, options in within_cap(settings).items():
        common = {"max_new_tokens": num_new, "eos_token_ids": [], "progress": False}
        out = dgemma.generate(model, prompts, **common, **options)
        report(group, label, out.tokens, out.steps.double().sum(1).mean().item())

if args.out is not None:
    args.out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    run = f"{gpu}, torch {torch.__version__}, float32, {args.num_tests} puzzles, {args.num_prompts} prompts"
    (args.out / "samplers.json").write_text(json.dumps({"run": run, **results}, indent=1) + "\n")
