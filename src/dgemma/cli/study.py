"""`dgemma info`, `bench` and `evaluate`: what a checkpoint is, how fast it runs here, how well it knows a text."""

import argparse
import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dgemma.checkpoint import Stored, read_headers, resolve
from dgemma.cli import options
from dgemma.config import ModelConfig
from dgemma.generate import generate
from dgemma.model import DiffusionGemma

_CONFIG_FILES = ("config.json", "*.index.json")
_BYTES_PER_VALUE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "BOOL": 1}


def add_commands(commands: Any) -> None:
    """Put the three commands on the parser."""
    parser = commands.add_parser(
        "info",
        help="a checkpoint's config, tensors and memory",
        description="What a checkpoint is: its geometry, its tensors and the memory it needs. No weight is read.",
    )
    parser.add_argument("checkpoint", nargs="?", help="folder, dgemma/NAME or hub id; left out: what ships with dgemma")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=_info)

    parser = commands.add_parser(
        "bench",
        help="how fast a model runs on this machine",
        description="Time a denoising step, the reading of a prompt and whole canvases, on this machine.",
    )
    options.add_model_options(parser, default="dgemma/text")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="rows at once (%(default)s)")
    parser.add_argument("--prefix", type=int, default=64, metavar="P", help="tokens in the prefix (%(default)s)")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="steps a canvas (%(default)s)")
    parser.add_argument("--repeats", type=int, default=10, metavar="R", help="(%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=_bench)


def _info(arguments: argparse.Namespace) -> None:
    if arguments.checkpoint is None:
        for folder in sorted((Path(__file__).parents[1] / "assets").glob("*/config.json")):
            print(f"dgemma/{folder.parent.name}")
        return
    folder = resolve(arguments.checkpoint, files=_CONFIG_FILES)
    config = ModelConfig.from_hf(folder)
    with torch.device("meta"):
        model = DiffusionGemma(config)
    described: dict[str, Any] = {
        "checkpoint": str(arguments.checkpoint),
        "parameters": model.num_parameters(),
        "active_parameters": model.num_parameters(active=True),
        "canvas_length": config.canvas_length,
        "cache_bytes_per_token": _cache_bytes_per_token(config),
        "config": config.to_hf(),
    }
    stored = read_headers(folder) if any(folder.glob("*.safetensors")) else {}
    if stored:
        described["bytes"] = sum(map(_num_bytes, stored.values()))
        described["tensors"] = {name: {"shape": list(t.shape), "dtype": t.dtype} for name, t in stored.items()}
    if arguments.json:
        print(json.dumps(described))
        return
    _print_info(arguments.checkpoint, config, described, stored)
    if arguments.tensors:
        print()
        for name, tensor in stored.items():
            print(f"{name:70} {tensor.dtype:5} {' × '.join(map(str, tensor.shape))}")


def _print_info(name: str, config: ModelConfig, described: dict[str, Any], stored: dict[str, Stored]) -> None:
    kinds = Counter(config.layer_types)
    layers = ", ".join(f"{count} {kind.removesuffix('_attention')}" for kind, count in kinds.items())
    rows = [
        ("parameters", f"{described['parameters']:,} ({described['active_parameters']:,} active for a token)"),
        (
            "layers",
            f"{config.num_hidden_layers} ({layers}), width {config.hidden_size}, window {config.sliding_window}",
        ),
        ("experts", f"{config.num_experts}, {config.top_k_experts} chosen, width {config.moe_intermediate_size}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("canvas", f"{config.canvas_length} tokens, context {config.max_position_embeddings:,}"),
        ("prefix cache", f"{_size(described['cache_bytes_per_token'])} a token and row, in 16 bits"),
    ]
    if stored:
        dtypes = Counter(tensor.dtype for tensor in stored.values())
        kept = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.items())
        rows.append(
            ("files", f"{_size(described['bytes'])} in {len({t.file for t in stored.values()})}: {kept} tensors")
        )
    print(name)
    for label, value in rows:
        print(f"  {label:13} {value}")


def _cache_bytes_per_token(config: ModelConfig) -> int:
    """Keys and values of one token, while it is inside every window."""
    shapes = [config.layer_shape(layer) for layer in range(config.num_hidden_layers)]
    return sum(2 * 2 * shape.num_key_value_heads * shape.head_dim for shape in shapes)


def _num_bytes(tensor: Stored) -> int:
    return torch.Size(tensor.shape).numel() * _BYTES_PER_VALUE[tensor.dtype]


def _size(num_bytes: int) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000  # type: ignore[assignment]
    return f"{num_bytes:.4g} GB"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds: the median, the fastest and the slowest of several runs."""

    median: float
    fastest: float
    slowest: float

    def __str__(self) -> str:
        return f"{self.median:9.2f} ms   ({self.fastest:.2f} to {self.slowest:.2f})"


def _bench(arguments: argparse.Namespace) -> None:
    for name in ("batch", "prefix", "steps", "repeats"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(arguments, name)}.")
    model, denoiser = options.load_denoiser(arguments)
    config, device = model.config, model.device
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.batch, arguments.prefix + config.canvas_length)
    tokens = torch.randint(config.vocab_size, shape, generator=generator).to(device)
    prefix, canvas = tokens.split([arguments.prefix, config.canvas_length], dim=1)
    with torch.no_grad():
        cache = denoiser.encode(prefix)
        timings = {
            "read the prefix": _time(lambda: denoiser.encode(prefix), arguments.repeats, device),
            "one forward over the canvas": _time(
                lambda: denoiser.denoise(canvas, cache).argmax, arguments.repeats, device
            ),
        }
    # A canvas with its steps, its commit and the prefix; no stop rule and no stop token, so every one costs the same.
    canvas_time = _time(
        lambda: generate(
            denoiser, prefix, max_new_tokens=config.canvas_length, steps=arguments.steps, stop=None, eos_token_ids=()
        ),
        max(1, arguments.repeats // 3),
        device,
    )
    timings[f"a canvas of {config.canvas_length} in {arguments.steps} steps, with prefix"] = canvas_time
    tokens_per_second = arguments.batch * config.canvas_length / (canvas_time.median / 1000)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    if arguments.json:
        print(
            json.dumps(
                {
                    "model": arguments.model,
                    "device": where,
                    "batch": arguments.batch,
                    "prefix": arguments.prefix,
                    "tokens_per_second": tokens_per_second,
                    "milliseconds": {name: vars(timing) for name, timing in timings.items()},
                }
            )
        )
        return
    print(f"{arguments.model} on {where}, batch {arguments.batch}, prefix {arguments.prefix}")
    for name, timing in timings.items():
        print(f"  {name:50} {timing}")
    print(f"  {'tokens a second':50} {tokens_per_second:9.1f}")


def _time(work: Any, repeats: int, device: torch.device) -> Timing:
    """Run once to warm up, then `repeats` times against the clock."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(1000 * (time.perf_counter() - start))
    timed = seconds[1:]
    return Timing(median=statistics.median(timed), fastest=min(timed), slowest=max(timed))
