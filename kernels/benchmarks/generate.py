"""Tokens per second and energy at the published size, per format of the experts, next to autoregressive decoding.

python kernels/benchmarks/generate.py                            every format, batches of 1 to 16
python kernels/benchmarks/generate.py --weights int4 --precision fast --batches 1
python kernels/benchmarks/generate.py --weights int4 --prompt 8192 --batches 1 --memory 18

Weights are random. Those of fp8, int4 and nvfp4 are drawn in the format itself, so no layer ever exists in bfloat16. A
canvas of 256 tokens takes 16 steps and a commit. `--memory` caps the memory that torch may reserve, in decimal GB, from
the first weight to the last token. NVFP4 fits into 18 GB only with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
Autoregressive decoding runs in the same engine, one token per forward.
"""

import argparse
import gc
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from timing import describe_run, read_joules, results_folder
from torch import Tensor, nn

import dgemma
from dgemma.quantization.weights import Float8Weight, IntWeight, NvFp4Weight, Weight, set_weight
from dgemma.run.records import BlockCommit
from dgemma_kernels import FusedDenoiser, accelerate
from dgemma_kernels.engine.precision import choose_parts
from dgemma_kernels.formats import ENCODERS

CANVAS, STEPS, CANVASES, NUM_TOKENS = 256, 16, 4, 64
GPU = torch.device("cuda")
LINEARS = {"attention": "self_attn", "dense": "mlp"}
DRAWN = ("fp8", "int4", "nvfp4")  # drawn as they are stored; `accelerate` converts the others layer by layer


def draw_tokens(*shape: int) -> Tensor:
    return torch.randint(5, 262_144, shape, device=GPU)


def draw_weight(shape: torch.Size, format: str, std: float) -> Weight:
    """Draw a weight (..., N, K) of about this standard deviation in a format, without decoded values."""
    *rows, width = shape
    if format not in DRAWN:
        return torch.empty(shape, dtype=torch.bfloat16, device=GPU).normal_(std=std)
    if format == "fp8":
        values = torch.randint(0, 0x7F, tuple(shape), dtype=torch.uint8, device=GPU)  # below NaN
        values |= torch.randint(0, 2, tuple(shape), dtype=torch.uint8, device=GPU) << 7
        return Float8Weight(values=values.view(torch.float8_e4m3fn), scale=torch.full(rows, std / 100, device=GPU))
    codes = torch.randint(0, 256, (*rows, width // 2), dtype=torch.uint8, device=GPU)
    if format == "int4":
        scale = torch.full((*rows, width // 64), std / 4.6, dtype=torch.bfloat16, device=GPU)
        return IntWeight(codes=codes, scale=scale)
    scale = torch.full((*rows, width // 16), 256.0, device=GPU).to(torch.float8_e4m3fn)
    return NvFp4Weight(codes=codes, scale=scale, row_scale=torch.full(rows, std / 256 / 2.9, device=GPU))


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Add the option of `accelerate(precision=...)`, with the names of parts separated by commas."""
    parser.add_argument(
        "--precision",
        type=lambda text: text if text in ("exact", "fast") else tuple(text.split(",")),
        default="exact",
        help='"exact", "fast", or parts such as attention,dense (%(default)s)',
    )


def build(format: str, float8: tuple[str, ...] = (), config: dgemma.ModelConfig | None = None) -> FusedDenoiser:
    """Make a model with random weights and accelerate it.

    Example: `build("int4", ("attention", "head"))`.
    """
    return accelerate(draw_model(format, float8, config), format, precision=float8, release=format != "bf16")


def draw_model(
    format: str, float8: tuple[str, ...] = (), config: dgemma.ModelConfig | None = None
) -> dgemma.DiffusionGemma:
    """Make a model with random weights, a layer at a time.

    Example: `draw_model("int4", ("attention", "dense"))`.
    """
    config = config or dgemma.presets.diffusiongemma_26b_a4b().replace(vision_config=None)
    model = dgemma.DiffusionGemma(config, device="meta", dtype=torch.bfloat16).requires_grad_(False)
    std = config.initializer_range

    def fill(module: nn.Module) -> None:
        module.to_empty(device=GPU)
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.normal_(std=std) if tensor.dim() > 1 else tensor.fill_(1.0)

    for layer in model.layers:
        experts: Any = layer.experts
        shapes = {name: parameter.shape for name, parameter in experts.named_parameters()}
        layer.experts = nn.Module()
        fill(layer)
        for part in set(float8) & LINEARS.keys():  # as in a checkpoint that has them in float8
            owner = layer.get_submodule(LINEARS[part])
            for name in [name for name, module in owner.named_children() if isinstance(module, nn.Linear)]:
                shape = owner.get_parameter(f"{name}.weight").shape
                set_weight(owner, f"{name}.weight", draw_weight(shape, "fp8", std))
        for name, shape in shapes.items():
            set_weight(experts, name, draw_weight(shape, format, std))
        layer.experts = experts
    for name, module in model.named_children():
        if name != "layers":
            fill(module)
    return calm(model.requires_grad_(False))


def calm(model: dgemma.DiffusionGemma) -> dgemma.DiffusionGemma:
    """Give query and key norms small weights, in place, so that parity can be checked.

    Unit norms at scale 1 make every softmax a hard maximum, which amplifies rounding: logits of 30 layers in bfloat16
    then have nothing in common with those in float32.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight")):
            parameter.detach().fill_(0.25)
    return model


def stream_canvases(model: FusedDenoiser, batch: int, prompt: int, canvases: int) -> list[float]:
    """Return the seconds from the start to the commit of each canvas."""
    marks: list[float] = []
    torch.cuda.synchronize()
    start = time.perf_counter()
    events = dgemma.stream(
        model, draw_tokens(batch, prompt), max_new_tokens=canvases * CANVAS, steps=STEPS, stop=None, eos_token_ids=[]
    )
    for event in events:
        if isinstance(event, BlockCommit):
            torch.cuda.synchronize()
            marks.append(time.perf_counter() - start)
    return marks


def time_canvases(model: FusedDenoiser, batch: int, prompt: int) -> dict[str, float]:
    """Time the first canvas with its prompt, and the later canvases. An untimed run of two canvases first captures the
    graphs.

    Small batches run several times, because their canvases are short and vary by some per cent. The energy per token is
    that of all runs, with their prompts.
    """
    stream_canvases(model, batch, prompt, 2)
    num_runs = max(1, 4 // batch)
    start = read_joules()
    runs = [stream_canvases(model, batch, prompt, CANVASES) for _ in range(num_runs)]
    joules = read_joules() - start
    each = [b - a for marks in runs for a, b in itertools.pairwise(marks)]
    median = statistics.median(each)
    return {
        "tokens_per_s": batch * CANVAS / median,
        "canvas_ms": 1e3 * median,
        "from_ms": 1e3 * min(each),
        "to_ms": 1e3 * max(each),
        "first_block_ms": 1e3 * statistics.median(marks[0] for marks in runs),
        "joules_per_token": joules / (num_runs * CANVASES * batch * CANVAS),
    }


def time_tokens(model: FusedDenoiser, prompt: int) -> float:
    """Return the milliseconds of an autoregressive token."""
    cache = model.encode(draw_tokens(1, prompt))
    token = draw_tokens(1, 1)
    for _ in range(3):
        token = model.causal_logits(token, cache).argmax(-1)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(NUM_TOKENS):
        token = model.causal_logits(token, cache).argmax(-1)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / NUM_TOKENS * 1e3


def measure(format: str, float8: tuple[str, ...], batches: list[int], prompt: int) -> list[dict[str, Any]]:
    torch.cuda.reset_peak_memory_stats()
    model = build(format, float8)
    stored = torch.cuda.memory_allocated()
    rows = []
    token_ms = time_tokens(model, prompt)
    for batch in batches:
        row: dict[str, Any] = {"weights": format, "float8": list(float8), "prompt": prompt, "batch": batch}
        row |= time_canvases(model, batch, prompt)
        row |= {
            "stored_gb": stored / 1e9,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
            "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
            "token_ms": token_ms,
            # Autoregressive tokens are timed at batch 1.
            "times_autoregressive": row["tokens_per_s"] * token_ms / 1e3 / batch,
        }
        rows.append(row)
        print_row(row)
    return rows


HEADER = "weights  batch  tokens/s  canvas ms  J/token  first block ms  peak GB  reserved GB  AR ms/token  times AR"


def print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['weights']:7s} {row['batch']:6d} {row['tokens_per_s']:9.0f} {row['canvas_ms']:10.1f} "
        f"{row['joules_per_token']:8.3f} {row['first_block_ms']:15.1f} "
        f"{row['peak_gb']:8.2f} {row['reserved_gb']:12.2f} {row['token_ms']:12.2f} "
        f"{row['times_autoregressive']:9.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", choices=tuple(ENCODERS), default=list(ENCODERS))
    add_precision(parser)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens before the first canvas (%(default)s)")
    parser.add_argument("--memory", type=float, help="cap of torch's memory in decimal GB")
    parser.add_argument("--output", type=Path, help="by default results/<gpu>/generate.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA GPU; on a CPU, tests/kernels check the same engine.")
    torch.manual_seed(0)
    if options.memory:
        total = torch.cuda.get_device_properties(GPU).total_memory
        torch.cuda.set_per_process_memory_fraction(options.memory * 1e9 / total)
    print(describe_run(), HEADER, sep="\n", flush=True)
    output = options.output or results_folder() / "generate.json"
    rows: list[dict[str, Any]] = []
    for format in options.weights:
        rows += measure(format, choose_parts(options.precision, format), options.batches, options.prompt)
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # those of this model's streams
        torch.cuda.empty_cache()
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({"run": describe_run(), "memory_cap_gb": options.memory, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
