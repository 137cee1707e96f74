"""Options that several commands share (which model, on what, with which sampler), and what is loaded by them."""

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checkpoint.weights import resolve
from dgemma.cli import types
from dgemma.diffusion.noise import HybridNoise, MaskNoise, Noise, UniformNoise
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.layout import lay_out_by_column
from dgemma.run.defaults import default_sampler, warn_of_noise
from dgemma.run.step import Denoiser
from dgemma.sampling import Sampler
from dgemma.values import rebuild_noise, rebuild_sampler

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NOISES = ("uniform", "mask", "hybrid")


class Writer(NamedTuple):
    """What writes a text: a denoiser, its tokenizer, and the options of `generate`."""

    denoiser: Denoiser
    tokenizer: Tokenizer
    settings: dict[str, Any]

    def tokens(self, row: Sequence[Any]) -> torch.Tensor:
        """One row, (1, N), where the model is."""
        return torch.tensor([row], device=self.denoiser.device)


def add_model_options(parser: argparse.ArgumentParser, *, default: str, fast: bool = True) -> None:
    """-m, --device, --dtype, --fast, --weights."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "-m",
        "--model",
        default=default,
        metavar="PATH",
        help="checkpoint folder, dgemma/NAME for one that ships, or hub id (%(default)s)",
    )
    group.add_argument(
        "--device", type=types.device, metavar="NAME", help="cpu, cuda or cuda:N (a GPU where there is one)"
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        metavar="NAME",
        help=f"of the weights: {', '.join(DTYPES)} (float32 on a CPU, else as stored)",
    )
    if fast:
        group.add_argument("--fast", action="store_true", help="Triton kernels and CUDA graphs; needs a GPU")
        group.add_argument(
            "--weights",
            choices=("bf16", "packed", "fp8"),
            help="with --fast: packed is bf16 in 12 bits without loss, 1.1 times as fast for one text; fp8 rounds the "
            "experts to 8 bits, 1.5 times as fast (bf16)",
        )


def add_noise_option(
    parser: Any,
    *,
    choices: Sequence[str] = _NOISES,
    help: str = "the process that the model learnt",
) -> None:
    """--noise."""
    parser.add_argument(
        "--noise", choices=choices, metavar="KIND", help=f"{help}: {', '.join(choices)} (what the checkpoint says)"
    )


def add_sampler_option(parser: Any, *, default: str) -> None:
    """--sampler."""
    parser.add_argument(
        "--sampler",
        type=types.sampler,
        metavar="NAME[:FIELD=VALUE,…]",
        help=f"what decides which positions to keep ({default})",
    )


def add_seed_option(parser: Any, *, help: str) -> None:
    """--seed."""
    parser.add_argument("--seed", type=types.seed, default=0, metavar="S", help=f"{help} (%(default)s)")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """--steps, --sampler, --noise, --temperature, --top-k, --top-p, --seed."""
    group = parser.add_argument_group("sampling", "What is left out is the checkpoint's own choice.")
    group.add_argument("--steps", type=types.count, metavar="N", help="the most denoising steps a canvas may take")
    add_sampler_option(group, default="all are at the end of `dgemma generate --help`")
    add_noise_option(group)
    group.add_argument("--temperature", type=types.positive(), metavar="T", help="one temperature for every step")
    group.add_argument("--top-k", type=types.count, metavar="K", help="sample from the K likeliest tokens only")
    group.add_argument(
        "--top-p", type=types.positive(1.0), metavar="P", help="sample from the likeliest tokens that sum to P"
    )
    add_seed_option(group, help="same seed, same text")


def load_model(arguments: argparse.Namespace, *, dtype: torch.dtype | None = None) -> DiffusionGemma:
    """The model that -m names, where --device says and as --dtype says, else in `dtype`."""
    device = pick_device(arguments)
    dtype = DTYPES.get(arguments.dtype, dtype or (torch.float32 if device.type == "cpu" else None))
    # Some CPUs take another way for small 16-bit products, and torch then prints where in its sources it does.
    warnings.filterwarnings("ignore", message=".*mkldnn_matmul failed")
    return DiffusionGemma.from_pretrained(arguments.model, dtype=dtype, device=device).eval()


def pick_device(arguments: argparse.Namespace) -> torch.device:
    """The device asked for, or a GPU where there is one."""
    return arguments.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_denoiser(arguments: argparse.Namespace) -> Denoiser:
    """The model, or with --fast the kernels', which then is all that holds its weights."""
    if not arguments.fast:
        if arguments.weights is not None:
            raise ValueError("--weights must come with --fast, whose weights they are. Add it, or leave both out.")
        model = load_model(arguments)
        if model.device.type == "cpu":
            lay_out_by_column(model)
        return model
    if pick_device(arguments).type != "cuda":
        raise ValueError("--fast needs a GPU that torch can see, got none. Leave it out.")
    try:
        from dgemma_kernels import accelerate
    except ImportError as error:
        raise ValueError(f"--fast needs the kernels: {error}") from None
    weights = arguments.weights or "bf16"
    fast: Any = accelerate(load_model(arguments), weights, release=weights != "bf16")  # its cache is its own
    return fast


def load_writer(arguments: argparse.Namespace) -> Writer:
    """All that `generate`, `chat`, `infill` and `edit` need, as far as the command line says it."""
    tokenizer = Tokenizer.from_pretrained(arguments.model)
    denoiser = load_denoiser(arguments)
    names = ("steps", "sampler", "temperature", "top_k", "top_p", "seed")
    settings = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    settings["noise"] = make_noise(arguments, denoiser, tokenizer)
    check_sampler(arguments, settings["noise"], denoiser)
    warn_of_noise(denoiser, settings["noise"])  # now, in front of the live view
    return Writer(denoiser, tokenizer, settings)


def check_sampler(arguments: argparse.Namespace, noise: Noise, denoiser: Denoiser) -> None:
    """A sampler, or the checkpoint's where none is named, is only ever run under noise that it is valid for."""
    sampler = arguments.sampler
    chosen = sampler or own_sampler(arguments, denoiser)
    if noise.kind not in chosen.valid_for:
        fitting = " or ".join(f"--noise {kind}" for kind in sorted(chosen.valid_for))
        owner, fix = ("--sampler", "") if sampler else ("The checkpoint's sampler", " Name another --sampler.")
        raise ValueError(f"{owner} {type(chosen).__name__} must run under {fitting}, got {noise.kind} noise.{fix}")


def make_noise(arguments: argparse.Namespace, model: Denoiser, tokenizer: Tokenizer) -> Noise:
    """The process that --noise names, over the model's vocabulary; without one what the checkpoint learnt."""
    name, vocab_size = arguments.noise, model.config.vocab_size
    if name is None:
        return own_noise(arguments, model) or UniformNoise(vocab_size)
    if name == "uniform":
        return UniformNoise(vocab_size)
    if tokenizer.mask_token_id is None:
        raise ValueError(f"--noise {name} needs a mask token, and this checkpoint's tokenizer has none. Use uniform.")
    kind = {"mask": MaskNoise, "hybrid": HybridNoise}[name]
    return kind(vocab_size, mask_token_id=tokenizer.mask_token_id)


def own_sampler(arguments: argparse.Namespace, model: Denoiser) -> Sampler:
    """What the checkpoint says to write with; the published one where it says nothing."""
    if model.generation.sampler is None:
        return default_sampler(model)
    with _in_config(arguments, "sampler"):
        return rebuild_sampler(model.generation.sampler)


def own_noise(arguments: argparse.Namespace, model: Denoiser) -> Noise | None:
    """What the checkpoint says that it learnt; None where it says nothing."""
    if model.generation.noise is None:
        return None
    with _in_config(arguments, "noise"):
        return rebuild_noise(model.generation.noise, model.config.vocab_size)


@contextmanager
def _in_config(arguments: argparse.Namespace, entry: str) -> Iterator[None]:
    """Says of a rule that an entry of config.json breaks where the entry is, and which option does without it."""
    try:
        yield
    except ValueError as error:
        file = resolve(arguments.model, files=["config.json"]) / "config.json"
        rule, way_out = str(error).removesuffix("."), f", or name another as --{entry}" if entry in arguments else ""
        raise ValueError(f'"{entry}" in {file} {rule}. Correct it there{way_out}.') from None


def read_text(words: Sequence[str]) -> str:
    """The words of the command line as one text, or what is piped in when there are none or a single "-"."""
    if len(words) > 1 and (words[0].startswith("dgemma/") or Path(words[0], "config.json").is_file()):
        raise ValueError(f"{words[0]} is a model, not part of the text. Write --model in front of it.")
    if list(words) not in ([], ["-"]):
        text = " ".join(words)
    elif sys.stdin is None or sys.stdin.isatty():
        raise ValueError("a text is needed. Write it in quotes, or pipe it in and write -.")
    else:
        text = read_input()
    if not text.strip():
        raise ValueError("the text must not be empty.")
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of the command line that are not UTF-8 arrive as lone surrogates
        raise ValueError("the text must be UTF-8, got other bytes. Convert it with iconv.") from None
    return text


def read_input() -> str:
    """All of standard input, without the last line's end."""
    try:
        return sys.stdin.buffer.read().decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input must be UTF-8, got {error.reason} at byte {error.start}.") from None
