"""`dgemma quantize`: write a quantised copy of a checkpoint."""

import argparse
from dataclasses import asdict
from typing import Any

from dgemma.checkpoint.quantizing import quantize_checkpoint
from dgemma.cli import options, output, types
from dgemma.model.quantize import FORMATS, Quantization


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
        help="format of attention and dense MLPs, or none to keep them plain (%(default)s)",
    )
    parser.add_argument(
        "--group-size", type=types.count, default=64, metavar="N", help="columns per scale in int4 (%(default)s)"
    )
    parser.add_argument(
        "--zero-points", action="store_true", help="give each group of int4 a zero point: smaller errors, more bytes"
    )
    options.add_device_option(parser)
    output.add_json_option(parser)
    parser.set_defaults(run=_quantize)


def _quantize(arguments: argparse.Namespace) -> None:
    quantization = Quantization(
        experts=arguments.to,
        dense=None if arguments.dense == "none" else arguments.dense,
        group_size=arguments.group_size,
        symmetric=not arguments.zero_points,
    )
    device = options.pick_device(arguments)
    report = quantize_checkpoint(arguments.checkpoint, arguments.out, quantization, device=device)
    if arguments.json:
        output.print_json({"out": arguments.out, "memory": [asdict(part) for part in report.parts]})
    else:
        output.print_text(str(report))
