"""LoRA over a frozen quantised model of the published size (QLoRA): tokens per second and memory under a hard cap.

python kernels/benchmarks/qlora.py                      int4 experts, float8 attention and dense MLP, 24 GB
python kernels/benchmarks/qlora.py --weights fp8 --memory 40

Weights are random, in the format itself. By default the adapters have rank 8, and a step takes one row of 960 tokens, a
prompt and a canvas, later four. The step is that of `training.py`: a causal pass, two denoising passes and the backward
pass, with recomputed activations, then AdamW of the adapters.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from generate import DRAWN, GPU, LINEARS, draw_model, draw_tokens
from timing import describe_run, results_folder
from training import fine_tuning_loss

import dgemma
from dgemma.train import LoRA, add_lora


def measure(
    model: dgemma.DiffusionGemma, optimizer: torch.optim.Optimizer, batch: int, options: argparse.Namespace
) -> dict[str, float]:
    """Time steps of `batch` rows. The peak counts from the first weight on."""
    times = []
    for _ in range(options.warmup + options.steps):
        began = time.perf_counter()
        tokens = draw_tokens(batch, options.length)
        loss = fine_tuning_loss(model, tokens, options.length - model.config.canvas_length)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        final = loss.item()  # waits
        times.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() / 1e9
        print(f"{batch} rows: loss {final:.3f}, {1e3 * times[-1]:.0f} ms, peak {peak:.2f} GB", flush=True)
    seconds = statistics.median(times[options.warmup :])
    return {
        "batch": batch,
        "length": options.length,
        "seconds_per_step": seconds,
        "tokens_per_s": batch * options.length / seconds,
        "peak_gb": peak,
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        "loss": final,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", choices=DRAWN, default="int4")
    parser.add_argument(
        "--float8", nargs="*", choices=tuple(LINEARS), default=list(LINEARS), help="what else is float8"
    )
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4], help="rows per step, ascending")
    parser.add_argument("--length", type=int, default=960, help="tokens of a row: prompt and canvas (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--memory", type=float, default=24.0, help="cap of torch's memory in decimal GB (%(default)s)")
    parser.add_argument("--output", type=Path, help="by default results/<gpu>/qlora.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA GPU.")
    torch.manual_seed(0)
    total = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.set_per_process_memory_fraction(options.memory * 1e9 / total)
    model = draw_model(options.weights, tuple(options.float8))
    model.recompute_activations = True
    adapters = add_lora(model, LoRA(rank=options.rank))
    optimizer = torch.optim.AdamW(adapters, lr=1e-4, fused=True)  # without temporary tensors
    result = {"run": describe_run(), "weights": options.weights, "float8": options.float8, "rank": options.rank}
    result |= {"memory_cap_gb": options.memory, "adapter_parameters": sum(p.numel() for p in adapters)}
    output = options.output or results_folder() / "qlora.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for batch in options.batches:
        rows.append(measure(model, optimizer, batch, options))
        print(" ".join(f"{name} {value:,.2f}" for name, value in rows[-1].items()), flush=True)
        output.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
