"""Options that several commands share: model, sampling, constraint and output."""

import argparse
from collections.abc import Sequence
from typing import Any

from dgemma.cli import types

_DTYPES = ("float32", "bfloat16", "float16")
_NOISES = ("uniform", "mask", "hybrid")
_DEFAULT_DTYPE = "float32 on a CPU and for checkpoints that ship with dgemma, otherwise as stored"


def add_model_options(
    parser: argparse.ArgumentParser, *, default: str, fast: bool = True, default_dtype: str = _DEFAULT_DTYPE
) -> None:
    """Add -m, --device, --dtype, --fast and --weights. `default_dtype` describes the default of --dtype."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "-m",
        "--model",
        default=default,
        metavar="PATH",
        help="checkpoint folder, hub id, or dgemma/NAME for a checkpoint that ships with dgemma (%(default)s)",
    )
    add_device_option(group)
    group.add_argument(
        "--dtype",
        choices=_DTYPES,
        metavar="NAME",
        help=f"dtype of the weights: {', '.join(_DTYPES)} ({default_dtype})",
    )
    if fast:
        group.add_argument("--fast", action="store_true", help="use Triton kernels and CUDA graphs; needs a GPU")
        group.add_argument(
            "--weights",
            choices=("bf16", "packed", "fp8", "int4", "nvfp4"),
            help="weight format of the experts with --fast: packed stores bf16 losslessly in 12 bits and is 1.1 times "
            "as fast for one text; fp8, int4 and nvfp4 round the weights and are 1.5 to 1.7 times as fast (default: "
            "the format of the checkpoint)",
        )


def add_device_option(parser: Any) -> None:
    """Add --device."""
    parser.add_argument(
        "--device", type=types.device, metavar="NAME", help="cpu, cuda or cuda:N (a GPU if there is one)"
    )


def add_noise_option(
    parser: Any,
    *,
    choices: Sequence[str] = _NOISES,
    help: str = "the noise that the model was trained on",
) -> None:
    """Add --noise."""
    parser.add_argument(
        "--noise", choices=choices, metavar="KIND", help=f"{help}: {', '.join(choices)} (the checkpoint's)"
    )


def add_sampler_option(parser: Any, *, default: str) -> None:
    """Add --sampler."""
    parser.add_argument(
        "--sampler",
        type=types.sampler,
        metavar="NAME[:FIELD=VALUE,…]",
        help=f"the rule that chooses which positions to keep ({default})",
    )


def add_seed_option(parser: Any, *, help: str) -> None:
    """Add --seed."""
    parser.add_argument("--seed", type=types.seed, default=0, metavar="S", help=f"{help} (%(default)s)")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add --steps, --sampler, --noise, --temperature, --top-k, --top-p and --seed."""
    group = parser.add_argument_group("sampling", "Options you omit come from the checkpoint.")
    group.add_argument("--steps", type=types.count, metavar="N", help="maximum number of denoising steps per canvas")
    add_sampler_option(group, default="the end of `dgemma generate --help` lists all")
    add_noise_option(group)
    group.add_argument("--temperature", type=types.positive(), metavar="T", help="temperature, constant over all steps")
    group.add_argument("--top-k", type=types.count, metavar="K", help="sample from the K most probable tokens")
    group.add_argument(
        "--top-p",
        type=types.positive(1.0),
        metavar="P",
        help="sample from the most probable tokens with total probability P",
    )
    add_seed_option(group, help="the same seed gives the same text")


def add_constraint_options(parser: argparse.ArgumentParser) -> None:
    """Add --regex, --json-schema and --choice."""
    group = parser.add_argument_group("constraint", "Write only texts of a given form. Use one of these options.")
    group.add_argument("--regex", metavar="PATTERN", help="texts that match a regular expression as a whole")
    group.add_argument("--json-schema", metavar="FILE", help="JSON that is valid under the schema in FILE")
    group.add_argument("--choice", action="append", metavar="TEXT", help="an allowed text; repeat the option for each")


def add_json_option(parser: Any) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_view_options(parser: argparse.ArgumentParser, *, pictures: bool = True) -> None:
    """Add --json, --quiet, --html and --gif."""
    group = parser.add_argument_group("output", "The live view needs a terminal; piped output is plain text.")
    add_json_option(group)
    group.add_argument("--quiet", action="store_true", help="show no live view and no progress bar")
    if pictures:
        group.add_argument(
            "--html",
            type=types.writable_file,
            metavar="FILE",
            help="write a web page that plays the denoising step by step",
        )
        group.add_argument(
            "--gif",
            type=types.new_gif,
            metavar="FILE",
            help="write an animated GIF; needs pip install 'dgemma[plots]'",
        )
