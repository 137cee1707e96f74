"""Options that several commands share (which model, on what, with which sampler) and how they are read."""

import argparse
import ast
import re
import sys
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch

from dgemma import sampling
from dgemma.generate import Denoiser
from dgemma.model import DiffusionGemma
from dgemma.noise import HybridNoise, MaskNoise, Noise, UniformNoise
from dgemma.sampling import ConstantTemperature, Sampler
from dgemma.tokenizer import Tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES = tuple(_DTYPES)


def _kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "-", name).lower()


SAMPLERS: dict[str, type[Sampler]] = {
    _kebab(name): getattr(sampling, name)
    for name in sampling.__all__
    if isinstance(getattr(sampling, name), type)
    and issubclass(getattr(sampling, name), Sampler)
    and getattr(sampling, name) is not Sampler
}


def add_model_options(parser: argparse.ArgumentParser, *, default: str) -> None:
    """-m, --device, --dtype, --fast."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "-m", "--model", default=default, metavar="PATH", help="checkpoint folder, dgemma/NAME or hub id (%(default)s)"
    )
    group.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, … (cuda where there is one)")
    group.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (float32 on a CPU, else the checkpoint's)")
    group.add_argument("--fast", action="store_true", help="use the Triton kernels and CUDA graphs; needs a GPU")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """--steps, --sampler, --noise, --temperature, --seed."""
    group = parser.add_argument_group("sampling", "What is left out is the checkpoint's own choice.")
    group.add_argument("--steps", type=int, metavar="N", help="most denoising steps a canvas may take")
    group.add_argument(
        "--sampler",
        metavar="NAME[:FIELD=VALUE,…]",
        help=f"which positions to keep: {', '.join(SAMPLERS)}; for instance threshold:tau=0.8,greedy=True",
    )
    group.add_argument("--noise", choices=("uniform", "mask", "hybrid"), default="uniform", help="(%(default)s)")
    group.add_argument("--temperature", type=float, metavar="T", help="one temperature for every step")
    group.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens only")
    group.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens that sum to P")
    group.add_argument("--seed", type=int, default=0, metavar="S", help="same seed, same text (%(default)s)")


def pick_device(name: str | None) -> torch.device:
    """The device asked for, or a GPU where there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {name!r}.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU that torch can see, and there is none. Leave it out for the CPU.")
    return device


def read_dtype(name: str | None) -> torch.dtype | None:
    """The dtype that --dtype names."""
    return None if name is None else _DTYPES[name]


def load_model(arguments: argparse.Namespace) -> DiffusionGemma:
    """The model that -m, --device and --dtype name."""
    device = pick_device(arguments.device)
    dtype = read_dtype(arguments.dtype) or (torch.float32 if device.type == "cpu" else None)
    return DiffusionGemma.from_pretrained(arguments.model, dtype=dtype, device=device).eval()


def load_denoiser(arguments: argparse.Namespace) -> tuple[DiffusionGemma, Denoiser]:
    """The model, and what denoises with it: itself, or with --fast the kernels'."""
    model = load_model(arguments)
    if not arguments.fast:
        return model, model
    try:
        from dgemma_kernels import accelerate
    except ImportError as error:
        raise ImportError(f"--fast needs the kernels: {error}") from error
    fast: Any = accelerate(model)  # a Denoiser whose cache is its own
    return model, fast


def load_tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    """The tokenizer beside the checkpoint."""
    return Tokenizer.from_pretrained(arguments.model)


def read_noise(name: str, vocab_size: int, mask_token_id: int | None) -> Noise:
    """The process that --noise names.

    Example: `read_noise("mask", 4096, 4)`.
    """
    if name == "uniform":
        return UniformNoise(vocab_size)
    if mask_token_id is None:
        raise ValueError(f"--noise {name} needs a mask token, and this checkpoint's tokenizer has none. Use uniform.")
    return {"mask": MaskNoise, "hybrid": HybridNoise}[name](vocab_size, mask_token_id=mask_token_id)


def read_sampler(text: str) -> Sampler:
    """A sampler from its name and fields.

    Example: `read_sampler("threshold:tau=0.8,greedy=True")`.
    """
    name, _, listed = text.partition(":")
    if name not in SAMPLERS:
        raise ValueError(f"--sampler must be one of {', '.join(SAMPLERS)}, got {name!r}.")
    known = [field.name for field in fields(SAMPLERS[name])]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for pair in filter(None, listed.split(",")):
        field, equals, value = pair.partition("=")
        if not equals or field not in known:
            raise ValueError(
                f"--sampler {name} takes FIELD=VALUE with {', '.join(known) or 'no fields'}, got {pair!r}."
            )
        values[field] = _literal(value)
    return SAMPLERS[name](**values)


def sampling_options(arguments: argparse.Namespace, model: DiffusionGemma, tokenizer: Tokenizer) -> dict[str, Any]:
    """What `generate`, `infill` and `edit` take, as far as the command line says it."""
    options: dict[str, Any] = {
        "noise": read_noise(arguments.noise, model.config.vocab_size, tokenizer.mask_token_id),
        "seed": arguments.seed,
    }
    if arguments.sampler is not None:
        options["sampler"] = read_sampler(arguments.sampler)
    if arguments.temperature is not None:
        options["temperature"] = ConstantTemperature(arguments.temperature)
    for name in ("steps", "top_k", "top_p"):
        if getattr(arguments, name) is not None:
            options[name] = getattr(arguments, name)
    return options


def read_text(words: Iterable[str]) -> str:
    """The words of the command line as one text, or what is piped in when there are none or a single "-"."""
    text = " ".join(words)
    if text in ("", "-"):
        if sys.stdin.isatty():
            raise ValueError('needs a text. Write it in quotes, or pipe it in: echo "Once upon" | dgemma generate')
        text = sys.stdin.read().rstrip("\n")
    if not text.strip():
        raise ValueError("needs a text, and got an empty one.")
    return text


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
