"""The mixture-of-experts half of a layer at the published sizes: parity first, then time against read bandwidth.

python kernels/benchmarks/experts.py                  every kernel of the half; the experts at 1 to 4,096 tokens
python kernels/benchmarks/experts.py --weights int4   with the experts in another format

Weights are random and differ in every layer (30 layers are 45 GB, so that no cache helps). Routing is random as well,
and spread evenly over all experts (the worst case) or over 84 random experts per layer. `experts_sweep.py` compares
tiles.
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from timing import demand_parity, describe_run, measure_read_bandwidth, time_graph
from torch import Tensor
from torch.utils._pytree import tree_map

from dgemma_kernels.formats import ENCODERS, ExpertWeights, FourBit, Packed, Quantized, quantize, stored_tensors
from dgemma_kernels.formats.float8 import values_and_scale
from dgemma_kernels.ops import configs
from dgemma_kernels.ops.experts import kernel as experts
from dgemma_kernels.ops.mlp import kernel as mlp
from dgemma_kernels.ops.mlp import reference as mlp_reference
from dgemma_kernels.ops.norms import kernel as norms
from dgemma_kernels.ops.norms import reference as norms_reference
from dgemma_kernels.ops.router import kernel as router
from dgemma_kernels.ops.router import reference as router_reference
from dgemma_kernels.ops.router.reference import count_pairs

E, A, D, F, DENSE, EPS = 128, 8, 2816, 704, 2112, 1e-6
# The relative error of two products and four bf16 roundings is about 3e-3; that of a wrong row or tile exceeds 1e-2. In
# float8, hidden values may also be off by their rounding, and the second product is checked from the rounded values.
LIMIT = 6e-3
GPU, DTYPE = torch.device("cuda"), torch.bfloat16  # dtype of rows and of drawn weights


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer's weights, with the experts in this storage format."""

    format: str
    gate_up: ExpertWeights  # (E, 2F, D)
    down: ExpertWeights  # (E, D, F)
    dense_gate_up: Tensor  # (2 DENSE, D)
    dense_down: Tensor  # (D, DENSE)
    proj: Tensor  # (E, D)

    def expert_bytes(self, active: float) -> tuple[float, float]:
        """Return the bytes that gate_up and down read for `active` experts, with scales and outliers."""
        stored = (stored_tensors(weights) for weights in (self.gate_up, self.down))
        first, second = (active / E * sum(t.nbytes for t in tensors) for tensors in stored)
        return first, second


def draw_layer(format: str) -> Layer:
    shapes = {
        "gate_up": (E, 2 * F, D),
        "down": (E, D, F),
        "dense_gate_up": (2 * DENSE, D),
        "dense_down": (D, DENSE),
        "proj": (E, D),
    }
    weights = {name: torch.randn(*shape, dtype=torch.bfloat16, device=GPU) for name, shape in shapes.items()}
    weights = {name: weight.mul_(weight.shape[-1] ** -0.5).to(DTYPE) for name, weight in weights.items()}
    encoded: dict[str, Any] = {
        name: ENCODERS[format](weights[name], DTYPE, gated=name == "gate_up") for name in ("gate_up", "down")
    }
    return Layer(format=format, **(weights | encoded))


def draw_rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=GPU).to(DTYPE)


def draw_input(tokens: int, format: str) -> Tensor | Quantized:
    return quantize(draw_rows(tokens, D)) if format == "fp8" else draw_rows(tokens, D)


def draw_hidden(pairs: int, format: str, block: int | None = 64) -> Tensor | Quantized:
    rows = draw_rows(pairs, F)
    if format != "fp8":
        return rows
    if block is None:
        return quantize(rows)
    scale = torch.full((pairs, -(-F // block)), 0.01, device=GPU)
    return Quantized(values=rows.to(torch.float8_e4m3fn), scale=scale, dtype=rows.dtype, block=block)


def draw_index(tokens: int, distinct: int = E) -> Tensor:
    """Draw (tokens, A) experts, different within a token, uniformly from a random subset of `distinct` experts."""
    allowed = torch.randperm(E, device=GPU)[:distinct]
    return allowed[torch.rand(tokens, distinct, device=GPU).topk(A, dim=-1).indices].int().contiguous()


def draw_skewed_index(tokens: int) -> Tensor:
    """Draw experts so that expert 5 has every token, fifteen others share the rest, and most experts have no row."""
    rest = torch.arange(16, 31, device=GPU)[torch.rand(tokens, 15, device=GPU).topk(A - 1, dim=-1).indices]
    return torch.cat((torch.full((tokens, 1), 5, device=GPU), rest), dim=-1).int().contiguous()


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill every `torch.empty` in this context with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def find_config(tokens: int, format: str) -> configs.ExpertConfig:
    return configs.expert_config(tokens, GPU, format)


def sort(index: Tensor, counts: Tensor, format: str) -> router.ExpertTiles:
    return router.sort_by_expert(index, counts, find_config(index.shape[0], format).rows)


def run_experts(x: Tensor | Quantized, layer: Layer, weights: Tensor, tiles: router.ExpertTiles) -> Tensor:
    """Run both products without overlap. Overlap uses counters in `tiles`, so each repetition would need new tiles."""
    return experts.expert_down(experts.expert_gate_up(x, layer.gate_up, tiles), layer.down, weights, tiles)


def check_experts(name: str, layer: Layer, index: Tensor) -> float:
    x, weights = draw_input(index.shape[0], layer.format), torch.rand(index.shape, device=GPU)
    rows, counts = find_config(index.shape[0], layer.format).rows, count_pairs(index, E)
    with poisoned_memory():
        tiles = sort(index, counts, layer.format)
        hidden = experts.expert_gate_up(x, layer.gate_up, tiles)
        got = experts.expert_down(hidden, layer.down, weights, tiles)
    want_tiles = router_reference.sort_by_expert(index, counts, rows)
    if not (torch.equal(tiles.pairs, want_tiles.pairs) and torch.equal(tiles.tiles, want_tiles.tiles)):
        raise SystemExit(f"PARITY FAILED, nothing timed: sort_by_expert, {name}.")
    want, want_hidden = (torch.empty(tiles.pairs.numel(), n, dtype=torch.float64, device=GPU) for n in (D, F))
    wide, first = x.decode() if isinstance(x, Quantized) else x.double(), 0
    gate_up, down = (w.decode() if isinstance(w, Packed | FourBit) else w for w in (layer.gate_up, layer.down))
    for expert in range(E):
        pairs = (index.flatten() == expert).nonzero()[:, 0]
        here, first = slice(first, first + len(pairs)), first + len(pairs)
        want_hidden[here] = mlp_reference.geglu(wide[pairs // A] @ widen(gate_up, expert).T)
        inputs = hidden.decode()[here] if isinstance(hidden, Quantized) else want_hidden[here]
        want[pairs] = inputs @ widen(down, expert).T * weights.flatten()[pairs, None].double()
    want = want.view(got.shape)
    if isinstance(hidden, Quantized):
        demand_parity(f"hidden values beyond rounding, {name}", *round_as(hidden, want_hidden), LIMIT)
    error = demand_parity(f"experts, {name}", got, want, LIMIT)
    if not torch.equal(run_experts(x, layer, weights, tiles), got):
        raise SystemExit(f"PARITY FAILED, nothing timed: experts, {name}, differ between two runs.")
    return error


def widen(weights: Tensor | Quantized, expert: int) -> Tensor:
    values, scale = values_and_scale(weights)
    return values[expert].double() if scale is None else values[expert].double() * scale[expert, :, None]


def round_as(got: Quantized, want: Tensor) -> tuple[Tensor, Tensor]:
    """Decode `got`, and move `want` towards it by at most half a float8 step; return both.

    Rounding to float8 explains half a step. A larger difference is an error of the kernel.
    """
    scale = got.scale.view(got.shape[0], -1).repeat_interleave(got.block or F, 1)[:, : want.shape[1]].double()
    wide = got.decode()
    half_step = 2.0 ** ((want / scale).abs().clamp(min=2.0**-6).log2().floor() - 4) * scale
    return wide, want + (wide - want).clamp(-half_step, half_step)


def check_router(layer: Layer, tokens: int) -> None:
    router_input, scale = draw_rows(tokens, D), torch.rand(E, device=GPU).bfloat16() + 0.5
    with poisoned_memory():
        weights, index, counts = router.route(router_input, layer.proj, scale, A)
    scores = router_input.double() @ layer.proj.double().T
    best, chosen = scores.topk(A, dim=-1).values, scores.gather(-1, index.long())
    if (best.sum(-1) - chosen.sum(-1)).max() > 2 * A * scores.abs().max() * 2**-8 or index.sort(-1).values.diff().eq(
        0
    ).any():
        raise SystemExit(f"PARITY FAILED, nothing timed: route, {tokens} tokens, chose other experts than the largest.")
    if not torch.equal(counts, count_pairs(index, E)):
        raise SystemExit(f"PARITY FAILED, nothing timed: route, {tokens} tokens, miscounted.")
    want = chosen.softmax(-1) * scale[index.long()].double()
    demand_parity(f"route, {tokens} tokens", weights, want, 1e-2)


def check_rest(layer: Layer, tokens: int) -> None:
    rows = (draw_rows(tokens, D), draw_rows(tokens, D))
    vectors = norms.ResidualNorms(*(draw_rows(D) for _ in range(4)))
    expert_rows, scalar = draw_rows(tokens, A, D), torch.full((1,), 0.3, dtype=torch.bfloat16, device=GPU)
    tail = (*rows, expert_rows, norms.TailNorms(*vectors[:3]), scalar, vectors[3])
    gate_up = draw_rows(tokens, 2 * DENSE)
    mlp_arguments = [rows[0], layer.dense_gate_up, layer.dense_down, torch.zeros(2, dtype=torch.int32, device=GPU)]
    with poisoned_memory():
        pairs: list[tuple[str, Any, Callable[..., Any], list[Any]]] = [
            (
                "rms_norm",
                norms.rms_norm(rows[0], vectors[0], EPS),
                norms_reference.rms_norm,
                [rows[0], vectors[0], EPS],
            ),
            ("geglu", mlp.geglu(gate_up), mlp_reference.geglu, [gate_up]),
            ("dense_mlp", mlp.dense_mlp(*mlp_arguments), mlp_reference.dense_mlp, mlp_arguments),
            (
                "attention_residual",
                norms.attention_residual(*rows, vectors, EPS),
                norms_reference.attention_residual,
                [*rows, vectors, EPS],
            ),
            ("layer_tail", norms.layer_tail(*tail, EPS), norms_reference.layer_tail, [*tail, EPS]),
        ]
    for name, got, fn, arguments in pairs:
        want = fn(*tree_map(lambda a: a.double() if isinstance(a, Tensor) else a, arguments))
        got, want = (got, want) if isinstance(got, tuple) else ((got,), (want,))
        for part, (g, w) in enumerate(zip(got, want, strict=True)):
            # At most seventeen roundings of up to 2**-8. Independent errors add up to about 7e-3.
            demand_parity(f"{name}[{part}], {tokens} tokens", g, w, 1e-2)


def check_parity(format: str) -> None:
    layer = draw_layer(format)
    for tokens in (1, 3, 16, 100, 256, 257, 512, 1000, 4096):
        error = check_experts(f"{tokens} tokens, even", layer, draw_index(tokens))
        check_experts(f"{tokens} tokens, skewed", layer, draw_skewed_index(tokens))
        check_router(layer, tokens)
        check_rest(layer, tokens)
        print(f"parity ok at {tokens:5d} tokens, experts' relative error {error:.2e}", flush=True)
    for tokens in (1, 256, 512, 1000, 1024, 4096):
        check_half(layer, tokens)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Prints and stores lines of name, microseconds per layer, share of read bandwidth, rate and note."""

    bandwidth: float
    lines: list[dict]

    def add(
        self, name: str, timed: tuple[float, float], layers: int, num_bytes: float, flops: float, note: str = ""
    ) -> float:
        median, spread = (1e3 * t / layers for t in timed)
        rate = num_bytes / (median * 1e-6)
        self.lines.append({"name": name, "us": median, "spread_us": spread, "bytes": num_bytes, "note": note})
        print(
            f"{name:42s} {median:9.2f} us ± {spread:6.2f} {num_bytes / 1e6:8.1f} MB {rate / 1e12:6.2f} TB/s "
            f"{100 * rate / self.bandwidth:5.1f} % {flops / (median * 1e6):6.1f} TFLOP/s  {note}",
            flush=True,
        )
        return median


def time_experts(report: Report, layers: list[Layer], tokens: int, distinct: int) -> None:
    format = layers[0].format
    x, weights = draw_input(tokens, format), torch.rand(tokens, A, device=GPU)
    indices = [draw_index(tokens, distinct) for _ in layers]
    tiles = [sort(index, count_pairs(index, E), format) for index in indices]
    hidden = draw_hidden(tokens * A, format)
    active = sum(index.unique().numel() for index in indices) / len(layers)
    note, what = f"{active:.1f} active experts", f"{tokens} tokens, {distinct} experts"
    pairs = tokens * A

    def gate_up() -> None:
        for layer, tile in zip(layers, tiles, strict=True):
            experts.expert_gate_up(x, layer.gate_up, tile)

    def down() -> None:
        for layer, tile in zip(layers, tiles, strict=True):
            experts.expert_down(hidden, layer.down, weights, tile)

    def both() -> None:
        for layer, tile in zip(layers, tiles, strict=True):
            run_experts(x, layer, weights, tile)

    count = len(layers)
    first, second = layers[0].expert_bytes(active)
    report.add(f"gate_up, {what}", time_graph(gate_up), count, first, 4.0 * pairs * D * F, note)
    report.add(f"down, {what}", time_graph(down), count, second, 2.0 * pairs * D * F, note)
    total = report.add(f"both, {what}", time_graph(both), count, first + second, 6.0 * pairs * D * F, note)
    floor = (first + second) / report.bandwidth * 1e3 * 30
    print(f"{'':42s} 30 layers: {total * 30 / 1e3:.2f} ms, floor {floor:.2f} ms", flush=True)


def time_rest(report: Report, layers: list[Layer], tokens: int) -> None:
    count, row = len(layers), tokens * D * 2
    rows = (draw_rows(tokens, D), draw_rows(tokens, D))
    vectors = norms.ResidualNorms(*(draw_rows(D) for _ in range(4)))
    scalar, scale = torch.ones(1, dtype=torch.bfloat16, device=GPU), torch.ones(E, dtype=torch.bfloat16, device=GPU)
    expert_rows, index = draw_rows(tokens, A, D), draw_index(tokens)
    counts = count_pairs(index, E)
    dense_hidden, progress = draw_rows(tokens, DENSE), torch.zeros(2, dtype=torch.int32, device=GPU)
    tail = (*rows, expert_rows, norms.TailNorms(*vectors[:3]), scalar, vectors[3])

    def each(fn: Callable[[Layer], object]) -> tuple[float, float]:
        def run() -> None:
            for layer in layers:
                fn(layer)

        return time_graph(run)

    what, up, down = f", {tokens} tokens", 2 * DENSE * D * 2, DENSE * D * 2
    flops = 2.0 * tokens * DENSE * D
    format = layers[0].format
    float8 = format == "fp8"
    timed = each(lambda _: norms.attention_residual(*rows, vectors, EPS, float8=float8))
    report.add("attention_residual" + what, timed, count, 6 * row - float8 * row / 2, 0)
    timed = each(lambda layer: router.route(rows[0], layer.proj, scale, A))
    report.add("route" + what, timed, count, E * D * 2 + row, 2.0 * tokens * D * E)
    report.add("sort_by_expert" + what, each(lambda _: sort(index, counts, format)), count, tokens * A * 8, 0)
    timed = each(lambda layer: mlp.geglu(torch.mm(rows[0], layer.dense_gate_up.T)))
    report.add("dense gate_up, geglu" + what, timed, count, up + row, 2 * flops)
    timed = each(lambda layer: torch.mm(dense_hidden, layer.dense_down.T))
    report.add("dense down" + what, timed, count, down + 2 * row, flops)
    timed = each(lambda layer: mlp.dense_mlp(rows[0], layer.dense_gate_up, layer.dense_down, progress))
    report.add("dense MLP, as it runs" + what, timed, count, up + down + 2 * row, 3 * flops)
    timed = each(lambda _: norms.layer_tail(*tail, EPS))
    report.add("layer_tail" + what, timed, count, (A + 4) * row, 0)


@dataclass(frozen=True, kw_only=True)
class Half:
    """The inputs of the second half of every layer, and the order of its kernels."""

    attention: Tensor  # (M, D)
    residual_norms: norms.ResidualNorms
    tail_norms: norms.TailNorms
    next_norm: Tensor
    scalar: Tensor
    scale: Tensor
    progress: Tensor
    side: torch.cuda.Stream | None

    def __call__(self, x: Tensor, layer: Layer, routing: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Return x after one half layer, routed by index and counts if present, on one stream or two."""
        main = torch.cuda.current_stream()
        x, dense_in, expert_in, router_in = norms.attention_residual(
            self.attention, x, self.residual_norms, EPS, float8=layer.format == "fp8"
        )
        assert isinstance(dense_in, Tensor)
        assert isinstance(expert_in, Tensor | Quantized)
        side = self.side or main
        side.wait_stream(main)
        with torch.cuda.stream(side):
            dense_out = mlp.dense_mlp(dense_in, layer.dense_gate_up, layer.dense_down, self.progress)
        weights, index, counts = router.route(router_in, layer.proj, self.scale, A)
        index, counts = routing or (index, counts)
        tiles = sort(index, counts, layer.format)
        rows = experts.multiply_experts(expert_in, layer.gate_up, layer.down, weights, tiles)
        main.wait_stream(side)
        return norms.layer_tail(x, dense_out, rows, self.tail_norms, self.scalar, self.next_norm, EPS)[0]


def draw_half(tokens: int, side: torch.cuda.Stream | None) -> Half:
    ones = torch.ones(E, dtype=torch.bfloat16, device=GPU)
    return Half(
        attention=draw_rows(tokens, D),
        residual_norms=norms.ResidualNorms(*(draw_rows(D) for _ in range(4))),
        tail_norms=norms.TailNorms(*(draw_rows(D) for _ in range(3))),
        next_norm=draw_rows(D),
        scalar=ones[:1],
        scale=ones,
        progress=torch.zeros(2, dtype=torch.int32, device=GPU),
        side=side,
    )


def check_half(layer: Layer, tokens: int) -> None:
    """Check that two streams and dependent launches in a graph give the bits of single launches."""
    half, start = draw_half(tokens, torch.cuda.Stream()), draw_rows(tokens, D)
    alone = replace(half, side=None)
    with dependent_launch(False):
        want = alone(alone(start, layer), layer)
    half(start, layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = half(half(start, layer), layer)
    for _ in range(20):
        got.fill_(torch.nan)
        graph.replay()
        if not torch.equal(got, want):
            raise SystemExit(f"PARITY FAILED, nothing timed: half layer, {tokens} tokens: overlapped launches differ.")


def time_half(report: Report, layers: list[Layer], tokens: int, distinct: int) -> None:
    """Time the half layer as it runs, and without the second stream or dependent launches."""
    start, indices = draw_rows(tokens, D), [draw_index(tokens, distinct) for _ in layers]
    fixed = [(index, count_pairs(index, E)) for index in indices]
    active = sum(index.unique().numel() for index in indices) / len(layers)
    num_bytes = sum(layers[0].expert_bytes(active)) + (3 * DENSE * D + E * D) * 2
    flops = 6.0 * tokens * D * (A * F + DENSE)
    for streams, dependent in ((1, False), (2, False), (1, True), (2, True)):
        half = draw_half(tokens, torch.cuda.Stream() if streams == 2 else None)

        def run(half: Half = half) -> None:
            x = start
            for layer, routing in zip(layers, fixed, strict=True):
                x = half(x, layer, routing)

        with dependent_launch(dependent):
            name = f"half layer, {tokens} tokens, {distinct} experts, {streams} stream{'s' * (streams > 1)}"
            name += ", dependent" * dependent
            total = report.add(name, time_graph(run), len(layers), num_bytes, flops, f"{active:.1f} active experts")
            print(f"{'':42s} 30 layers: {total * 30 / 1e3:.2f} ms", flush=True)


@contextlib.contextmanager
def dependent_launch(dependent: bool) -> Iterator[None]:
    before = configs.DEPENDENT_LAUNCH
    configs.DEPENDENT_LAUNCH = before if dependent else set()
    try:
        yield
    finally:
        configs.DEPENDENT_LAUNCH = before


def time_all(report: Report, layers: list[Layer]) -> None:
    for tokens, distinct in ((256, E), (256, 84), (512, E), (1024, E), (2048, E), (4096, E), (1, E), (16, E)):
        time_experts(report, layers, tokens, distinct)
    for tokens in (256, 1024, 1):
        time_rest(report, layers, tokens)
    for tokens, distinct in ((256, E), (256, 84), (512, E), (1024, E), (1, E)):
        time_half(report, layers, tokens, distinct)


@contextlib.contextmanager
def reporting(output: Path | None) -> Iterator[Report]:
    """Yield a report and write it to `output` as JSON, even after an error. Exit if there is no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA GPU; on a CPU, tests/kernels check the same kernels.")
    torch.manual_seed(0)
    print(describe_run(), flush=True)
    report = Report(bandwidth=measure_read_bandwidth(), lines=[])
    print(f"read bandwidth {report.bandwidth / 1e12:.2f} TB/s", flush=True)
    try:
        yield report
    finally:
        if output:
            result = {"run": describe_run(), "read_bandwidth": report.bandwidth, "lines": report.lines}
            output.write_text(json.dumps(result, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", choices=tuple(ENCODERS), default="bf16", help="storage format of the experts")
    parser.add_argument("--layers", type=int, default=30, help="distinct layers of weights, 1.5 GB each (%(default)s)")
    parser.add_argument("--output", type=Path, help="where to write the numbers as JSON")
    arguments = parser.parse_args()
    with reporting(arguments.output) as report:
        check_parity(arguments.weights)
        time_all(report, [draw_layer(arguments.weights) for _ in range(arguments.layers)])


if __name__ == "__main__":
    main()
