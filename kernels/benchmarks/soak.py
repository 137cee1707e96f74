"""An accelerated model under load: many steps in a row, then many shapes and settings, with the memory along the way.

python kernels/benchmarks/soak.py --seconds 40

`dgemma/text` in bfloat16. First one run repeats its steps. Then generations with random batch sizes, prompts, canvases,
samplers, temperatures and stop rules follow, of which most need new graphs. Every line has the mean time of a step, the
memory on GPU and host, and the unused buffers and graphs that the model keeps. The last line has the growth of the
memory during the second half of the generations, when the caches are already full.
"""

import argparse
import json
import random
import resource
import time
from pathlib import Path
from typing import Any

import torch
from timing import describe_run, results_folder

import dgemma
from dgemma.run.plan import read_plan
from dgemma.run.step import start_state
from dgemma_kernels import FusedDenoiser, accelerate

GPU = torch.device("cuda")


def memory() -> dict[str, float]:
    """Return MiB: tensors, torch's memory, all of the GPU (with graphs and other processes), peak of the host."""
    free, total = torch.cuda.mem_get_info()
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    mine = {"tensors": torch.cuda.memory_allocated() / 2**20, "torch": torch.cuda.memory_reserved() / 2**20}
    return mine | {"gpu": (total - free) / 2**20, "host_peak": host}


def repeat_steps(model: FusedDenoiser, seconds: float, results: list[dict[str, Any]]) -> int:
    """Take the steps of one canvas again and again; return their number."""
    prompt = torch.randint(5, 8000, (1, 100), device=GPU)
    knobs, cache, taken = read_plan(model, prompt, stop=None).knobs, model.encode(prompt), 0
    noise, end = dgemma.UniformNoise(model.config.vocab_size), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begun = time.perf_counter()
        for seed in range(50):
            seeds = torch.tensor([seed], device=GPU)
            state = start_state(knobs, noise, seeds=seeds, canvas_len=model.config.canvas_length, num_steps=48)
            for _ in range(48):
                state, _ = model.step(state, cache=cache, knobs=knobs)
        torch.cuda.synchronize()
        taken += 50 * 48
        add(results, model, "the same step", taken, (time.perf_counter() - begun) / (50 * 48) * 1e3)
    return taken


def vary(model: FusedDenoiser, seconds: float, results: list[dict[str, Any]]) -> int:
    """Generate with random shapes and settings; return the number of steps."""
    draw, taken, shapes, end = random.Random(0), 0, set(), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begun, before = time.perf_counter(), taken
        for _ in range(25):
            batch, length, steps = draw.randint(1, 24), draw.randint(1, 700), draw.randint(1, 6)
            out = dgemma.generate(
                model,
                torch.randint(5, 8000, (batch, length), device=GPU),
                max_new_tokens=draw.choice((64, 128)),
                steps=steps,
                seed=draw.randint(0, 1000),
                temperature=draw.choice((0.5, 0.8, 1.0)),
                sampler=dgemma.EntropyBound(bound=draw.choice((0.05, 0.1, 0.5, 2.0))),
                stop=draw.choice((None, dgemma.StableAndConfident(confidence=draw.choice((0.005, 0.1))))),
                progress=False,
            )
            taken += int(out.steps.amax(0).sum())
            shapes.add((batch, length))
        torch.cuda.synchronize()
        each = (time.perf_counter() - begun) / (taken - before) * 1e3
        add(results, model, "random shapes", taken, each, shapes=len(shapes))
    return taken


def add(
    results: list[dict[str, Any]], model: FusedDenoiser, what: str, steps: int, step_ms: float, **more: Any
) -> None:
    kept = model._pool._free
    more |= {"buffers": len(kept), "graphs": sum(len(buffers.graphs) for buffers in kept)}
    results.append({"what": what, "steps": steps, "step_ms": step_ms, **more, **memory()})
    print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in results[-1].items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--output", type=Path, help="by default results/<gpu>/soak.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA GPU.")
    model = dgemma.DiffusionGemma.from_pretrained("dgemma/text", device=GPU, dtype=torch.bfloat16)
    fast = accelerate(model)
    print(describe_run(), flush=True)
    results: list[dict[str, Any]] = []
    same = repeat_steps(fast, options.seconds / 2, results)
    half = len(results)
    varied = vary(fast, options.seconds / 2, results)
    rows = results[half:]
    middle = rows[len(rows) // 2]
    growth = {name: rows[-1][name] - middle[name] for name in memory()}
    report = {"run": describe_run(), "same_steps": same, "varied_steps": varied, "growth_mib": growth, "rows": results}
    print(f"{same} + {varied} steps; growth of the memory in the second half of the random shapes, MiB: {growth}")
    output = options.output or results_folder() / "soak.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
