"""LoRA over a frozen quantised model of the published size (QLoRA): tokens per second and memory under a hard cap.

python kernels/benchmarks/qlora.py                      int4 experts, float8 attention and dense MLP, 24 GB
python kernels/benchmarks/qlora.py --weights fp8 --memory 40

Weights are random, in the format itself. By default the adapters have rank 8, and a step takes one row of 960 tokens, a
prompt and a canvas. The step is that of `training.py`: a causal pass, two denoising passes and the backward pass, with
recomputed activations, then AdamW of the adapters.
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


def measure(model: dgemma.DiffusionGemma, options: argparse.Namespace) -> dict[str, float]:
    model.recompute_activations = True
    adapters = add_lora(model, LoRA(rank=options.rank))
    optimizer = torch.optim.AdamW(adapters, lr=1e-4)
    num_tokens, times = options.batch_size * options.length, []
    for _ in range(options.warmup + options.steps):
        began = time.perf_counter()
        tokens = draw_tokens(options.batch_size, options.length)
        loss = fine_tuning_loss(model, tokens, options.length - model.config.canvas_length)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        final = loss.item()  # waits
        times.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() / 1e9
        print(f"loss {final:.3f}, {1e3 * times[-1]:.0f} ms, peak {peak:.2f} GB", flush=True)
    seconds = statistics.median(times[options.warmup :])
    return {
        "adapter_parameters": sum(parameter.numel() for parameter in adapters),
        "seconds_per_step": seconds,
        "tokens_per_s": num_tokens / seconds,
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
    parser.add_argument("--batch-size", type=int, default=1)
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
    found = measure(draw_model(options.weights, tuple(options.float8)), options)
    print(" ".join(f"{name} {value:,.2f}" for name, value in found.items()), flush=True)
    row = {"run": describe_run(), "weights": options.weights, "float8": options.float8, "rank": options.rank}
    row |= {"memory_cap_gb": options.memory, "batch": options.batch_size, "length": options.length, **found}
    output = options.output or results_folder() / "qlora.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
