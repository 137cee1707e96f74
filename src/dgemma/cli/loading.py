"""Loading of what the options name: model, tokenizer, sampler, noise, constraint and text."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dgemma.checkpoint.loading import lay_out_by_column
from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import read_device
from dgemma.cli import output
from dgemma.constraints.languages import Choice, JsonSchema, Regex
from dgemma.diffusion.noise import HybridNoise, MaskNoise, Noise, UniformNoise
from dgemma.files import read_json
from dgemma.model.denoiser import Denoiser
from dgemma.model.diffusion import DiffusionGemma
from dgemma.quantization.weights import quantized_weights
from dgemma.run.options import CanvasOptions, learnt_noise, select, warn_of_noise

_SMALL_MODEL = 100_000_000  # weights
_MOSTLY_IDLE = 0.7  # of a core


class Writer(NamedTuple):
    """A denoiser, its tokenizer, and the options of `generate`."""

    denoiser: Denoiser
    tokenizer: Tokenizer
    settings: dict[str, Any]

    def tokens(self, row: Sequence[Any]) -> torch.Tensor:
        """Return one row (1, N) on the model's device."""
        return torch.tensor([row], device=self.denoiser.device)


def pick_constraint(arguments: argparse.Namespace, tokenizer: Tokenizer) -> Regex | None:
    """Return the constraint that --regex, --json-schema or --choice describes."""
    makers: dict[str, Callable[..., Regex]] = {
        "regex": Regex,
        "json_schema": lambda file, *of: JsonSchema(read_json(file), *of),
        "choice": Choice,
    }
    flag = next((name for name in makers if getattr(arguments, name, None) is not None), None)
    return None if flag is None else makers[flag](getattr(arguments, flag), tokenizer)


def load_model(arguments: argparse.Namespace, *, dtype: torch.dtype | None = None) -> DiffusionGemma:
    """Load the model that -m names on --device, in --dtype or else in `dtype`."""
    device = pick_device(arguments)
    dtype = pick_dtype(arguments) or dtype or (torch.float32 if device.type == "cpu" else None)
    if device.type == "cpu" and dtype != torch.float32:
        output.print_note(f"Most CPUs are slow in {arguments.dtype}. Without --dtype the model runs in float32.")
    # For small 16-bit products, torch uses another kernel on some CPUs and warns about it.
    warnings.filterwarnings("ignore", message=".*mkldnn_matmul failed")
    warnings.filterwarnings("ignore", message="Image size .* exceeds limit")  # a sentence refuses it
    model = DiffusionGemma.from_pretrained(arguments.model, dtype=dtype, device=device).eval()
    model.image_tokens = getattr(arguments, "image_tokens", None)
    if getattr(arguments, "adapter", None) is not None:
        from dgemma.train import load_lora, merge_lora  # here, because other commands start faster without it

        load_lora(model, arguments.adapter)
        if not any(quantized_weights(model)):  # the sum with a quantised weight would be rounded
            merge_lora(model)
    return model


def with_adapter(model: Denoiser, folder: str) -> DiffusionGemma:
    """Return a model with adapters that shares the other weights of `model`."""
    from dgemma.train import load_lora, share_weights

    assert isinstance(model, DiffusionGemma)  # --fast is refused
    adapted = share_weights(model)
    load_lora(adapted, folder)
    return adapted


def pick_dtype(arguments: argparse.Namespace) -> torch.dtype | None:
    """Return the dtype of --dtype, or None."""
    return None if arguments.dtype is None else getattr(torch, arguments.dtype)


def pick_device(arguments: argparse.Namespace) -> torch.device:
    """Return the device of --device, or a GPU if there is one."""
    return read_device("dgemma", arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def load_denoiser(arguments: argparse.Namespace) -> Denoiser:
    """Load the model; with --fast, return the accelerated one and release the other."""
    if not arguments.fast:
        if arguments.weights is not None:
            raise ValueError("--weights must be used with --fast. Add --fast, or remove --weights.")
        model = load_model(arguments)
        if model.device.type == "cpu":
            lay_out_by_column(model)
            if model.num_parameters() < _SMALL_MODEL and "OMP_NUM_THREADS" not in os.environ:
                # A second thread on a busy core would delay every operation. More than two threads would only wait.
                load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 1.0  # not on Windows
                wanted = 2 if (os.cpu_count() or 1) - max(load, 1.0) > _MOSTLY_IDLE else 1
                torch.set_num_threads(min(wanted, torch.get_num_threads()))
        return model
    if pick_device(arguments).type != "cuda":
        raise ValueError("--fast needs a GPU that torch can see, got none. Remove --fast.")
    try:
        from dgemma_kernels import accelerate
        from dgemma_kernels.engine.weights import stored_format
    except ImportError as error:
        raise ValueError(f"--fast needs the kernels: {error}") from None
    model = load_model(arguments)
    weights = arguments.weights or stored_format(model)
    return accelerate(model, weights, release=weights != "bf16")


def load_writer(arguments: argparse.Namespace) -> Writer:
    """Load what `generate`, `chat`, `infill` and `edit` need."""
    tokenizer = Tokenizer.from_pretrained(arguments.tokenizer or arguments.model)
    constraint = pick_constraint(arguments, tokenizer)  # first, because it may be refused
    denoiser = load_denoiser(arguments)
    chosen = {name: value for name, value in vars(arguments).items() if value is not None}
    settings: dict[str, Any] = {**select(chosen, CanvasOptions), "noise": make_noise(arguments, denoiser, tokenizer)}
    if constraint is not None:
        settings["constraint"] = constraint
    warn_of_noise(denoiser, settings["noise"])  # now, before the live view starts
    return Writer(denoiser, tokenizer, settings)


def make_noise(arguments: argparse.Namespace, model: Denoiser, tokenizer: Tokenizer) -> Noise:
    """Return the noise that --noise names, over the model's vocabulary; by default the checkpoint's."""
    name, vocab_size = arguments.noise, model.config.vocab_size
    if name is None:
        return learnt_noise(model)
    if name == "uniform":
        return UniformNoise(vocab_size)
    if tokenizer.mask_token_id is None:
        raise ValueError(f"--noise {name} needs a mask token, but this checkpoint's tokenizer has none. Use uniform.")
    kind = {"mask": MaskNoise, "hybrid": HybridNoise}[name]
    return kind(vocab_size, mask_token_id=tokenizer.mask_token_id)


def join_words(words: Sequence[str]) -> str:
    """Return the words of the command line as one text; without words, or for "-", read standard input."""
    if len(words) > 1 and (words[0].startswith("dgemma/") or Path(words[0], "config.json").is_file()):
        raise ValueError(f"{words[0]} is a model, not part of the text. Write --model before it.")
    if list(words) not in ([], ["-"]):
        text = " ".join(words)
    elif sys.stdin is None or sys.stdin.isatty():
        raise ValueError("A text is needed. Write it in quotes, or pipe it in and write -.")
    else:
        text = read_input()
    if not text.strip():
        raise ValueError("the text must not be empty. Write it in quotes, or pipe it in.")
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that are not UTF-8 arrive as lone surrogates
        raise ValueError("the text must be UTF-8, got other bytes. Convert it with iconv.") from None
    return text


def read_input() -> str:
    """Read standard input, without the last newline."""
    try:
        return sys.stdin.buffer.read().decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input must be UTF-8, got {error.reason} at byte {error.start}.") from None
