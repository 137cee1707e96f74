"""Work of changing shapes at the published size, as a server sees it: warm-up, random calls, shared prefixes, memory.

python kernels/benchmarks/workloads.py --weights fp8 --precision fast     over five minutes on an H200
python kernels/benchmarks/workloads.py --parts calls --calls 60           a quick look

Weights are random, so no text ends early. The parts, in this order:

- memory: the peak of one long prompt and a canvas, beyond the weights and the cache's keys and values. It comes before
  the warm-up, whose buffers are for 16 rows.
- compile: `warm_up` for 16 rows in another process, with nothing compiled. The warm-up of this process follows. It
  finds the kernels of the other one in Triton's cache.
- calls: one canvas after prompts of random shapes. Each shape (rows, tokens, setting) is called three times, at random
  moments, and each call is compared with the median of its shape. Rows and tokens are log-uniform, because an average
  of uniform ones would take seconds per call. The first row has all tokens, and other rows have fewer.
- prefixes: chats that begin with the same 4,000 tokens, with and without `SharedPrefixes`: all at once, and one by one.

The results are written after each part.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from generate import add_precision, build, draw_tokens
from step import Results
from timing import describe_run, results_folder, seconds_of

import dgemma
from dgemma.many.prefixes import PREFIX_BYTES, SharedPrefixes
from dgemma_kernels import FusedDenoiser
from dgemma_kernels.engine.precision import choose_parts
from dgemma_kernels.formats import ENCODERS

PARTS = ("memory", "compile", "calls", "prefixes")
MOST_ROWS, MOST_TOKENS, LONG, SHARED = 16, 16_384, 32_768, 4000
CALLS_PER_SHAPE, STEPS = 3, 4
SETTINGS: dict[str, dict[str, Any]] = {
    "published": {},
    "top_k": {"top_k": 64},
    "top_p": {"top_p": 0.9},
    "ancestral": {"sampler": dgemma.sampling.Ancestral()},
    "greedy": {"sampler": dgemma.EntropyBound(bound=0.5, greedy=True), "temperature": 1.0},
}


class Shape(NamedTuple):
    rows: int
    tokens: int
    setting: str


def measure_memory(results: Results, model: FusedDenoiser) -> None:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = dgemma.generate(model, draw_tokens(1, LONG), max_new_tokens=1, steps=STEPS, eos_token_ids=[], progress=False)
    peak = torch.cuda.max_memory_allocated()
    cache: Any = out.cache
    kept = cache.num_bytes
    results.add("memory", tokens=LONG, cache_gb=kept / 1e9, beyond_gb=(peak - before - kept) / 1e9)


def draw_shapes(count: int, most_rows: int, most_tokens: int, seed: int = 0) -> list[Shape]:
    draw, settings = random.Random(seed), list(SETTINGS)

    def log_uniform(most: int) -> int:
        return min(int((most + 1) ** draw.random()), most)

    return [Shape(log_uniform(most_rows), log_uniform(most_tokens), settings[at % 5]) for at in range(count)]


def draw_prompt(shape: Shape, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens (B, P) and the mask of the real ones: the first row has all, and other rows at least one."""
    tokens = draw_tokens(shape.rows, shape.tokens)
    draw = random.Random(seed)
    lengths = [shape.tokens, *(draw.randint(1, shape.tokens) for _ in range(shape.rows - 1))]
    real = torch.arange(shape.tokens) >= shape.tokens - torch.tensor(lengths)[:, None]
    return tokens, real.to(tokens.device)


def time_calls(results: Results, model: FusedDenoiser, num_calls: int) -> None:
    """Time every shape three times, in random order; print those whose slowest call is furthest from the median."""
    shapes = draw_shapes(num_calls // CALLS_PER_SHAPE, MOST_ROWS, MOST_TOKENS)
    order = [at for _ in range(CALLS_PER_SHAPE) for at in random.Random(1).sample(range(len(shapes)), len(shapes))]
    seconds: list[list[float]] = [[] for _ in shapes]
    for number, at in enumerate(order):
        tokens, real = draw_prompt(shapes[at], seed=at)
        options: dict[str, Any] = {"max_new_tokens": 1, "steps": STEPS, "stop": None, "eos_token_ids": []}
        options |= {"attention_mask": real, "seed": number, "progress": False} | SETTINGS[shapes[at].setting]
        seconds[at].append(seconds_of(partial(dgemma.generate, model, tokens, **options)))
        if number % 100 == 99:
            print(f"  {number + 1} of {len(order)} calls", flush=True)
    ratios = [max(each) / statistics.median(each) for each in seconds]
    worst = sorted(range(len(shapes)), key=ratios.__getitem__, reverse=True)[:5]
    results.add(
        "calls",
        calls=len(order),
        shapes=len(shapes),
        above_1_5=sum(second > 1.5 * statistics.median(each) for each in seconds for second in each),
        slowest_ratio=ratios[worst[0]],
        slowest_ms=1e3 * max(map(max, seconds)),
        median_ms=1e3 * statistics.median(itertools.chain(*seconds)),
    )
    for at in worst:
        results.add("slowest", **shapes[at]._asdict(), ratio=ratios[at], ms=[round(1e3 * s, 1) for s in seconds[at]])


def time_prefixes(results: Results, model: FusedDenoiser, num_chats: int) -> None:
    lengths = random.Random(2)
    options: dict[str, Any] = {"max_new_tokens": 1, "steps": STEPS, "stop": None, "eos_token_ids": []}

    def draw_chats(count: int) -> list[torch.Tensor]:
        shared = draw_tokens(SHARED)
        return [torch.cat((shared, draw_tokens(lengths.randint(20, 200)))).cpu() for _ in range(count)]

    def run(chats: list[torch.Tensor], prefixes: SharedPrefixes) -> list[float]:
        """Return the seconds to each answer, in the order in which they end."""
        start, marks = time.perf_counter(), []
        answers = dgemma.generate_many(
            model, chats, batch_size=MOST_ROWS, prefixes=prefixes, in_order=False, progress=False, **options
        )
        for _ in answers:
            marks.append(time.perf_counter() - start)
        return marks

    others, chats = draw_chats(MOST_ROWS), draw_chats(num_chats)
    for num_bytes in (0, PREFIX_BYTES):
        run(others, SharedPrefixes(num_bytes))  # not timed
        prefixes = SharedPrefixes(num_bytes)
        marks = run(chats, prefixes)
        alone = [run([chat], prefixes)[0] for chat in chats[:20]]
        results.add(
            "prefixes",
            shared=num_bytes > 0,
            chats=num_chats,
            first_block_ms=1e3 * marks[0],
            chats_per_s=num_chats / marks[-1],
            alone_first_block_ms=1e3 * statistics.median(alone),
            read_tokens=prefixes.num_read,
        )


def time_compiling(results: Results, options: argparse.Namespace) -> None:
    """Warm up in another process, which leaves its kernels in Triton's cache."""
    precision = options.precision if isinstance(options.precision, str) else ",".join(options.precision)
    command = [sys.executable, __file__, "--weights", options.weights, "--precision", precision, "--parts"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    results.add("warm_up", compiled="nothing", seconds=json.loads(printed.splitlines()[-1])["warm_up_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", choices=tuple(ENCODERS), default="bf16", help="storage format of the experts")
    add_precision(parser)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="none: only the warm-up")
    parser.add_argument("--calls", type=int, default=669, help="random calls (%(default)s)")
    parser.add_argument("--chats", type=int, default=200, help="chats that share a prefix (%(default)s)")
    parser.add_argument("--output", type=Path, help="by default results/<gpu>/workloads_<weights>.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA GPU; on this machine run tests/kernels/test_graphs.py instead.")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        if "compile" in options.parts:  # needs an empty cache
            os.environ["TRITON_CACHE_DIR"] = folder
        measure(options)


def measure(options: argparse.Namespace) -> None:
    print(describe_run(), flush=True)
    results = Results(bandwidth=0.0)
    if "compile" in options.parts:
        time_compiling(results, options)
    model = build(options.weights, choose_parts(options.precision, options.weights))
    if "memory" in options.parts:
        measure_memory(results, model)
    warm_up_s = seconds_of(lambda: model.warm_up(MOST_ROWS, MOST_TOKENS))
    if not options.parts:
        print(json.dumps({"warm_up_s": warm_up_s}))
        return
    results.add("warm_up", compiled="all" if "compile" in options.parts else "as found", seconds=warm_up_s)
    write(results, options)
    if "calls" in options.parts:
        time_calls(results, model, options.calls)
        write(results, options)
    if "prefixes" in options.parts:
        time_prefixes(results, model, options.chats)
        write(results, options)


def write(results: Results, options: argparse.Namespace) -> None:
    output = options.output or results_folder() / f"workloads_{options.weights}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    report = {"run": describe_run(), "precision": options.precision, "parts": results.parts}
    output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
