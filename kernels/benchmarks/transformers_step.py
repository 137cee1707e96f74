"""transformers' denoising step at the published size, for comparison: random bfloat16 weights, batch 1.

python kernels/benchmarks/transformers_step.py               eager
python kernels/benchmarks/transformers_step.py --compiled    its static-cache path, which compiles for minutes first
python kernels/benchmarks/transformers_step.py --read 8192   the time to read a prompt instead of the time of a step

We time two generations of one canvas, with many and with few steps. The time of a step is the difference in time
divided by the difference in steps. So it includes the sampler, but neither the prefill nor the commit.
"""

import argparse
import statistics
import time
from typing import Any

import torch

import dgemma

PROMPT, FEW, MANY = 1024, 4, 20


def build(config: dgemma.ModelConfig, device: str) -> torch.nn.Module:
    from transformers import DiffusionGemmaForBlockDiffusion
    from transformers.models.diffusion_gemma.configuration_diffusion_gemma import DiffusionGemmaConfig

    published = config.to_hf()
    published.pop("architectures")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**published)).eval()
    finally:
        torch.set_default_dtype(before)


def time_steps(model: Any, prompt: torch.Tensor, *, compiled: bool, repeats: int) -> list[float]:
    """Return milliseconds per step, one per repeat."""

    def seconds(steps: int) -> float:
        options = {"cache_implementation": "static"} if compiled else {}
        if prompt.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=model.config.canvas_length,
            max_denoising_steps=steps,
            confidence_threshold=1e-30,  # never stops early
            pad_token_id=0,
            **options,
        )
        if prompt.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(FEW)  # compiles, or warms up
    seconds(MANY)
    return [(seconds(MANY) - seconds(FEW)) / (MANY - FEW) * 1e3 for _ in range(repeats)]


def time_read(model: Any, length: int, repeats: int) -> float:
    """Return the median milliseconds to read a prompt of this length into a new cache."""
    times = []
    for _ in range(2 + repeats):
        prompt = torch.randint(5, 262_144, (1, length), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            model.model.encoder(input_ids=prompt)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--read", type=int, nargs="+", default=[], metavar="TOKENS", help="read prompts only")
    options = parser.parse_args()
    config = dgemma.presets.diffusiongemma_26b_a4b()
    model = build(config, "cuda")
    for length in options.read:
        ms = time_read(model, length, repeats=3)
        print(f"transformers, eager: {length} tokens in {ms:.1f} ms, {1e3 * length / ms:.0f} tokens/s", flush=True)
    if options.read:
        return
    prompt = torch.randint(5, config.vocab_size, (1, PROMPT), device="cuda")
    times = time_steps(model, prompt, compiled=options.compiled, repeats=3)
    peak = torch.cuda.max_memory_allocated() / 2**30
    how = "compiled, static cache" if options.compiled else "eager"
    print(
        f"transformers, {how}: {statistics.median(times):.1f} ms per step ({min(times):.1f} to {max(times):.1f}), "
        f"peak {peak:.1f} GiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
