"""`dgemma info CHECKPOINT` and `bench`: describe a checkpoint, and time it on this machine."""

import argparse
import statistics
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dgemma.checkpoint.formats import report_files
from dgemma.checkpoint.formats.entry import Stored
from dgemma.checkpoint.reading import read_checkpoint
from dgemma.cli import loading, output
from dgemma.model.config import GenerationDefaults, ModelConfig
from dgemma.model.diffusion import DiffusionGemma
from dgemma.run.arguments import check_memory
from dgemma.run.generate import generate
from dgemma.values import join_settings

_CONFIG_FILES = ("config.json", "*.index.json")


def describe_checkpoint(arguments: argparse.Namespace) -> None:
    """Print a checkpoint's geometry, tensors and memory."""
    _, published, stored, contents, _ = read_checkpoint(arguments.checkpoint, files=_CONFIG_FILES)
    config = ModelConfig.from_hf(published)
    own = GenerationDefaults(noise=published.get("noise"), sampler=published.get("sampler"))
    report = report_files(contents, stored) if stored else None
    model = DiffusionGemma(config, device="meta")
    description: dict[str, Any] = {
        "checkpoint": arguments.checkpoint,
        "parameters": model.num_parameters(),
        "active_parameters": model.num_parameters(active=True),
        "canvas_length": config.canvas_length,
        "cache_bytes_per_token": _cache_bytes_per_token(config),
        "bytes": sum(file.stat().st_size for file in {tensor.file for tensor in stored.values()}) or None,
        "noise": own.noise,
        "sampler": own.sampler,
        "memory": [asdict(part) for part in report.parts] if report else None,
        "config": config.to_hf(),
        "tensors": {name: {"shape": tensor.shape, "dtype": tensor.dtype} for name, tensor in stored.items()},
    }
    if arguments.json:
        output.print_json(description)
        return
    output.print_text(arguments.checkpoint)
    for label, value in _summary(config, description, stored):
        output.print_text(f"  {label:13} {value}")
    if report is not None:
        output.print_text(textwrap.indent(str(report), "  "))
    if arguments.tensors:
        longest = max(map(len, stored), default=0)
        for name, tensor in stored.items():
            output.print_text(f"  {name:{longest}}  {tensor.dtype:5} {' × '.join(map(str, tensor.shape))}")


def _summary(config: ModelConfig, description: dict[str, Any], stored: dict[str, Stored]) -> list[tuple[str, str]]:
    layers = Counter(kind.removesuffix("_attention") for kind in config.layer_types)
    rows = [
        ("parameters", f"{description['parameters']:,} ({description['active_parameters']:,} active per token)"),
        ("layers", f"{_counted(layers)}; width {config.hidden_size}, window {config.sliding_window}"),
        ("experts", f"{config.num_experts}, {config.top_k_experts} chosen, width {config.moe_intermediate_size}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("canvas", f"{config.canvas_length} tokens, context {config.max_position_embeddings:,}"),
        ("prefix cache", f"{_size(description['cache_bytes_per_token'])} per token and row, in 16 bits"),
    ]
    for name, key in (("noise", "kind"), ("sampler", "name")):
        if description[name] is not None:
            settings = dict(description[name])
            rows.append((name, ":".join(filter(None, (settings.pop(key), join_settings(settings))))))
    if stored:
        dtypes = Counter(tensor.dtype for tensor in stored.values())
        rows.append(("tensors", f"{_counted(dtypes)}; {_size(description['bytes'])} on disk"))
    return rows


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.items())


def _cache_bytes_per_token(config: ModelConfig) -> int:
    """Return the bytes of one token's keys and values while it is inside every window."""
    shapes = [config.layer_shape(layer) for layer in range(config.num_hidden_layers)]
    return sum(2 * 2 * shape.num_key_value_heads * shape.head_dim for shape in shapes)


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds: the median, the fastest and the slowest of several runs."""

    median: float
    fastest: float
    slowest: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ms ({self.fastest:.2f} to {self.slowest:.2f})"


def run_bench(arguments: argparse.Namespace) -> None:
    """Time a model on this machine."""
    denoiser = loading.load_denoiser(arguments)
    config, device = denoiser.config, denoiser.device
    check_memory("bench", arguments.batch_size, config.canvas_length, config.vocab_size, device)
    shape = (arguments.batch_size, arguments.prefix + config.canvas_length)
    tokens = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    prefix, canvas = tokens.split([arguments.prefix, config.canvas_length], dim=1)
    sampler, noise = loading.own_sampler(arguments, denoiser), loading.own_noise(arguments, denoiser)

    def write_canvas() -> None:
        """Read the prefix, write one canvas and encode it. No stop rule or stop token ends a canvas early."""
        generate(
            denoiser,
            prefix,
            max_new_tokens=config.canvas_length,
            steps=arguments.steps,
            sampler=sampler,
            noise=noise,
            stop=None,
            eos_token_ids=(),
            progress=False,
        )

    with torch.no_grad():
        canvas_time = _time(write_canvas, max(1, arguments.repeats // 3), device)
        cache = denoiser.encode(prefix)
        timings = {
            "prefix": _time(lambda: denoiser.encode(prefix), arguments.repeats, device),
            "forward": _time(lambda: denoiser.denoise(canvas, cache).argmax, arguments.repeats, device),
            "canvas": canvas_time,
        }
    tokens_per_second = arguments.batch_size * config.canvas_length / (canvas_time.median / 1000)
    threads = output.counted(torch.get_num_threads(), "thread")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {threads}"
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("model", "fast", "weights", "prefix", "steps")}
        milliseconds = {name: asdict(timing) for name, timing in timings.items()}
        output.print_json(
            {
                **settings,
                "batch": arguments.batch_size,
                "device": where,
                "milliseconds": milliseconds,
                "tokens_per_second": tokens_per_second,
            }
        )
        return
    how = " --fast" * arguments.fast + (f" --weights {arguments.weights}" if arguments.weights else "")
    output.print_text(f"{arguments.model}{how} on {where}, batch {arguments.batch_size}")
    print(f"  prefix of {arguments.prefix}: {timings['prefix']}")
    print(f"  forward over {config.canvas_length}: {timings['forward']}")
    print(f"  canvas in {output.counted(arguments.steps, 'step')}, with prefix: {timings['canvas']}")
    print(f"  {tokens_per_second:.1f} tokens per second")


def _time(work: Callable[[], object], repeats: int, device: torch.device) -> Timing:
    """Run once to warm up, then time `repeats` runs."""
    milliseconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        milliseconds.append(1000 * (time.perf_counter() - start))
    timed = milliseconds[1:]
    return Timing(median=statistics.median(timed), fastest=min(timed), slowest=max(timed))
