"""`dgemma quantize`: write a quantised copy of a checkpoint."""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from dgemma.checkpoint.quantizing import quantize_checkpoint
from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.cli import options, output, types
from dgemma.files import read_text
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.gptq import calibration
from dgemma.model.quantize import FORMATS, Quantization
from dgemma.run.defaults import learnt_noise

_MOST_ROWS = 128  # rows of calibration text


def add_commands(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "quantize",
        help="write a quantised copy of a checkpoint",
        usage="dgemma quantize CHECKPOINT --to FORMAT --out FOLDER [OPTION ...]",
        description="Quantise a checkpoint and write compressed-tensors files in the layout for vLLM. "
        "Routers, self-conditioning, norms and the embedding stay as they are.",
        epilog="example:\n  dgemma quantize google/diffusiongemma-26B-A4B-it --to int4 --out 26b-int4",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder, hub id or dgemma/NAME")
    parser.add_argument(
        "--to", required=True, choices=FORMATS, metavar="FORMAT", help=f"format of the experts: {', '.join(FORMATS)}"
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="new folder")
    parser.add_argument(
        "--dense",
        choices=(*FORMATS, "none"),
        default="fp8",
        metavar="FORMAT",
        help="format of attention and dense MLPs, or none to leave them unquantised (%(default)s)",
    )
    parser.add_argument(
        "--group-size", type=types.count, default=64, metavar="N", help="columns per scale in int4 (%(default)s)"
    )
    parser.add_argument(
        "--zero-points", action="store_true", help="give each group of int4 a zero point: smaller errors, more bytes"
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="text file for GPTQ, which reduces the errors of int4. Needs memory for the unquantised model",
    )
    options.add_device_option(parser)
    output.add_json_option(parser)
    parser.set_defaults(run=_quantize)


def _calibration(arguments: argparse.Namespace) -> Callable[[DiffusionGemma], None]:
    """Return a function that runs a model on the text, in rows of a prefix and a canvas of the same length."""
    tokens = Tokenizer.from_pretrained(arguments.checkpoint).encode(read_text(arguments.calibration), bos=False)

    def run(model: DiffusionGemma) -> None:
        canvas_len = model.config.canvas_length
        num_rows = min(_MOST_ROWS, len(tokens) // (2 * canvas_len))
        rows = torch.tensor(tokens[: 2 * canvas_len * num_rows]).view(num_rows, 2 * canvas_len)
        calibration(rows, learnt_noise(model), canvas_len=canvas_len)(model)

    return run


def _quantize(arguments: argparse.Namespace) -> None:
    quantization = Quantization(
        experts=arguments.to,
        dense=None if arguments.dense == "none" else arguments.dense,
        group_size=arguments.group_size,
        symmetric=not arguments.zero_points,
    )
    device = options.pick_device(arguments)
    run = None if arguments.calibration is None else _calibration(arguments)
    report = quantize_checkpoint(arguments.checkpoint, arguments.out, quantization, device=device, run=run)
    if arguments.json:
        output.print_json({"out": arguments.out, "memory": [asdict(part) for part in report.parts]})
    else:
        output.print_text(str(report))
