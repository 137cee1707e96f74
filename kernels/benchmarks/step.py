"""The whole denoising step at the published size: parity first, then time, memory, tokens per second, a profile.

python kernels/benchmarks/step.py                    every part, about four minutes
python kernels/benchmarks/step.py --parts parity step profile
python kernels/benchmarks/step.py --parts invariant  the cost of batch_invariant=True
python kernels/benchmarks/step.py --weights int4     with the experts in another format
python kernels/benchmarks/step.py --transformers     also transformers' eager step, in another process
python kernels/benchmarks/step.py --compiled         also transformers' compiled step, which takes minutes

Random bfloat16 weights route nearly evenly over all experts, which is the worst case. `skewed` restricts every layer to
84 experts. Long prefixes are random keys and values. Each part prints a table and adds to the JSON file.
"""

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from generate import add_precision, build, calm, draw_tokens
from timing import demand_parity, describe_run, measure_read_bandwidth, results_folder
from torch import Tensor

import dgemma
from dgemma.model import experts as reference_experts
from dgemma.run.knobs import Knobs
from dgemma.run.plan import read_plan
from dgemma.run.step import start_state
from dgemma_kernels import FusedDenoiser, accelerate
from dgemma_kernels.engine import denoiser
from dgemma_kernels.engine.cache import FusedCache
from dgemma_kernels.engine.precision import choose_parts
from dgemma_kernels.formats import ENCODERS, decode, format_of, quantize, stored_tensors

PARTS = ("parity", "step", "profile", "batches", "prefixes", "invariant", "skewed")
CANVAS, PROMPT, DISTINCT = 256, 1024, 84
GPU = torch.device("cuda")
PRODUCTS, ATTENTION = 750e12, 816e12  # FLOP/s of an H200; products in float8 have twice that rate


def knobs_of(model: FusedDenoiser, stop: bool = False) -> Knobs:
    anything = torch.zeros(1, 1, dtype=torch.int64, device=GPU)
    return read_plan(model, anything, stop="checkpoint" if stop else None).knobs


def random_prefix(model: FusedDenoiser, batch: int, length: int) -> FusedCache:
    """Make a cache of random keys and values of this length."""
    cache = model.new_cache(batch)
    for layer in cache.layers:
        size = length if layer.keep is None else min(length, layer.keep)
        for name in ("keys", "values"):
            empty = getattr(layer, name)
            setattr(layer, name, empty.new_empty(*empty.shape[:2], size, empty.shape[3]).normal_())
    cache.lengths, cache.num_slots, cache.num_seen = torch.full((batch,), length, device=GPU), length, length
    return cache


def last_graph(model: FusedDenoiser, kind: str) -> Any:
    """Return the forward of a kind that was used last."""
    return next(c for key, c in reversed(model._workspace.graphs.items()) if key[0] == kind)


def last_step(model: FusedDenoiser) -> "StepGraphs":
    """Return the graphs of the step that was taken last."""
    return StepGraphs(last_graph(model, "canvas"), next(reversed(model._stepper.graphs.values())))


class StepGraphs(NamedTuple):
    """The graphs of a step: the forward and the decision, then the soft embedding."""

    forward: Any
    decision: Any

    def replay(self) -> None:
        self.forward.graph.replay()
        self.decision.graph.replay()

    def soften(self) -> None:
        self.decision.soft_graph.replay()


def prepare_step(model: FusedDenoiser, cache: FusedCache, knobs: Knobs) -> StepGraphs:
    """Take three steps, so that a self-conditioned step is captured, and return its graphs."""
    batch = cache.batch_size
    seeds = torch.arange(batch, device=GPU)
    noise = dgemma.UniformNoise(model.config.vocab_size)
    state = start_state(knobs, noise, seeds=seeds, canvas_len=CANVAS, num_steps=48)
    for _ in range(3):
        state, record = model.step(state, cache=cache, knobs=knobs)
    assert torch.isfinite(record.entropy).all()
    torch.cuda.synchronize()
    return last_step(model)


def time_replays(*replays: Callable[[], None], repeats: int = 30) -> list[tuple[float, float]]:
    """Return median and spread (90th minus 10th percentile) in ms of each replay in the sequence, and of all."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(len(replays) + 1)] for _ in range(repeats)]
    for row in marks:
        row[0].record()
        for replay, mark in zip(replays, row[1:], strict=True):
            replay()
            mark.record()
    torch.cuda.synchronize()
    columns = [[a.elapsed_time(b) for a, b in itertools.pairwise(row)] for row in marks[3:]]
    totals = [row[0].elapsed_time(row[-1]) for row in marks[3:]]
    series = [sorted(times) for times in (*zip(*columns, strict=True), totals)]
    return [(statistics.median(t), t[9 * len(t) // 10] - t[len(t) // 10]) for t in series]


def count_active(model: FusedDenoiser, cache: FusedCache) -> float:
    """Return the mean number of distinct experts per layer in one forward of a random canvas."""
    from dgemma_kernels.engine import forward

    counts, route = [], forward.route

    def counted(*arguments: Any, **options: Any) -> Any:
        weights, index, pairs = route(*arguments, **options)
        counts.append(index.unique().numel())
        return weights, index, pairs

    forward.route = counted
    try:
        signal = torch.zeros(cache.batch_size, CANVAS, model.config.hidden_size, dtype=model.dtype, device=GPU)
        model._forward.canvas(draw_tokens(cache.batch_size, CANVAS), signal, cache.make_room(CANVAS))
    finally:
        forward.route = route
    return sum(counts) / len(counts)


def weight_bytes(model: FusedDenoiser, active: float) -> float:
    """Return the bytes of all layers' weights with this many experts per layer."""
    total = 0.0
    for layer in model._forward.weights.layers:
        both = (layer.expert_gate_up, layer.expert_down)
        total += active / model.config.num_experts * sum(t.nbytes for w in both for t in stored_tensors(w))
        others = (layer.qkv, layer.o, layer.router, layer.gate_up, layer.down)
        total += sum(t.nbytes for w in others for t in stored_tensors(w))
    return total


def prefix_bytes(model: FusedDenoiser, batch: int, prefix: int) -> float:
    """Return the bytes of the keys and values that a canvas or a token sees."""
    shapes = [layer.shape for layer in model._forward.weights.layers]
    seen = [prefix if shape.window is None else min(prefix, shape.window - 1) for shape in shapes]
    pairs = zip(seen, shapes, strict=True)
    return sum(4.0 * batch * keys * shape.num_key_value_heads * shape.head_dim for keys, shape in pairs)


def head_bytes(model: FusedDenoiser) -> int:
    return sum(t.nbytes for t in stored_tensors(model._forward.weights.head))


def soft_table(model: FusedDenoiser) -> Any:
    weights = model._forward.weights
    return weights.embedding if weights.soft_table is None else weights.soft_table


def step_bytes(model: FusedDenoiser, active: float, batch: int, prefix: int) -> float:
    """Return the fewest bytes of a step: each used weight once (the embedding twice), prefix, logits twice."""
    logits = 4 * batch * CANVAS * model.config.vocab_size
    table = sum(t.nbytes for t in stored_tensors(soft_table(model)))
    others = head_bytes(model) + table + 2 * logits
    return weight_bytes(model, active) + prefix_bytes(model, batch, prefix) + others


def floors(
    model: FusedDenoiser,
    batch: int,
    length: int,
    seen: Callable[[int | None], float],
    bandwidth: float,
    *,
    prefix: int = 0,
    active: float | None = None,
    vocabulary: tuple[Any, ...] = (),
    prompt_attention: bool = False,
) -> dict[str, float]:
    """Return lower bounds in milliseconds for experts, attention, other products, and their total.

    Each is the larger of FLOP / rate and bytes / bandwidth, for `batch` rows of `length` tokens after a prefix.
    `seen(window)` is the mean number of keys that a token sees; `active` experts are read, all by default.
    `vocabulary` has the weights of the head and of the soft embedding, if they are used. With `prompt_attention`, full
    layers compute attention in float8.
    """
    config, tokens = model.config, batch * length
    num_bytes = {"attention": prefix_bytes(model, batch, prefix), "experts": 0.0, "other products": 0.0}
    seconds = dict.fromkeys(num_bytes, 0.0)

    def add(kind: str, weight: Any, times: int = 1, share: float = 1.0) -> None:
        rate = PRODUCTS * (2 if format_of(weight) == "fp8" else 1)
        seconds[kind] += 2 * tokens * times * weight.shape[-2] * weight.shape[-1] / rate
        num_bytes[kind] += share * sum(t.nbytes for t in stored_tensors(weight))

    for layer in model._forward.weights.layers:
        for weight in (layer.qkv, layer.o, layer.gate_up, layer.down, layer.router):
            add("other products", weight)
        for expert_weight in (layer.expert_gate_up, layer.expert_down):
            add("experts", expert_weight, config.top_k_experts, (active or config.num_experts) / config.num_experts)
        keys = seen(layer.shape.window)
        rate = ATTENTION * (2 if prompt_attention and not layer.shape.is_sliding else 1)
        seconds["attention"] += 4 * tokens * config.num_attention_heads * layer.shape.head_dim * keys / rate
    for weight in vocabulary:
        add("other products", weight)
    least = {kind: 1e3 * max(seconds[kind], num_bytes[kind] / bandwidth) for kind in seconds}
    return least | {"all": 1e3 * max(sum(seconds.values()), sum(num_bytes.values()) / bandwidth)}


class Results:
    """Prints lines and stores them for the JSON file."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self.parts: dict[str, list[dict[str, Any]]] = {}

    def add(self, part: str, **values: Any) -> None:
        self.parts.setdefault(part, []).append(values)
        shown = "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        print(f"[{part}] {shown}", flush=True)


def typical_error(got: Tensor, want: Tensor) -> float:
    """Return the geometric mean over positions of ‖got − want‖ / ‖want‖.

    A token that changes its expert by rounding is off by tens of per cent in any implementation. A few such tokens
    would dominate the arithmetic mean.
    """
    return ((got - want).norm(dim=-1) / want.norm(dim=-1)).log().mean().exp().item()


def round_experts(model: dgemma.DiffusionGemma, wide: dgemma.DiffusionGemma, weights: str) -> None:
    """Round both models' experts to a format. For float8, let `model` round the experts' inputs as the kernels do."""
    layers: list[Any] = list(model.layers)
    for layer, wide_layer in zip(layers, wide.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            gated = name == "gate_up_proj"
            rounded = decode(ENCODERS[weights](getattr(layer.experts, name).detach(), torch.bfloat16, gated=gated))
            getattr(layer.experts, name).copy_(rounded)
            getattr(wide_layer.experts, name).copy_(rounded)
        if weights != "fp8":
            continue
        gate_up, down = layer.experts.gate_up, layer.experts.down
        layer.experts.gate_up = lambda rows, ends, fn=gate_up: fn(quantize(rows).decode().to(rows.dtype), ends)
        layer.experts.down = lambda rows, ends, fn=down: fn(
            quantize(rows.unflatten(1, (-1, 64))).decode().flatten(1).to(rows.dtype), ends
        )


def build_two_layers() -> tuple[dgemma.DiffusionGemma, dgemma.DiffusionGemma]:
    """Make two layers of the published size, in bfloat16 and with the same weights in float32."""
    config = dgemma.presets.diffusiongemma_26b_a4b().replace(
        num_hidden_layers=2, layer_types=dgemma.model.published.default_layer_types(2)
    )
    model = calm(dgemma.DiffusionGemma(config, device=GPU, dtype=torch.bfloat16)).requires_grad_(False)
    wide = dgemma.DiffusionGemma(config, device=GPU, dtype=torch.float32).requires_grad_(False)
    wide.load_state_dict(model.state_dict())
    return model, wide


def check_parity(results: Results, weights: str) -> None:
    """Check two layers of the published size: bf16 engine and reference against float32, and equal generations.

    All three models have the rounded weights. In float8, engine and reference also round the experts' inputs.
    """
    model, wide = build_two_layers()
    supports = reference_experts.supports_grouped
    reference_experts.supports_grouped = lambda widths, dtype: dtype != torch.float32 and supports(widths, dtype)
    prompt, canvas = draw_tokens(2, 700), draw_tokens(2, CANVAS)
    real = torch.ones_like(prompt)
    real[1, :100] = 0

    def run(model: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            cache = model.encode(prompt, attention_mask=real)
            first = model.denoise(canvas, cache)
            second = model.denoise(canvas, cache, self_cond=first.shaped(temperature=0.6))
            several = model.causal_logits(canvas[:, :100], cache)
            each = [model.causal_logits(token, cache) for token in canvas[:, 100:164].split(1, dim=1)]
            return first.logits, second.logits, several, torch.cat(each, dim=1)

    fast = accelerate(model, weights)
    if weights not in ("bf16", "packed"):
        round_experts(model, wide, weights)
    want, plain, got = run(wide), run(model), run(fast)
    del wide
    for name, g, p, w in zip(
        ("denoise", "self-conditioned", "causal", "autoregressive"), got, plain, want, strict=True
    ):
        ours, theirs = typical_error(g, w), typical_error(p, w)
        results.add("parity", what=name, engine_error=ours, reference_error=theirs, apart=typical_error(g, p))
        if not ours <= 1.25 * theirs:
            raise SystemExit(
                f"PARITY FAILED, nothing timed: {name} is off by {ours:.3e}, the reference by {theirs:.3e}"
            )
    cache = fast.encode(prompt)
    one, two = (dgemma.generate(fast, prompt, max_new_tokens=512, steps=6, progress=False) for _ in range(2))
    assert torch.equal(one.tokens, two.tokens), "two runs of the same seed differ"
    prediction = fast.denoise(canvas, cache).shaped(temperature=4.0)  # random weights predict the token they see
    plain_prediction = dgemma.Prediction(prediction.logits)
    demand_parity("entropy", prediction.entropy, plain_prediction.entropy, 1e-4)
    u = torch.rand(2, CANVAS, dtype=torch.float64, device=GPU)
    assert (prediction.sample(u) == plain_prediction.sample(u)).float().mean() > 0.99
    reference_experts.supports_grouped = supports
    check_greedy(results, model, fast, prompt)
    many = draw_tokens(16, 300)
    with torch.no_grad():
        engines: list[dgemma.Denoiser] = [fast, model]
        logits = [engine.denoise(many[:, :CANVAS], engine.encode(many)).logits for engine in engines]
    apart = typical_error(*logits)
    results.add("parity", what="batch of 16", apart=apart)
    if not apart <= (0.1 if weights == "fp8" else 0.05):  # a value between two float8 values may round either way
        raise SystemExit(f"PARITY FAILED, nothing timed: a batch of 16 is {apart:.3e} from the reference")


def check_greedy(results: Results, model: dgemma.DiffusionGemma, fast: FusedDenoiser, prompt: Tensor) -> None:
    """Take greedy steps over two canvases, each from the same state with both models.

    Let d be the largest difference between the two models' logits at a position. If their tokens differ there, the
    reference's two best logits must be at most 2d apart.
    """
    knobs = Knobs(
        sampler=dgemma.EntropyBound(bound=4.0, greedy=True), temperature=dgemma.LinearTemperature(), stop=None
    )
    noise, seeds = dgemma.UniformNoise(model.config.vocab_size), torch.arange(prompt.shape[0], device=GPU)
    engines: tuple[Any, Any] = (model, fast)
    caches = [engine.encode(prompt) for engine in engines]
    same = total = 0
    with torch.no_grad():
        for block in range(2):
            state = start_state(knobs, noise, seeds=seeds, canvas_len=CANVAS, num_steps=4, block=block)
            for _ in range(4):
                after, want = dgemma.step(model, state, cache=caches[0], knobs=knobs)
                _, got = fast.step(state, cache=caches[1], knobs=knobs)
                logits = want.prediction.logits
                apart = (got.prediction.logits - logits).abs().amax(-1)
                best = logits.topk(2).values
                parted = got.argmax != want.argmax
                same, total = same + int((~parted).sum()), total + parted.numel()
                if (parted & (best[..., 0] - best[..., 1] > 2 * apart)).any():
                    raise SystemExit("PARITY FAILED, nothing timed: a greedy token differs by more than rounding")
                state = after
            caches = [engine.encode(after.draft, cache) for engine, cache in zip(engines, caches, strict=True)]
        options: Any = {"max_new_tokens": 512, "steps": 4, "sampler": knobs.sampler, "stop": None, "progress": False}
        texts = [dgemma.generate(engine, prompt, **options).new_tokens for engine in engines]
    agreed = (texts[0] == texts[1]).float().mean().item()
    results.add("greedy", tokens_chosen=total, the_same=same, else_within_rounding=total - same, two_texts_agree=agreed)


def build_and_run(weights: str, float8: tuple[str, ...]) -> tuple[FusedDenoiser, dict[str, float]]:
    start = time.perf_counter()
    fast = build(weights, float8)
    torch.cuda.synchronize()
    built = time.perf_counter()
    fast.encode(draw_tokens(1, PROMPT))
    dgemma.generate(fast, draw_tokens(1, PROMPT), max_new_tokens=CANVAS, steps=1, progress=False)
    torch.cuda.synchronize()
    return fast, {"build_s": built - start, "first_token_s": time.perf_counter() - built}


def time_step(results: Results, part: str, model: FusedDenoiser, batch: int, prefix: int) -> float:
    cache = random_prefix(model, batch, prefix)
    start = time.perf_counter()
    captured = prepare_step(model, cache, knobs_of(model, stop=True))
    captured_s = time.perf_counter() - start
    (body, _), (soft, _), (total, spread) = time_replays(captured.replay, captured.soften)
    active = count_active(model, cache)
    num_bytes = step_bytes(model, active, batch, prefix)

    def seen(window: int | None) -> float:
        return CANVAS + (prefix if window is None else min(prefix, window - 1))

    table = (model._forward.weights.head, soft_table(model))
    least = floors(model, batch, CANVAS, seen, results.bandwidth, prefix=prefix, active=active, vocabulary=table)
    floor = max(least.pop("all"), 1e3 * num_bytes / results.bandwidth)
    results.add(
        part,
        batch=batch,
        prefix=prefix,
        step_ms=total,
        spread_ms=spread,
        floor_ms=floor,
        of_floor=floor / total,
        floors=least,
        to_stop_test_ms=body,
        soft_embedding_ms=soft,
        active_experts=active,
        gigabytes=num_bytes / 1e9,
        of_read_bandwidth=num_bytes / (total * 1e-3) / results.bandwidth,
        capture_s=captured_s,
    )
    return total


def compare_invariant(results: Results, model: FusedDenoiser, batches: list[int], prefixes: list[int]) -> None:
    """Time steps and single tokens by turns with and without `batch_invariant`, over the same weights."""
    with patch.object(denoiser, "take_weights", lambda *_, **__: model._forward.weights):
        twin = FusedDenoiser(model._model, batch_invariant=True)

    def compare(what: str, batch: int, prefix: int, capture: Callable[[FusedDenoiser, FusedCache], Any]) -> None:
        caches = [random_prefix(engine, batch, prefix) for engine in (model, twin)]
        captured = [capture(engine, cache) for engine, cache in zip((model, twin), caches, strict=True)]
        rounds = [[time_replays(*replays)[-1][0] for replays in captured] for _ in range(3)]
        plain, fixed = (statistics.median(times) for times in zip(*rounds, strict=True))
        results.add(
            "invariant", what=what, batch=batch, prefix=prefix, ms=plain, invariant_ms=fixed, ratio=fixed / plain
        )

    def step(engine: FusedDenoiser, cache: FusedCache) -> list[Callable[[], None]]:
        captured = prepare_step(engine, cache, knobs_of(engine, stop=True))
        return [captured.replay, captured.soften]

    def token(engine: FusedDenoiser, cache: FusedCache) -> list[Callable[[], None]]:
        engine.causal_logits(draw_tokens(cache.batch_size, 1), cache)
        return [last_graph(engine, "token").graph.replay]

    for batch in batches:
        compare("step", batch, PROMPT, step)
    for prefix in prefixes:
        compare("step", 1, prefix, step)
    compare("token", 1, PROMPT, token)


def add_profile(results: Results, run: Callable[[], Any], repeats: int = 3, **labels: Any) -> None:
    """Add the device time of one `run()` by kernel. A dependently launched kernel includes its wait."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    rows = [(e.key, e.count / repeats, e.self_device_time_total / repeats) for e in profile.key_averages()]
    rows.sort(key=lambda row: -row[2])
    for name, count, micros in rows[:16]:
        results.add("profile", **labels, us=micros, launches=count, each_us=micros / max(count, 1e-9), kernel=name[:90])
    sums = {"us": sum(row[2] for row in rows), "launches": sum(row[1] for row in rows)}
    results.add("profile", **labels, **sums, kernel="all")


def profile_step(results: Results, model: FusedDenoiser, batch: int = 1, **labels: Any) -> None:
    captured = prepare_step(model, random_prefix(model, batch, PROMPT), knobs_of(model, stop=True))

    def replay() -> None:
        captured.replay()
        captured.soften()

    add_profile(results, replay, **labels)


def restrict_experts(model: FusedDenoiser) -> None:
    """Restrict each layer to DISTINCT experts: a router row of zeros is never among the eight largest scores."""
    for layer in model._forward.weights.layers:
        off = torch.randperm(model.config.num_experts, device=GPU)[DISTINCT:]
        layer.router[off] = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", choices=tuple(ENCODERS), default="bf16", help="storage format of the experts")
    add_precision(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--prefixes", nargs="+", type=int, default=[0, 1024, 16_384, 131_072])
    parser.add_argument("--transformers", action="store_true", help="time transformers' eager step as well")
    parser.add_argument("--compiled", action="store_true", help="time its compiled step, which takes minutes")
    parser.add_argument("--output", type=Path, help="by default results/<gpu>/step.json, or step_<weights>.json")
    options = parser.parse_args()
    name = "step.json" if options.weights == "bf16" else f"step_{options.weights}.json"
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA GPU; on this machine run tests/kernels/test_engine.py instead.")
    output = options.output or results_folder() / name
    torch.manual_seed(0)
    print(describe_run(), flush=True)
    results = Results(measure_read_bandwidth())
    print(f"read bandwidth {results.bandwidth / 1e12:.2f} TB/s", flush=True)
    report: dict[str, Any] = {"run": describe_run(), "read_bandwidth": results.bandwidth, "parts": results.parts}

    def keep() -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=1) + "\n")

    if "parity" in options.parts:
        check_parity(results, options.weights)
        gc.collect()
        torch.cuda.empty_cache()
    keep()
    torch.cuda.reset_peak_memory_stats()
    float8 = choose_parts(options.precision, options.weights)
    model, seconds = build_and_run(options.weights, float8)
    results.add("build", **seconds)
    if "step" in options.parts:
        time_step(results, "step", model, 1, PROMPT)
        peak, at_end = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        results.add("memory", peak_gib=peak / 2**30, held_gib=at_end / 2**30)
        keep()
    if "profile" in options.parts:
        profile_step(results, model)
        keep()
    if "batches" in options.parts:
        for batch in options.batches:
            time_step(results, "batches", model, batch, PROMPT)
        keep()
    if "prefixes" in options.parts:
        for prefix in options.prefixes:
            time_step(results, "prefixes", model, 1, prefix)
        keep()
    if "invariant" in options.parts:
        compare_invariant(results, model, options.batches, [prefix for prefix in options.prefixes if prefix > PROMPT])
        keep()
    if "skewed" in options.parts:
        restrict_experts(model)
        time_step(results, "skewed", model, 1, PROMPT)
        keep()
    del model  # transformers' model does not fit next to it
    gc.collect()
    torch.cuda.empty_cache()
    for wanted, flags in ((options.transformers, []), (options.compiled, ["--compiled"])):
        if wanted:
            command = [sys.executable, str(Path(__file__).with_name("transformers_step.py")), *flags]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            results.add("transformers", output=output.strip().splitlines()[-1])
            keep()


if __name__ == "__main__":
    main()
