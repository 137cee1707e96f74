"""Prompts, autoregressive tokens, large batches and the first call at the published size: parity first, then time.

python kernels/benchmarks/prompts.py --profile --transformers           everything in bfloat16, with transformers
python kernels/benchmarks/prompts.py --parts read --lengths 1024 8192   two prompts only
python kernels/benchmarks/prompts.py --parts steps --batches 8 16       two denoising steps only
python kernels/benchmarks/prompts.py --parts tokens --weights fp8 --precision fast
python kernels/benchmarks/prompts.py --parts first                      the first call only

Weights are random and route nearly evenly over all experts. The floor is the larger of two durations. One is the time
of all FLOP, at 750 TFLOP/s for products and 816 for attention (twice that in float8). The other is the time to read the
used weights and the prefix once. `--profile` adds the time of each kernel, and `--transformers` the same work in
transformers, eager, after our model is gone. At the end, a table compares the times with our goals.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from generate import add_precision, build, draw_tokens
from step import (
    GPU,
    PROMPT,
    Results,
    add_profile,
    build_two_layers,
    floors,
    last_graph,
    profile_step,
    random_prefix,
    round_experts,
    time_step,
    typical_error,
)
from timing import describe_run, measure_read_bandwidth, results_folder

import dgemma
from dgemma.model import experts as reference_experts
from dgemma_kernels import FusedDenoiser, accelerate
from dgemma_kernels.engine.precision import choose_parts
from dgemma_kernels.formats import ENCODERS

PARTS = ("first", "parity", "read", "rows", "steps", "tokens")
LENGTHS = (256, 1024, 4096, 8192, 16_384, 65_536, 261_632)
ROWS = ((4, 256), (4, 1024), (16, 1024))  # batches of prompts
MANY = 1024  # with at least this many tokens in a forward, "prompt_attention" is in float8
LONG = 65_536  # tokens of a prompt; a longer one takes seconds
MOST_THEIRS = 16_384  # tokens that transformers reads: a mask of all pairs makes longer prompts slow
NUM_TOKENS = 64
# Our goals in milliseconds, by format of the experts; for prompts of 8,192 and 65,536 tokens they are 65,000 tokens per
# second in bf16 and 85,000 in fp8.
GOALS = {
    "bf16": {
        "read 1,024 tokens": 24.0,
        "read 8,192 tokens": 8192 / 65,
        "read 65,536 tokens": 65_536 / 65,
        "read 261,632 tokens": 7000.0,
        "step, batch 1": 13.8,
        "step, batch 8": 34.0,
        "step, batch 16": 64.0,
        "autoregressive token": 2.6,
        "first call": 12_000.0,
    },
    "fp8": {
        "read 8,192 tokens": 8192 / 85,
        "read 65,536 tokens": 65_536 / 85,
        "read 261,632 tokens": 7000.0,
        "step, batch 1": 8.8,
        "step, batch 8": 28.0,
        "step, batch 16": 52.0,
        "autoregressive token": 2.0,
    },
}


def check_parity(results: Results, weights: str) -> None:
    """Compare the engine and plain PyTorch in bfloat16 with plain PyTorch in float32, on two layers of full size.

    The three have the same weights, rounded to the format. Prompts are long, or rows of a ragged batch.
    """
    model, wide = build_two_layers()
    supports = reference_experts.supports_grouped
    reference_experts.supports_grouped = lambda widths, dtype: dtype != torch.float32 and supports(widths, dtype)
    fast = accelerate(model, weights)
    if weights not in ("bf16", "packed"):
        round_experts(model, wide, weights)
    cases: list[tuple[str, Any, Any, int]] = [("9,000 tokens", draw_tokens(1, 9000), None, 64)]
    for _ in range(3):  # the third one in a row is captured
        fast.encode(draw_tokens(1, 8192))
    cases.append(("8,192 tokens, captured", draw_tokens(1, 8192), None, 64))
    cases.append(("1,000 tokens, then one by one", draw_tokens(1, 1000), None, 1))  # the 25th leaves the window
    ragged, real = draw_tokens(3, 900), torch.ones(3, 900, dtype=torch.int64, device=GPU)
    real[0, :200], real[2, :899] = 0, 0  # padded on the left; the last row has one token
    cases += [("rows of 700, 900 and 1, launched", ragged, real, 64), ("the same, captured", ragged, real, 64)]
    # Rounding changes the experts of some tokens, so few tokens would make a noisy mean.
    after = draw_tokens(3, 256)

    def read(engine: Any, tokens: torch.Tensor, mask: torch.Tensor | None, at_once: int) -> torch.Tensor:
        cache = engine.encode(tokens, attention_mask=mask)
        parts = after[: len(tokens), : 64 if at_once == 1 else None].split(at_once, dim=1)
        return torch.cat([engine.causal_logits(part, cache) for part in parts], dim=1)

    for name, tokens, mask, at_once in cases:
        with torch.no_grad():
            want, *got = (read(engine, tokens, mask, at_once) for engine in (wide, model, fast))
        errors = [typical_error(logits, want) for logits in got]
        results.add("parity", what=name, reference_error=errors[0], engine_error=errors[1])
        if not errors[1] <= 1.25 * errors[0]:
            raise SystemExit(
                f"PARITY FAILED, nothing timed: {name} is off by {errors[1]:.3e}, over 1.25 times the {errors[0]:.3e} "
                "of plain PyTorch in bfloat16."
            )
    reference_experts.supports_grouped = supports


def time_read(model: FusedDenoiser, batch: int, length: int) -> list[float]:
    """Return the milliseconds of each `encode`, from the call to the end on the device. A very long one runs once."""
    times, tokens = [], batch * length
    warmups, repeats = (3, 7) if tokens <= 16_384 else (1, 2) if tokens <= LONG else (0, 1)
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
    bytes_before = torch.cuda.memory_allocated()
    times = time_read(model, batch, length)
    middle = statistics.median(times)

    def seen(window: int | None) -> float:
        return length / 2 if window is None else min(length / 2, window)

    narrow = model._forward.prompt_attention and batch * length >= MANY
    least = floors(model, batch, length, seen, results.bandwidth, prompt_attention=narrow)
    floor = least.pop("all")
    results.add(
        part,
        batch=batch,
        length=length,
        ms=middle,
        from_ms=min(times),
        to_ms=max(times),
        tokens_per_s=batch * length / middle * 1e3,
        floor_ms=floor,
        of_floor=floor / middle,
        floors=least,
        more_gb=(torch.cuda.max_memory_allocated() - bytes_before) / 1e9,
    )


def profile_token(results: Results, model: FusedDenoiser, prompt: int) -> None:
    """Profile the graph of one autoregressive token, without the draw."""
    cache = random_prefix(model, 1, prompt)
    model.causal_logits(draw_tokens(1, 1), cache)
    add_profile(results, last_graph(model, "token").graph.replay, what="token", repeats=8)


def time_tokens(results: Results, model: Any, prompt: int) -> None:
    """Time a token of `generate_causal`, greedy and sampled: the extra time of a longer text per extra token."""
    tokens, ways = draw_tokens(1, prompt), {"greedy": {"top_k": 1}, "sampled": {}}

    def seen(window: int | None) -> float:
        return prompt if window is None else min(prompt, window)

    head, active = model._forward.weights.head, model.config.top_k_experts
    least = floors(model, 1, 1, seen, results.bandwidth, prefix=prompt, active=active, vocabulary=(head,))
    options: Any
    for name, options in ways.items():
        seconds: dict[int, list[float]] = {NUM_TOKENS: [], 2 * NUM_TOKENS: []}
        for _ in range(3):
            for num_tokens, times in seconds.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                dgemma.generate_causal(model, tokens, max_new_tokens=num_tokens, eos_token_ids=[], **options)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
        few, many = (min(times[1:]) for times in seconds.values())
        middle = 1e3 * (many - few) / NUM_TOKENS
        results.add(
            "tokens",
            how=name,
            prompt=prompt,
            ms_per_token=middle,
            floor_ms=least["all"],
            of_floor=least["all"] / middle,
            floors={kind: ms for kind, ms in least.items() if kind != "all"},
        )


def time_first_call(results: Results, model: FusedDenoiser) -> None:
    """Time the first two generations of one canvas after a prompt of 1,024 tokens, with an empty Triton cache."""
    seconds, prompt = [], draw_tokens(1, PROMPT)
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        dgemma.generate(model, prompt, max_new_tokens=256, steps=4, progress=False)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    results.add("first", first_call_s=seconds[0], second_call_s=seconds[1])


def time_transformers(
    results: Results, parts: list[str], lengths: list[int], batches: list[int], keep: Callable[[], None]
) -> None:
    """Time the same prompts, steps and tokens in transformers. Work that does not fit into the memory is left out."""
    import transformers_step

    theirs: Any = transformers_step.build(dgemma.presets.diffusiongemma_26b_a4b(), "cuda")

    def add(work: Callable[..., float], batch: int, length: int) -> None:
        try:
            results.add("transformers", work=work.__name__, batch=batch, length=length, ms=work(theirs, batch, length))
        except torch.OutOfMemoryError:
            results.add("transformers", work=work.__name__, batch=batch, length=length, ms=None)
        keep()

    if "read" in parts:
        for length in sorted(length for length in lengths if length <= MOST_THEIRS):
            add(transformers_step.read, 1, length)
    if "rows" in parts:
        for batch, length in ROWS:
            add(transformers_step.read, batch, length)
    if "tokens" in parts:
        add(transformers_step.token, 1, PROMPT)
    if "steps" in parts:
        for batch in batches:
            add(transformers_step.step, batch, PROMPT)


def summarise(results: Results, weights: str) -> None:
    """Add one row for each piece of work: milliseconds, goal, floor and transformers' milliseconds."""
    parts, theirs = results.parts, {}
    for part in parts.get("transformers", []):
        length, batch = part["length"], part["batch"]
        prompt = f"{length:,} tokens" if batch == 1 else f"{batch} × {length:,} tokens"
        names = {"read": f"read {prompt}", "step": f"step, batch {batch}", "token": "autoregressive token"}
        theirs[names[part["work"]]] = part["ms"]
    rows = {"first call": {"ms": 1e3 * parts["first"][0]["first_call_s"]}} if "first" in parts else {}
    rows |= {f"read {part['length']:,} tokens": part for part in parts.get("read", [])}
    rows |= {f"read {part['batch']} × {part['length']:,} tokens": part for part in parts.get("rows", [])}
    rows |= {f"step, batch {part['batch']}": part | {"ms": part["step_ms"]} for part in parts.get("batches", [])}
    if "tokens" in parts:
        rows["autoregressive token"] = parts["tokens"][0] | {"ms": parts["tokens"][0]["ms_per_token"]}
    for name, part in rows.items():
        goal = GOALS.get(weights, {}).get(name)
        kept = {key: part[key] for key in ("spread_ms", "floor_ms", "floors") if key in part}
        results.add("table", row=name, ms=part["ms"], goal_ms=goal, **kept, transformers_ms=theirs.get(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", choices=tuple(ENCODERS), default="bf16", help="storage format of the experts")
    add_precision(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), help="of prompts")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 16], help="of steps")
    parser.add_argument("--profile", action="store_true", help="add the time of each kernel")
    parser.add_argument("--transformers", action="store_true", help="time transformers as well")
    parser.add_argument("--output", type=Path, help="by default results/<gpu>/prompts.json, or prompts_<weights>.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA GPU; on this machine run tests/kernels/test_engine.py instead.")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        if "first" in options.parts:  # needs an empty cache
            os.environ["TRITON_CACHE_DIR"] = folder
        measure(options)


def measure(options: argparse.Namespace) -> None:
    weights, parts = options.weights, options.parts
    float8 = choose_parts(options.precision, weights)
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
    if "first" in parts:
        time_first_call(results, model)
        keep()
    if "parity" in parts:
        check_parity(results, weights)
        keep()
    if "tokens" in parts:
        time_tokens(results, model, PROMPT)
        if options.profile:
            profile_token(results, model, PROMPT)
        keep()
    if "steps" in parts:
        for batch in options.batches:
            time_step(results, "batches", model, batch, PROMPT)
            if options.profile:
                profile_step(results, model, batch, what=f"step, batch {batch}")
            keep()
    if "rows" in parts:
        for batch, length in ROWS:
            add_read(results, "rows", model, batch, length)
        keep()
    if "read" in parts:
        for length in options.lengths:
            what = f"read {length:,} tokens"
            if length <= LONG:
                add_read(results, "read", model, 1, length)
                keep()
                if options.profile:
                    add_profile(results, partial(model.encode, draw_tokens(1, length)), repeats=1, what=what)
            elif options.profile:  # its only run is also profiled, which costs the host nothing
                add_profile(results, partial(add_read, results, "read", model, 1, length), repeats=1, what=what)
            else:
                add_read(results, "read", model, 1, length)
            keep()
    model = None  # transformers' model does not fit next to it
    keep()
    if options.transformers:
        time_transformers(results, parts, options.lengths, options.batches, keep)
    summarise(results, weights)
    keep()


if __name__ == "__main__":
    main()
