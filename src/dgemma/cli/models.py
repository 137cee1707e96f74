"""`dgemma info CHECKPOINT`, `bench`, `quantize` and `serve`: describe, time, quantise or serve a checkpoint."""

import argparse
import os
import socket
import statistics
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from dgemma.checkpoint.formats import report_files
from dgemma.checkpoint.quantizing import calibration, quantize_checkpoint
from dgemma.checkpoint.reading import read_checkpoint
from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import require
from dgemma.cli import loading, output
from dgemma.files import read_text
from dgemma.location import resolve
from dgemma.model.config import GenerationDefaults, ModelConfig
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.published import read_published
from dgemma.quantization.rounding import Quantization
from dgemma.run.arguments import check_memory
from dgemma.run.generate import generate
from dgemma.run.options import learnt_noise
from dgemma.sampling.named import join_settings

_CONFIG_FILES = ("config.json", "*.index.json")
_MOST_ROWS = 128  # rows of calibration text
_LOCAL = ("127.0.0.1", "localhost", "::1")
_API_KEY = "DGEMMA_API_KEY"  # environment variable


def describe_checkpoint(arguments: argparse.Namespace) -> None:
    """Print a checkpoint's geometry, tensors and memory."""
    _, published, contents, _ = read_checkpoint(arguments.checkpoint, files=_CONFIG_FILES)
    stored = contents.stored
    config = ModelConfig.from_hf(published)
    own = GenerationDefaults(noise=published.get("noise"), sampler=published.get("sampler"))
    report = report_files(contents) if stored else None
    model = DiffusionGemma(config, device="meta")
    shapes = [config.layer_shape(layer) for layer in range(config.num_hidden_layers)]
    description: dict[str, Any] = {
        "checkpoint": arguments.checkpoint,
        "parameters": model.num_parameters(),
        "active_parameters": model.num_parameters(active=True),
        "canvas_length": config.canvas_length,
        # keys and values of 2 bytes each, while the token is inside every window
        "cache_bytes_per_token": sum(2 * 2 * shape.num_key_value_heads * shape.head_dim for shape in shapes),
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
    for label, value in _summary(config, description).items():
        output.print_text(f"  {label:13} {value}")
    if report is not None:
        output.print_text(textwrap.indent(str(report), "  "))
    if arguments.tensors:
        longest = max(map(len, stored), default=0)
        for name, tensor in stored.items():
            output.print_text(f"  {name:{longest}}  {tensor.dtype:5} {' × '.join(map(str, tensor.shape))}")


def _summary(config: ModelConfig, description: dict[str, Any]) -> dict[str, str]:
    layers = _counted(kind.removesuffix("_attention") for kind in config.layer_types)
    rows = {
        "parameters": f"{description['parameters']:,} ({description['active_parameters']:,} active per token)",
        "layers": f"{layers}; width {config.hidden_size}, window {config.sliding_window}",
        "experts": f"{config.num_experts}, {config.top_k_experts} chosen, width {config.moe_intermediate_size}",
        "vocabulary": f"{config.vocab_size:,}",
        "canvas": f"{config.canvas_length} tokens, context {config.max_position_embeddings:,}",
        "prefix cache": f"{_size(description['cache_bytes_per_token'])} per token and row, in 16 bits",
    }
    for name, key in (("noise", "kind"), ("sampler", "name")):
        if description[name] is not None:
            settings = dict(description[name])
            rows[name] = ":".join(filter(None, (settings.pop(key), join_settings(settings))))
    if description["tensors"]:
        dtypes = _counted(tensor["dtype"] for tensor in description["tensors"].values())
        rows["tensors"] = f"{dtypes}; {_size(description['bytes'])} on disk"
    return rows


def _counted(names: Any) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(names).items())


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def run_bench(arguments: argparse.Namespace) -> None:
    """Time a model on this machine."""
    denoiser = loading.load_denoiser(arguments)
    config, device = denoiser.config, denoiser.device
    check_memory("bench", arguments.batch_size, config, device)
    shape = (arguments.batch_size, arguments.prefix + config.canvas_length)
    tokens = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    prefix, canvas = tokens.split([arguments.prefix, config.canvas_length], dim=1)
    # No stop rule and no stop token ends a canvas early.
    whole = {"max_new_tokens": config.canvas_length, "steps": arguments.steps, "stop": None, "eos_token_ids": ()}
    with torch.no_grad():
        canvas_time = _time(
            lambda: generate(denoiser, prefix, progress=False, **whole), max(1, arguments.repeats // 3), device
        )
        cache = denoiser.encode(prefix)
        timings = {
            "prefix": _time(lambda: denoiser.encode(prefix), arguments.repeats, device),
            "forward": _time(lambda: denoiser.denoise(canvas, cache).argmax, arguments.repeats, device),
            "canvas": canvas_time,
        }
    tokens_per_second = arguments.batch_size * config.canvas_length / (canvas_time["median"] / 1000)
    threads = output.counted(torch.get_num_threads(), "thread")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {threads}"
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("model", "fast", "weights", "prefix", "steps")}
        settings |= {"batch": arguments.batch_size, "device": where}
        output.print_json({**settings, "milliseconds": timings, "tokens_per_second": tokens_per_second})
        return
    how = " --fast" * arguments.fast + (f" --weights {arguments.weights}" if arguments.weights else "")
    output.print_text(f"{arguments.model}{how} on {where}, batch {arguments.batch_size}")
    parts = {
        "prefix": f"prefix of {arguments.prefix}",
        "forward": f"forward over {config.canvas_length}",
        "canvas": f"canvas in {output.counted(arguments.steps, 'step')}, with prefix",
    }
    for name, part in parts.items():
        median, fastest, slowest = timings[name].values()
        print(f"  {part}: {median:.2f} ms ({fastest:.2f} to {slowest:.2f})")
    print(f"  {tokens_per_second:.1f} tokens per second")


def _time(work: Callable[[], object], repeats: int, device: torch.device) -> dict[str, float]:
    """Return the milliseconds of `repeats` runs, after one that warms up: median, fastest and slowest."""
    milliseconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        milliseconds.append(1000 * (time.perf_counter() - start))
    timed = milliseconds[1:]
    return {"median": statistics.median(timed), "fastest": min(timed), "slowest": max(timed)}


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


def _calibration(arguments: argparse.Namespace) -> Callable[[DiffusionGemma], None]:
    """Return a function that runs a model on the text. Each row is a prefix and a canvas of equal length."""
    tokens = Tokenizer.from_pretrained(arguments.checkpoint).encode(read_text(arguments.calibration), bos=False)
    canvas_len = ModelConfig.from_hf(read_published(resolve(arguments.checkpoint), "config.json")).canvas_length
    num_rows = min(_MOST_ROWS, len(tokens) // (2 * canvas_len))
    rule = f"hold at least {2 * canvas_len} tokens, two canvases"
    require(num_rows >= 1, "--calibration", rule, len(tokens), "Use a longer text.")
    rows = torch.tensor(tokens[: 2 * canvas_len * num_rows]).view(num_rows, 2 * canvas_len)
    return lambda model: calibration(rows, learnt_noise(model), canvas_len=canvas_len)(model)


def run_serve(arguments: argparse.Namespace) -> None:
    """Serve a model on this machine."""
    from dgemma.serve.app import create_app
    from dgemma.serve.gate import Limits, QuickServer

    replay = None if arguments.replay is None else read_text(arguments.replay)
    pairs = [adapter.split("=", 1) for adapter in arguments.adapter if "=" in adapter]
    named, names = dict(pairs), [arguments.name or arguments.model, *(name for name, _ in pairs)]
    require(len(set(names)) == len(names), "--adapter", "have names of their own", names)
    unnamed = [adapter for adapter in arguments.adapter if "=" not in adapter]
    require(len(unnamed) <= 1, "--adapter", "have a NAME= if it is repeated", unnamed)
    require(not (named and arguments.fast), "--adapter NAME=FOLDER", "be used without --fast", [*named])
    arguments.adapter = next(iter(unnamed), None)
    tokenizer = Tokenizer.from_pretrained(arguments.tokenizer or arguments.model)
    limits = Limits(
        tokens=arguments.max_tokens,
        queue=arguments.max_queue,
        per_client=arguments.max_per_client,
        seconds=arguments.max_seconds,
        prefix_bytes=arguments.max_prefix_mb * 1_000_000,
        fetch_images=arguments.fetch_images,
    )
    listening = _bind(arguments.host, arguments.port)  # now, because loading the model may take minutes
    is_local = arguments.host in _LOCAL
    key = os.environ.get(_API_KEY) or None
    if not is_local and key is None:
        output.print_note(f"Anybody who reaches {arguments.host} can use this server. Set {_API_KEY} to require a key.")
    model = loading.load_denoiser(arguments)
    app = create_app(
        model,
        tokenizer,
        adapters={name: loading.with_adapter(model, folder) for name, folder in named.items()},
        name=arguments.name or arguments.model,
        batch_size=arguments.batch_size,
        api_key=key,
        limits=limits,
        hosts=(*_LOCAL, "[::1]") if is_local else None,
        replay=replay,
    )
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host  # IPv6
    address = f"http://{host}:{arguments.port}{'' if replay is None else '/replay'}"
    print(f"Serving {arguments.model} at {address}", file=sys.stderr)
    # The model's thread waits this long for the interpreter after each operation while requests are read.
    sys.setswitchinterval(1e-4)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after it has stopped
        QuickServer(app).run(sockets=[listening])


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket at the address."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        # Without this option, a port stays reserved for a minute after its server ends. On Windows the option would let
        # two servers share the port.
        if os.name == "posix":
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise OSError(f"--host {host} --port {port} cannot be used: {error.strerror}. Choose another one.") from None
    return listening
