"""An accelerated model under load: many steps in a row, then many shapes and settings, with the memory along the way.

python kernels/benchmarks/soak.py                             100,000 steps, then random shapes for two minutes
python kernels/benchmarks/soak.py --model small --steps 0     more shapes in the same time
python kernels/benchmarks/soak.py --model full --steps 2000   the published size

First, a single run repeats its steps. Then generations with random batch sizes, prompts, canvases, samplers,
temperatures and stop rules follow, with single tokens in between. Most of them need new graphs. Every line has the mean
time of a step, the memory on GPU and host, and the graphs that the model keeps. One generation is
repeated at the end and must give the same tokens. The last line has the growth of the memory during the second half of
the random shapes, when the caches are already full. `text` is `dgemma/text`, and `small` has two layers of its width
with random weights. `full` has the published size with random weights. All are in bfloat16.
"""

import argparse
import json
import random
import resource
import time
from pathlib import Path
from typing import Any

import torch
from generate import build
from timing import describe_run, results_folder
from torch import Tensor

import dgemma
from dgemma.run.plan import read_plan
from dgemma.run.step import start_state
from dgemma_kernels import FusedDenoiser, accelerate

GPU = torch.device("cuda")
EVERY = {"text": 100, "small": 100, "full": 10}  # generations per line


def make_model(name: str) -> FusedDenoiser:
    if name == "full":
        return build("bf16")
    model = dgemma.DiffusionGemma.from_pretrained("dgemma/text", device=GPU, dtype=torch.bfloat16)
    if name == "small":
        config = model.config.replace(num_hidden_layers=2, layer_types=model.config.layer_types[-2:])
        model = dgemma.DiffusionGemma(config).requires_grad_(False).to(GPU, torch.bfloat16)
    return accelerate(model)


def memory() -> dict[str, float]:
    """Return MiB: tensors, torch's memory and its part for graphs, the use of the GPU by all processes, host's peak."""
    free, total = torch.cuda.mem_get_info()
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    segments = torch.cuda.memory_snapshot()
    of_graphs = sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0)) / 2**20
    mine = {"tensors": torch.cuda.memory_allocated() / 2**20, "torch": torch.cuda.memory_reserved() / 2**20}
    return mine | {"of_graphs": of_graphs, "gpu": (total - free) / 2**20, "host_peak": host}


def draw_tokens(*shape: int) -> Tensor:
    return torch.randint(5, 8000, shape, device=GPU)


def repeat_steps(model: FusedDenoiser, steps: int, results: list[dict[str, Any]]) -> int:
    """Take the steps of one canvas again and again; return their number."""
    prompt = draw_tokens(1, 100)
    knobs, cache, taken = read_plan(model, prompt, stop=None).knobs, model.encode(prompt), 0
    noise, each = dgemma.UniformNoise(model.config.vocab_size), max(1, min(50, steps // 960))
    while taken < steps:
        begun = time.perf_counter()
        for seed in range(each):
            seeds = torch.tensor([seed], device=GPU)
            state = start_state(knobs, noise, seeds=seeds, canvas_len=model.config.canvas_length, num_steps=48)
            for _ in range(48):
                state, _ = model.step(state, cache=cache, knobs=knobs)
        torch.cuda.synchronize()
        taken += each * 48
        add(results, model, "the same step", taken, (time.perf_counter() - begun) / (each * 48) * 1e3)
    return taken


def vary(model: Any, seconds: float, every: int, results: list[dict[str, Any]]) -> int:
    """Generate with random shapes and settings; return the number of steps."""
    draw, taken, shapes, settings, end = random.Random(0), 0, set(), set(), time.perf_counter() + seconds
    canvas = model.config.canvas_length
    while time.perf_counter() < end:
        begun, before = time.perf_counter(), taken
        for number in range(every):
            batch, length, steps = draw.randint(1, 24), draw.randint(1, 700), draw.randint(1, 6)
            prompt = draw_tokens(batch, length)
            if number % 10 == 0:
                dgemma.generate_causal(model, prompt, max_new_tokens=3, top_k=draw.choice((1, None)), eos_token_ids=[])
            options: dict[str, Any] = {
                "max_new_tokens": draw.choice((canvas, 2 * canvas)),
                "steps": steps,
                "temperature": draw.choice((0.5, 0.8, 1.0)),
                "sampler": dgemma.EntropyBound(bound=draw.choice((0.05, 0.1, 0.5, 2.0))),
                "stop": draw.choice((None, dgemma.StableAndConfident(confidence=draw.choice((0.005, 0.1))))),
            }
            out = dgemma.generate(model, prompt, seed=draw.randint(0, 1000), progress=False, **options)
            taken += int(out.steps.amax(0).sum())
            shapes.add((batch, length))
            settings.add(str(options))
            if time.perf_counter() > end:
                break
        torch.cuda.synchronize()
        each = (time.perf_counter() - begun) / (taken - before) * 1e3
        add(results, model, "random shapes", taken, each, shapes=len(shapes), settings=len(settings))
    return taken


def add(
    results: list[dict[str, Any]], model: FusedDenoiser, what: str, steps: int, step_ms: float, **more: Any
) -> None:
    more |= {"graphs": len(model._workspace.graphs) + len(model._stepper.graphs)}
    results.append({"what": what, "steps": steps, "step_ms": step_ms, **more, **memory()})
    print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in results[-1].items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("text", "small", "full"), default="text")
    parser.add_argument("--steps", type=int, default=100_000, help="of the same canvas, before the random shapes")
    parser.add_argument("--seconds", type=float, default=120.0, help="of random shapes")
    parser.add_argument("--output", type=Path, help="by default results/<gpu>/soak_<model>.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA GPU.")
    fast = make_model(options.model)
    print(describe_run(), flush=True)
    results: list[dict[str, Any]] = []
    prompt = draw_tokens(2, 50)

    def write() -> Tensor:
        return dgemma.generate(fast, prompt, max_new_tokens=2 * fast.config.canvas_length, steps=5, seed=1).tokens

    before = write()
    report: dict[str, Any] = {"run": describe_run(), "model": options.model, "rows": results}
    report["same_steps"] = repeat_steps(fast, options.steps, results)
    half = len(results)
    report["varied_steps"] = vary(fast, options.seconds, EVERY[options.model], results)
    report["same_tokens_at_the_end"] = torch.equal(before, write())
    rows = results[half:]
    if rows:
        middle = rows[len(rows) // 2]
        report["growth_mib"] = {name: rows[-1][name] - middle[name] for name in memory()}
    print({name: value for name, value in report.items() if name != "rows"}, flush=True)
    output = options.output or results_folder() / f"soak_{options.model}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
