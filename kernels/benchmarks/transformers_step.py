"""transformers' denoising step at the published size, for comparison: random bfloat16 weights, batch 1.

python kernels/benchmarks/transformers_step.py               eager
python kernels/benchmarks/transformers_step.py --compiled    its static-cache path, which compiles for minutes first

`prompts.py --transformers` also times other batches, prompts and single tokens with these functions.
"""

import argparse
import statistics
import time
from collections.abc import Callable
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


def step(model: Any, batch: int, length: int, *, compiled: bool = False, few: int = 2, many: int = 8) -> float:
    """Return the milliseconds of a denoising step, from two generations of one canvas with different numbers of steps.

    The result is their difference in time divided by their difference in steps. It includes the sampler, but neither
    the prefill nor the commit.
    """
    prompt = draw_prompt(batch, length)
    options = {"cache_implementation": "static"} if compiled else {}

    def seconds(steps: int) -> float:
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
        torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(few)  # compiles, or warms up
    if compiled:
        seconds(many)
    return (seconds(many) - seconds(few)) / (many - few) * 1e3


def read(model: Any, batch: int, length: int) -> float:
    """Return the median milliseconds to read prompts of this length into a new cache."""

    def run(prompt: torch.Tensor) -> None:
        model.model.encoder(input_ids=prompt)

    return median_ms(lambda: run(draw_prompt(batch, length)), repeats=3)


def token(model: Any, batch: int, length: int) -> float:
    """Return the median milliseconds to read one token after a prompt of this length and compute its logits."""
    cache, token = None, draw_prompt(batch, length)

    def run() -> None:
        nonlocal cache, token
        out = model.model.encoder(input_ids=token, past_key_values=cache)
        cache, token = out.past_key_values, model.lm_head(out.last_hidden_state[:, -1:]).argmax(-1)

    return median_ms(run, repeats=20)


def median_ms(run: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(1 + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            run()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def draw_prompt(batch: int, length: int) -> torch.Tensor:
    return torch.randint(5, 262_144, (batch, length), device="cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    model = build(dgemma.presets.diffusiongemma_26b_a4b(), "cuda")
    times = [step(model, 1, PROMPT, compiled=options.compiled, few=FEW, many=MANY) for _ in range(3)]
    peak = torch.cuda.max_memory_allocated() / 2**30
    how = "compiled, static cache" if options.compiled else "eager"
    print(
        f"transformers, {how}: {statistics.median(times):.1f} ms per step ({min(times):.1f} to {max(times):.1f}), "
        f"peak {peak:.1f} GiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
