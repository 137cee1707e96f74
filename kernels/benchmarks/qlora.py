"""LoRA over a frozen quantised model of the published size (QLoRA): tokens per second and memory under a hard cap.

python kernels/benchmarks/qlora.py                      int4 experts, float8 attention and dense MLP, 24 GB
python kernels/benchmarks/qlora.py --weights fp8 --memory 40

Weights are random, in the format itself. By default the adapters have rank 8. A row has 960 tokens, a prompt and a
canvas, and a step takes one row. The loop is that of `training.py --lora`: `train` with kernels and
recomputed activations.
"""

import argparse
import gc
import json
from pathlib import Path

import torch
from generate import DRAWN, GPU, LINEARS, draw_model
from timing import describe_run, results_folder
from training import run_train

from dgemma.train import LoRA, add_lora


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", choices=DRAWN, default="int4")
    parser.add_argument(
        "--float8", nargs="*", choices=tuple(LINEARS), default=list(LINEARS), help="what else is float8"
    )
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--batches", nargs="+", type=int, default=[1], help="rows per step, ascending")
    parser.add_argument("--length", type=int, default=960, help="tokens of a row: prompt and canvas (%(default)s)")
    parser.add_argument("--warmup", type=int, default=4, help="steps; the third one is captured")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--memory", type=float, default=24.0, help="cap of torch's memory in decimal GB (%(default)s)")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    parser.add_argument("--output", type=Path, help="by default results/<gpu>/qlora.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA GPU.")
    torch.manual_seed(0)
    total = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.set_per_process_memory_fraction(options.memory * 1e9 / total)
    model = draw_model(options.weights, tuple(options.float8))
    stored = torch.cuda.memory_allocated() / 1e9
    adapters = add_lora(model, LoRA(rank=options.rank))
    result = {"run": describe_run(), "weights": options.weights, "float8": options.float8, "rank": options.rank}
    result |= {"memory_cap_gb": options.memory, "stored_gb": stored}
    result |= {"adapter_weights": sum(p.numel() for p in adapters)}
    output = options.output or results_folder() / "qlora.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    prompt_len = options.length - model.config.canvas_length
    for batch in options.batches:
        settings = {"batch_size": batch, "prompt_len": prompt_len, "rounds": 1}
        found = run_train(model, options.length, argparse.Namespace(**vars(options) | settings))
        rows.append({"rows": batch, "length": options.length})
        rows[-1] |= {"tokens_per_second": batch * options.length / found["milliseconds"] * 1e3}
        rows[-1] |= {f"{name}_gb": found.pop(f"{name}_GiB") * 2**30 / 1e9 for name in ("peak", "reserved")} | found
        print(rows[-1], flush=True)
        output.write_text(json.dumps(result | {"results": rows}, indent=1) + "\n")
        for weight in adapters:
            weight.grad = None
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
