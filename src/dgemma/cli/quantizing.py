"""`dgemma quantize`: write a quantised copy of a checkpoint."""

import argparse
from collections.abc import Callable
from dataclasses import asdict

import torch

from dgemma.checkpoint.location import resolve
from dgemma.checkpoint.quantizing import quantize_checkpoint
from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import require
from dgemma.cli import loading, output
from dgemma.files import read_text
from dgemma.model.config import ModelConfig, read_published
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.gptq import calibration
from dgemma.model.quantize import Quantization
from dgemma.run.defaults import learnt_noise

_MOST_ROWS = 128  # rows of calibration text


def _calibration(arguments: argparse.Namespace) -> Callable[[DiffusionGemma], None]:
    """Return a function that runs a model on the text. Each row is a prefix and a canvas of equal length."""
    tokens = Tokenizer.from_pretrained(arguments.checkpoint).encode(read_text(arguments.calibration), bos=False)
    canvas_len = ModelConfig.from_hf(read_published(resolve(arguments.checkpoint), "config.json")).canvas_length
    num_rows = min(_MOST_ROWS, len(tokens) // (2 * canvas_len))
    rule = f"hold at least {2 * canvas_len} tokens, two canvases"
    require(num_rows >= 1, "--calibration", rule, len(tokens), "Use a longer text.")
    rows = torch.tensor(tokens[: 2 * canvas_len * num_rows]).view(num_rows, 2 * canvas_len)
    return lambda model: calibration(rows, learnt_noise(model), canvas_len=canvas_len)(model)


def run_quantize(arguments: argparse.Namespace) -> None:
    """Write a quantised copy of a checkpoint."""
    if "int4" not in (arguments.to, arguments.dense):
        for option in ("group_size", "zero_points", "calibration"):
            name = f"--{option.replace('_', '-')}"
            require(not getattr(arguments, option), name, "be used with int4", arguments.to, f"Remove {name}.")
    quantization = Quantization(
        experts=arguments.to,
        dense=None if arguments.dense == "none" else arguments.dense,
        group_size=arguments.group_size or Quantization.group_size,
        symmetric=not arguments.zero_points,
    )
    device = loading.pick_device(arguments)
    run = None if arguments.calibration is None else _calibration(arguments)
    report = quantize_checkpoint(arguments.checkpoint, arguments.out, quantization, device=device, run=run)
    if arguments.json:
        output.print_json({"out": arguments.out, "memory": [asdict(part) for part in report.parts]})
    else:
        output.print_text(str(report))
