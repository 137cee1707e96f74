"""The plain PyTorch model at the published size: build time, memory, one prefill, one eager denoising step.

python kernels/benchmarks/reference.py [--prefix 1024] [--batch 1]

Random bfloat16 weights. This model is the reference of the kernels, not the fast path. `step.py --transformers`
measures transformers at the same size.
"""

import argparse
import statistics
import time

import torch
from timing import describe_run

import dgemma


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    print(describe_run())
    config = dgemma.presets.diffusiongemma_26b_a4b()
    start = time.perf_counter()
    model = dgemma.DiffusionGemma(config, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    torch.cuda.synchronize()
    print(
        f"built {model.num_parameters() / 1e9:.2f}B weights in {time.perf_counter() - start:.1f} s, "
        f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB peak"
    )
    prompt = torch.randint(5, config.vocab_size, (options.batch, options.prefix), device="cuda")
    canvas = torch.randint(0, config.vocab_size, (options.batch, config.canvas_length), device="cuda")
    for attempt in range(3):
        start = time.perf_counter()
        cache = model.encode(prompt)
        torch.cuda.synchronize()
        print(f"encoded {options.prefix} tokens in {(time.perf_counter() - start) * 1e3:.1f} ms (attempt {attempt})")
    prediction = model.denoise(canvas, cache).shaped(temperature=0.8)
    assert torch.isfinite(prediction.entropy).all()
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        prediction = model.denoise(canvas, cache, self_cond=prediction).shaped(temperature=0.8)
        tokens = prediction.argmax
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    times = sorted(times[2:])
    print(
        f"eager denoising step, forward and statistics: median {statistics.median(times):.1f} ms, "
        f"{times[0]:.1f}-{times[-1]:.1f}; peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB; "
        f"{tokens.unique().numel()} distinct argmax tokens"
    )


if __name__ == "__main__":
    main()
