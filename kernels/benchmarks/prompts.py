"""Prompts, autoregressive tokens, large batches and the first call at the published size: parity first, then time.

python kernels/benchmarks/prompts.py                                    every part in bfloat16
python kernels/benchmarks/prompts.py --parts read --lengths 1024 8192   two prompts only
python kernels/benchmarks/prompts.py --weights fp8 --float8 attention dense head
python kernels/benchmarks/prompts.py --parts first                      the first call only
python kernels/benchmarks/prompts.py --transformers                     also transformers' prefill, in another process

Weights are random and route nearly evenly over all experts. The floor of a prompt is its FLOP, at 700 TFLOP/s for
products and 816 for attention, or the time to read all weights once.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from generate import build, draw_tokens
from step import GPU, Results, build_two_layers, round_experts, time_step, typical_error
from timing import describe_run, measure_read_bandwidth, results_folder

import dgemma
from dgemma.model import experts as reference_experts
from dgemma_kernels import FusedDenoiser, accelerate
from dgemma_kernels.formats import ENCODERS, stored_tensors

PARTS = ("parity", "read", "rows", "profile", "words", "batches", "first")
LENGTHS = (256, 1024, 4096, 8192, 65_536, 261_632)
WORDS = 64


def check_parity(results: Results, weights: str) -> None:
    """Compare two layers of full size in bfloat16 with float32, over a prompt of two chunks and a ragged batch.

    All three models have the rounded weights, as in `step.check_parity`.
    """
    model, wide = build_two_layers()
    supports = reference_experts._supports_grouped
    reference_experts._supports_grouped = lambda *w: w[0].dtype != torch.float32 and supports(*w)
    fast = accelerate(model, weights)
    if weights not in ("bf16", "packed"):
        round_experts(model, wide, weights)
    cases: list[tuple[str, Any, Any]] = [("9,000 tokens", draw_tokens(1, 9000), None)]
    ragged, real = draw_tokens(3, 900), torch.ones(3, 900, dtype=torch.int64, device=GPU)
    real[0, :200], real[2, :899] = 0, 0  # padded on the left; the last row has one token
    cases += [("rows of 700, 900 and 1, launched", ragged, real), ("the same, captured", ragged, real)]
    after = draw_tokens(3, 64)
    for name, tokens, mask in cases:
        with torch.no_grad():
            engines: list[Any] = [wide, model, fast]
            want, *got = (
                engine.causal_logits(after[: len(tokens)], engine.encode(tokens, attention_mask=mask))
                for engine in engines
            )
        errors = [typical_error(logits, want) for logits in got]
        results.add("parity", what=name, reference_error=errors[0], engine_error=errors[1])
        if not errors[1] <= 1.25 * errors[0]:
            raise SystemExit(f"PARITY FAILED, nothing timed: {name} is off by {errors[1]:.3e}, not {errors[0]:.3e}")
    reference_experts._supports_grouped = supports


def floor_ms(model: FusedDenoiser, length: int, bandwidth: float) -> float:
    """Return the larger of the time to compute a prompt and the time to read all weights once."""
    config, products, attention, num_bytes = model.config, 0.0, 0.0, 0
    for layer in model._forward.weights.layers:
        plain = (layer.qkv, layer.o, layer.gate_up, layer.down, layer.router)
        both = (layer.expert_gate_up, layer.expert_down)
        num_bytes += sum(t.nbytes for weight in (*plain, *both) for t in stored_tensors(weight))
        products += sum(weight.shape[0] * weight.shape[1] for weight in plain)
        products += config.top_k_experts * sum(weight.shape[1] * weight.shape[2] for weight in both)
        seen = length / 2 if layer.shape.window is None else min(length / 2, layer.shape.window)
        attention += 4 * config.num_attention_heads * layer.shape.head_dim * seen
    compute = length * (2 * products / 700e12 + attention / 816e12)
    return 1e3 * max(compute, num_bytes / bandwidth)


def time_read(model: FusedDenoiser, batch: int, length: int) -> list[float]:
    """Return the milliseconds of each `encode`, from the call to the end on the device."""
    times, tokens = [], batch * length
    warmups, repeats = (3, 7) if tokens <= 16_384 else (1, 2) if tokens <= 65_536 else (0, 1)
    for _ in range(warmups + repeats):
        prompt = draw_tokens(batch, length)
        torch.cuda.synchronize()
        start = time.perf_counter()
        cache = model.encode(prompt)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
        del cache
    return times[warmups:]


def add_read(results: Results, part: str, model: FusedDenoiser, batch: int, length: int) -> None:
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    times = time_read(model, batch, length)
    middle = statistics.median(times)
    results.add(
        part,
        batch=batch,
        length=length,
        ms=middle,
        from_ms=min(times),
        to_ms=max(times),
        tokens_per_s=batch * length / middle * 1e3,
        floor_ms=batch * floor_ms(model, length, results.bandwidth * batch),
        more_gb=(torch.cuda.max_memory_allocated() - held) / 1e9,
    )


def profile_read(results: Results, model: FusedDenoiser, length: int) -> None:
    tokens = draw_tokens(1, length)
    model.encode(tokens)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        model.encode(tokens)
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
    for row in rows[:16]:
        name, micros = row.key[:90], row.self_device_time_total
        results.add("profile", length=length, us=micros, launches=row.count, each_us=micros / row.count, kernel=name)


def time_words(results: Results, model: Any, prompt: int) -> None:
    """Time `generate_causal`, greedy and sampled, as a caller does: the difference of two lengths."""
    tokens, ways = draw_tokens(1, prompt), {"greedy": {"top_k": 1}, "sampled": {}}
    options: Any
    for name, options in ways.items():
        seconds: dict[int, list[float]] = {WORDS: [], 2 * WORDS: []}
        for _ in range(3):
            for words, times in seconds.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                dgemma.generate_causal(model, tokens, max_new_tokens=words, eos_token_ids=[], **options)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
        few, many = (min(times[1:]) for times in seconds.values())
        results.add("words", how=name, prompt=prompt, ms_per_token=1e3 * (many - few) / WORDS)


def time_first_call(results: Results, model: FusedDenoiser) -> None:
    """Time the first two generations of one canvas after a prompt of 1,024 tokens, with an empty Triton cache."""
    seconds, prompt = [], draw_tokens(1, 1024)
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        dgemma.generate(model, prompt, max_new_tokens=256, steps=4, progress=False)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    results.add("first", first_call_s=seconds[0], second_call_s=seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", choices=tuple(ENCODERS), default="bf16", help="storage format of the experts")
    parser.add_argument("--float8", nargs="*", choices=("attention", "dense", "head"), default=[])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--transformers", action="store_true", help="time transformers' prefill as well")
    parser.add_argument("--output", type=Path, help="by default results/<gpu>/prompts.json, or prompts_<weights>.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA GPU; on this machine run tests/kernels/test_engine.py instead.")
    weights, float8 = options.weights, tuple(options.float8)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:  # an empty cache for the first call
        os.environ["TRITON_CACHE_DIR"] = folder
        measure(options, weights, float8)


def measure(options: argparse.Namespace, weights: str, float8: tuple[str, ...]) -> None:
    output = options.output or results_folder() / ("prompts.json" if weights == "bf16" else f"prompts_{weights}.json")
    print(describe_run(), flush=True)
    results = Results(measure_read_bandwidth())
    report = {"run": describe_run(), "read_bandwidth": results.bandwidth, "parts": results.parts}

    def keep() -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()

    model: FusedDenoiser | None = build(weights, float8)
    assert model is not None
    if "first" in options.parts:
        time_first_call(results, model)
    if "parity" in options.parts:
        check_parity(results, weights)
    keep()
    if "rows" in options.parts:
        for batch, length in ((4, 256), (4, 1024), (16, 1024)):
            add_read(results, "rows", model, batch, length)
        keep()
    if "batches" in options.parts:
        for batch in (8, 16):
            time_step(results, "batches", model, batch, 1024)
            keep()
    if "profile" in options.parts:
        profile_read(results, model, 8192)
        keep()
    if "words" in options.parts:
        time_words(results, model, 1024)
        keep()
    if "read" in options.parts:
        for length in options.lengths:
            add_read(results, "read", model, 1, length)
            keep()
    model = None  # transformers' model does not fit next to it
    keep()
    if options.transformers:
        command = [sys.executable, str(Path(__file__).with_name("transformers_step.py")), "--read", "1024", "8192"]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        for line in said.strip().splitlines()[-2:]:
            results.add("transformers", said=line)
        keep()


if __name__ == "__main__":
    main()
