"""Measure the quality of quantised weights: likelihood bound, accuracy and steps per canvas against bfloat16.

Every format is applied to experts, attention and dense MLPs of the checkpoints in the package, but not to routers,
self-conditioning or the embedding. A second part rounds random matrices whose statistics resemble those of large
models. A third part also rounds the inputs of int4 experts, as `accelerate(precision=("experts",))` does. Results are
added to a JSON file, so that an interrupted run continues. With `--corpus`, a larger model is trained on this text
first, on a GPU, and measured like `dgemma/text`.

    python kernels/benchmarks/quality.py --out docs/results/quantized.json

    python examples/text_corpus/prepare.py --out runs/corpus
    python kernels/benchmarks/quality.py --out docs/results/quantized.json --corpus runs/corpus
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dgemma
from dgemma.checkpoint.quantizing import calibration, quantize_with_calibration
from dgemma.data import sudoku
from dgemma.data.corpus import prepare_corpus
from dgemma.data.text import TextSource
from dgemma.diffusion.noise import UniformNoise
from dgemma.files import write_json
from dgemma.quantization.rounding import Quantization, quantize
from dgemma.quantization.weights import quantized_weights, set_weight
from dgemma.train import Objective, TrainConfig, balanced_routers, evaluate, muon, soften_attention, train
from dgemma_kernels import accelerate_training
from dgemma_kernels.formats.float8 import quantize as to_float8

FORMATS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "int8": {"to": "int8"},
    "fp8": {"to": "fp8"},
    "int4, groups of 32": {"to": "int4", "group_size": 32},
    "int4, groups of 32, zero points": {"to": "int4", "group_size": 32, "symmetric": False},
    "int4, groups of 64": {"to": "int4", "group_size": 64},
    "int4, groups of 64, zero points": {"to": "int4", "group_size": 64, "symmetric": False},
    "int4, groups of 64, calibrated": {"to": "int4", "group_size": 64, "calibrate": True},
    "nvfp4": {"to": "nvfp4"},
}


def load(
    checkpoint: str, settings: dict[str, Any] | None, device: str = "cpu"
) -> tuple[dgemma.DiffusionGemma, float | None]:
    """Return the model with rounded weights, as plain tensors for speed, and the relative error of the rounding."""
    model = dgemma.DiffusionGemma.from_pretrained(checkpoint, dtype=torch.float32, device=device)
    model.requires_grad_(False)
    if settings is None:
        return model, None
    exact = {name: weight.clone() for name, weight in model.state_dict().items()}
    group = {name: settings[name] for name in ("group_size", "symmetric") if name in settings}
    quantization = Quantization(experts=settings["to"], dense=settings["to"], **group)
    run = calibration_text(model, checkpoint) if settings.get("calibrate") else lambda model: None
    quantize_with_calibration(model, quantization, run)
    squares = torch.zeros(2, dtype=torch.float64)
    for name, weight in list(quantized_weights(model)):
        rounded = weight.decode(torch.float32)
        difference, whole = (rounded - exact[name]).double(), exact[name].double()
        squares += torch.stack([difference.square().sum(), whole.square().sum()]).cpu()
        set_weight(model, name, rounded)
    model.requires_grad_(False)
    return model, math.sqrt(squares[0] / squares[1])


def round_inputs(model: dgemma.DiffusionGemma) -> None:
    """Let the experts round their inputs to float8, with one scale per token."""
    layers: list[Any] = list(model.layers)
    for layer in layers:
        gate_up = layer.experts.gate_up
        layer.experts.gate_up = lambda rows, ends, fn=gate_up: fn(to_float8(rows).decode().to(rows.dtype), ends)


def calibration_text(model: dgemma.DiffusionGemma, checkpoint: str) -> Callable[[dgemma.DiffusionGemma], None]:
    """Return a function that runs the model on 16 rows of text or puzzles that the measurement does not use."""
    if checkpoint == "dgemma/sudoku":
        puzzles = sudoku.generate_puzzles(16, givens=(24, 29), split="train", exact=False)
        source = sudoku.SudokuSource(pool=puzzles, givens=(24, 29))
        return calibration(source(0, range(16)).tokens, sudoku.sudoku_noise("mask"), canvas_len=81)
    tokens = held_out_tokens()[-16 * 128 :].view(16, 128)
    return calibration(tokens, UniformNoise(model.config.vocab_size), canvas_len=64)


def held_out_tokens() -> Tensor:
    tokenizer = dgemma.Tokenizer.from_pretrained("dgemma/text")
    held_out = (Path(dgemma.__file__).parent / "assets" / "text" / "held_out.txt").read_text()
    return torch.tensor(tokenizer.encode(held_out, bos=False))


def measure_text(model: dgemma.DiffusionGemma, rows: int, samples: int, stories: int) -> dict[str, Any]:
    """Return bits per byte on held-out text, and the steps per canvas of stories by the default sampler."""
    tokenizer = dgemma.Tokenizer.from_pretrained("dgemma/text")
    tokens = held_out_tokens()[: 64 * rows].view(-1, 64)
    num_bytes = sum(len(tokenizer.decode(row).encode()) for row in tokens)
    texts = torch.nn.functional.pad(tokens, (1, 0), value=tokenizer.bos_token_id)
    noise = UniformNoise(model.config.vocab_size)
    bound = evaluate(model, texts, noise, num_samples=samples, num_bytes=num_bytes, progress=False)
    assert bound.bits_per_byte is not None
    prompt = torch.tensor([tokenizer.encode("Once upon a time there was")] * stories)
    out = dgemma.generate(model, prompt.to(model.device), max_new_tokens=64, eos_token_ids=(), seed=0, progress=False)
    causal = bound.causal.value * bound.num_tokens / num_bytes / math.log(2)
    return {
        "bits_per_byte": bound.bits_per_byte.value,
        "causal_bits_per_byte": causal,
        "steps_per_canvas": out.steps.double().mean().item(),
    }


def measure_sudoku(model: dgemma.DiffusionGemma, count: int, samples: int) -> dict[str, Any]:
    """Return exact grids and steps on hard test puzzles, and the bound of their solutions in nats per cell."""
    puzzles = sudoku.generate_puzzles(count, givens=(24, 29), split="test")
    sampler = dgemma.EntropyBound(bound=0.01, greedy=True)
    scores = sudoku.complete(model, puzzles.puzzles, sampler=sampler, temperature=1.0, progress=False).scores(
        puzzles.solutions
    )
    source = sudoku.SudokuSource(pool=puzzles, givens=(24, 29), frozen_share=1.0)
    noise = sudoku.sudoku_noise("mask")
    bound = evaluate(model, source, noise, num_rows=count, num_samples=samples, progress=False)
    return {"exact": scores["exact"], "steps_per_canvas": scores["steps"], "nats_per_cell": bound.nelbo.value}


def random_weights(kind: str) -> Tensor:
    """Return random values in the shape of an expert's down projection: normal, heavy-tailed, or with large columns."""
    generator = torch.Generator().manual_seed(0)
    shape = (2816, 704)
    normal = torch.randn(shape, generator=generator)
    if kind == "normal":
        return 0.02 * normal
    # Student's t with 5 degrees of freedom.
    heavy = normal / (torch.randn(5, *shape, generator=generator).square().mean(0)).sqrt()
    if kind == "Student's t, 5 degrees of freedom":
        return 0.02 * heavy
    large = torch.rand(shape[1], generator=generator) < 0.01
    return 0.02 * heavy * torch.where(large, 10.0, 1.0)


def train_larger(corpus: Path, minutes: float, out: Path) -> dict[str, Any]:
    """Train a text model of 0.2 billion weights for `minutes`, save it to `out` and return what was trained."""
    shape = replace(
        dgemma.presets.text(),
        hidden_size=768,
        intermediate_size=768,
        num_hidden_layers=12,
        layer_types=dgemma.presets.text().layer_types[:4] * 3,
        num_attention_heads=12,
        num_key_value_heads=4,
        num_experts=16,
        moe_intermediate_size=384,
    )
    text = prepare_corpus(corpus, shape.vocab_size)
    torch.manual_seed(0)
    model = dgemma.DiffusionGemma(shape, device="cuda")
    soften_attention(model)
    model.generation = dgemma.DiffusionGemma.from_pretrained("dgemma/text").generation
    objective = Objective(
        noise=UniformNoise(shape.vocab_size), canvas_len=shape.canvas_length, canvases="all", causal_weight=0.25
    )
    source = TextSource(file=text.train, canvas_len=shape.canvas_length, num_canvases=8, batch_size=64)
    config = TrainConfig(minutes=minutes, batch_size=64, warmup=100, final_lr=0.02, ema_decay=0.99)
    with accelerate_training(model), balanced_routers(model, 0.01), tempfile.TemporaryDirectory() as run:
        result = train(model, objective, source, config, out=run, optimizer=partial(muon, lr=2e-3, momentum=0.9))
    model.to(torch.bfloat16).save_pretrained(out)
    passes = result.step * config.batch_size / source.num_rows
    return {"weights": model.num_parameters(), "minutes": minutes, "steps": result.step, "passes": passes}


KINDS = ("normal", "Student's t, 5 degrees of freedom", "Student's t, 1 % of columns ten times larger")


def measure_rounding(settings: dict[str, Any]) -> dict[str, float]:
    """Return the relative error of random matrices, |rounded - exact| / |exact|, by their kind."""
    errors = {}
    for kind in KINDS:
        weight = random_weights(kind)
        errors[kind] = float((quantize(weight, **settings).decode(torch.float32) - weight).norm() / weight.norm())
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("quantized.json"), help="JSON file (%(default)s)")
    parser.add_argument("--rows", type=int, default=64, help="rows of 64 tokens of held-out text (%(default)s)")
    parser.add_argument("--stories", type=int, default=16, help="stories of 64 tokens (%(default)s)")
    parser.add_argument("--puzzles", type=int, default=128, help="test puzzles (%(default)s)")
    parser.add_argument("--samples", type=int, default=4, help="noise levels per text and puzzle (%(default)s)")
    parser.add_argument("--corpus", type=Path, help="train a larger model on this text and measure it, on a GPU")
    parser.add_argument("--minutes", type=float, default=3.0, help="time to train the larger model (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    others = ("out", "corpus", "minutes", "device")
    arguments = {name: value for name, value in vars(options).items() if name not in others}
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    if results.setdefault("arguments", arguments) != arguments:
        parser.error(f"{options.out} was measured with {results['arguments']}")
    if options.corpus:
        with tempfile.TemporaryDirectory() as folder:
            results["larger"] = train_larger(options.corpus, options.minutes, Path(folder))
            print(results["larger"], flush=True)
            for name, settings in FORMATS.items():
                if settings is None or not settings.get("calibrate"):
                    model, error = load(folder, settings, "cuda")
                    found = measure_text(model, options.rows, options.samples, options.stories)
                    results["formats"][name]["larger"] = {"relative_error": error, **found}
                    print(name, "larger", results["formats"][name]["larger"], flush=True)
                    write_json(options.out, results)
        return
    measures: dict[str, Callable[[dgemma.DiffusionGemma], dict[str, Any]]] = {
        "dgemma/sudoku": lambda model: measure_sudoku(model, options.puzzles, options.samples),
        "dgemma/text": lambda model: measure_text(model, options.rows, options.samples, options.stories),
    }
    for name, settings in FORMATS.items():
        done = results.setdefault("formats", {}).setdefault(name, {})
        if settings is not None and not settings.get("calibrate"):
            done["rounding"] = measure_rounding(settings)
        for checkpoint, measure in measures.items():
            if checkpoint not in done:
                model, error = load(checkpoint, settings, options.device)
                done[checkpoint] = {"relative_error": error, **measure(model)}
                write_json(options.out, results)
                print(name, checkpoint, done[checkpoint], flush=True)
    inputs = results.setdefault("float8_inputs", {})
    for checkpoint, measure in measures.items():
        for kind in ("bf16", "float8"):
            if kind not in inputs.setdefault(checkpoint, {}):
                model, _ = load(checkpoint, FORMATS["int4, groups of 64"], options.device)
                if kind == "float8":
                    round_inputs(model)
                inputs[checkpoint][kind] = measure(model)
                write_json(options.out, results)
                print(kind, "inputs", checkpoint, inputs[checkpoint][kind], flush=True)


if __name__ == "__main__":
    main()
