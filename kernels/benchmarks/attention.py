"""Attention and `prepare_qkv` at the published sizes: parity against float64, then time.

    PYTHONPATH=src:kernels python kernels/benchmarks/attention.py [--sweep] [--quick]

Every line has a mode: "canvas" (256 tokens that see each other and a prefix), "causal" or "qkv". In a sliding layer
the prefix of a canvas has at most 1,023 tokens. Where the Hopper kernel runs, the Triton kernel is checked and timed as
well. Every call reads keys and values from memory: it rotates over copies that together are several times the L2 cache.
"""

import argparse
import itertools
import math
from typing import Any

import torch
from timing import demand_parity, describe_run, measure_read_bandwidth, time_graph
from torch import Tensor
from triton.runtime.errors import OutOfResources

from dgemma_kernels.ops.attention import reference
from dgemma_kernels.ops.attention.kernel import AttentionTile, attention, choose_kernel, default_tile
from dgemma_kernels.ops.qkv import reference as qkv_reference
from dgemma_kernels.ops.qkv.kernel import prepare_qkv

HEADS = 16
LAYERS = {"sliding": (8, 256), "full": (2, 512)}  # key heads, head_dim
ROTARY_PAIRS = {"sliding": None, "full": 64}  # in the other columns of full layers, keys are the same as values
LIMIT = 8e-3  # bfloat16 rounds softmax weights and output by up to 2**-8 each; keys and values have unit size
MATRIX_RATE = 816e12  # bf16 FLOP/s measured on one H200
COLD_BYTES = 512 << 20
# Prefix lengths. Sliding: none and a full window. Full: up to 131,072 tokens.
CANVAS = [("sliding", 0), ("sliding", 1023), ("full", 0), ("full", 1024), ("full", 16_384), ("full", 131_072)]
TILES: dict[tuple[str, int], list[AttentionTile | None]] = {  # None: the kernel that `attention` chooses
    ("sliding", 256): [
        None,
        AttentionTile(64, 64, 4, 2, tma=True),
        AttentionTile(64, 64, 8, 2, tma=True),
        AttentionTile(128, 64, 8, 2, tma=True),
        AttentionTile(128, 128, 8, 1, tma=True),
        AttentionTile(128, 32, 8, 3, tma=True),
        AttentionTile(64, 64, 8, 2),
    ],
    ("full", 256): [
        None,
        AttentionTile(64, 32, 8, 2, tma=True),
        AttentionTile(64, 64, 8, 1, tma=True),
        AttentionTile(128, 32, 8, 2, tma=True, value_dim=256),
        AttentionTile(128, 64, 8, 1, tma=True, value_dim=256),
        AttentionTile(64, 32, 8, 2),
    ],
    ("sliding", 1): [
        AttentionTile(16, 32, 4, 3),
        AttentionTile(16, 64, 4, 2, tma=True),
        AttentionTile(16, 32, 8, 3),
    ],
    ("full", 1): [
        AttentionTile(16, 32, 8, 3),
        AttentionTile(16, 32, 4, 3),
        AttentionTile(16, 32, 8, 3, tma=True),
        AttentionTile(16, 64, 8, 2, tma=True),
    ],
}


def draw(
    layer: str, batch: int, num_tokens: int, prefix: int, copies: int = 1
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Draw random queries, keys, values and lengths, `copies` times; slots without a token are NaN."""
    kv_heads, head_dim = LAYERS[layer]
    capacity = math.ceil((prefix + num_tokens) / 256) * 256
    sets = []
    for _ in range(copies):
        queries = torch.randn(batch, num_tokens, HEADS, head_dim, device="cuda", dtype=torch.bfloat16) / head_dim**0.5
        keys, values = (
            torch.randn(batch, kv_heads, capacity, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        pairs = ROTARY_PAIRS[layer]
        if pairs is not None:
            equal = torch.arange(head_dim, device="cuda") % (head_dim // 2) >= pairs
            keys = torch.where(equal, values, keys)
        keys[:, :, prefix + num_tokens :] = torch.nan
        values[:, :, prefix + num_tokens :] = torch.nan
        sets.append((queries, keys, values, torch.full((batch,), prefix, device="cuda")))
    return sets


def kernels(layer: str, num_tokens: int) -> list[str]:
    """Return the kernels to time; the first is the one that `attention` chooses."""
    kv_heads, head_dim = LAYERS[layer]
    queries = torch.empty(1, num_tokens, HEADS, head_dim, device="cuda", dtype=torch.bfloat16)
    keys = torch.empty(1, kv_heads, num_tokens, head_dim, device="cuda", dtype=torch.bfloat16)
    return ["hopper", "triton"] if choose_kernel(queries, keys, keys).kernel == "hopper" else ["triton"]


def exact(queries: Tensor, keys: Tensor, values: Tensor, length: Tensor, **mode: Any) -> Tensor:
    """Run the reference in float64, a few heads at a time so that 128k keys fit."""
    group = queries.shape[2] // keys.shape[1]
    heads: list[Any] = [
        reference.attention(
            queries[:, :, head * group : (head + 1) * group].double(),
            keys[:, head : head + 1].double(),
            values[:, head : head + 1].double(),
            length,
            **mode,
        )
        for head in range(keys.shape[1])
    ]
    return torch.cat(heads, dim=2)


def check(layer: str, batch: int, num_tokens: int, prefix: int, **options: Any) -> float:
    ((queries, keys, values, length),) = draw(layer, batch, num_tokens, prefix)
    if batch > 1:  # ragged: the second row's prefix is shorter, and the rest of its buffer unused
        length[1] = prefix // 3
        keys[1, :, prefix // 3 + num_tokens :] = torch.nan
        values[1, :, prefix // 3 + num_tokens :] = torch.nan
    mode = {name: option for name, option in options.items() if name in ("causal", "window")}
    options["rotary_pairs"] = ROTARY_PAIRS[layer]
    got: Any = attention(queries, keys, values, length, **options)
    again: Any = attention(queries, keys, values, length, **options)
    if not torch.equal(got, again):
        raise SystemExit(f"PARITY FAILED, nothing timed: {layer} {options} differs between two runs.")
    name = f"attention {layer} B={batch} T={num_tokens} prefix={prefix} {options}"
    return demand_parity(name, got, exact(queries, keys, values, length, **mode), LIMIT)


def measure(layer: str, batch: int, num_tokens: int, prefix: int, **options: Any) -> tuple[float, float]:
    """Return the median and spread of one call in microseconds."""
    kv_heads, head_dim = LAYERS[layer]
    num_bytes = 4 * batch * kv_heads * (prefix + num_tokens) * head_dim
    copies = min(48, max(2, COLD_BYTES // num_bytes))
    sets = draw(layer, batch, num_tokens, prefix, copies)
    pairs = ROTARY_PAIRS[layer]
    median, spread = time_graph(lambda: [attention(*tensors, **options, rotary_pairs=pairs) for tensors in sets])
    return 1e3 * median / copies, 1e3 * spread / copies


def row(layer: str, batch: int, num_tokens: int, prefix: int, bandwidth: float, **options: Any) -> str:
    kv_heads, head_dim = LAYERS[layer]
    median, spread = measure(layer, batch, num_tokens, prefix, **options)
    keys = prefix + num_tokens
    pairs = num_tokens * prefix + num_tokens * (num_tokens + 1) / 2 if options.get("causal") else num_tokens * keys
    if options.get("window"):
        pairs = sum(min(prefix + i + 1, 1024) for i in range(num_tokens))
    flops = 4 * batch * HEADS * pairs * head_dim
    num_bytes = 2 * batch * head_dim * (2 * kv_heads * keys + 2 * HEADS * num_tokens)
    floor = max(flops / MATRIX_RATE, num_bytes / bandwidth) * 1e6
    bound = "flops" if flops / MATRIX_RATE > num_bytes / bandwidth else "bytes"
    mode = "causal" if options.get("causal") else "canvas"
    return (
        f"{mode:7} {layer:8} T={num_tokens:<5} B={batch} prefix={prefix:<7} {median:9.1f} us ±{spread:5.1f}"
        f"  {flops / median * 1e-6:6.0f} TFLOP/s  {num_bytes / median * 1e-6:5.2f} TB/s  floor {floor:8.1f} us"
        f" ({bound})  {floor / median:4.0%}"
    )


def run_qkv(layer: str, prefix: int) -> str:
    kv_heads, head_dim = LAYERS[layer]
    projections = 2 if layer == "sliding" else 1
    copies = 24
    width = (HEADS + projections * kv_heads) * head_dim
    projected = [torch.randn(256, width, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    query_norm, key_norm = (1 + 0.1 * torch.randn(head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    inv_freq = 10_000.0 ** (-torch.arange(0, head_dim, 2, device="cuda") / head_dim)
    start = torch.tensor([prefix], device="cuda")
    caches = [torch.full((2, 1, kv_heads, prefix + 256, head_dim), torch.nan, device="cuda").bfloat16() for _ in "ab"]
    options: dict[str, Any] = {"num_heads": HEADS, "eps": 1e-6}
    arguments = (query_norm, key_norm, inv_freq, start, start)
    mine, others = ((cache[0], cache[1]) for cache in caches)
    got: Any = prepare_qkv(projected[0], *arguments, *mine, **options)
    want: Any = qkv_reference.prepare_qkv(projected[0], *arguments, *others, **options)
    demand_parity(
        f"prepare_qkv {layer} queries", got, want, 2e-3
    )  # the same roundings, except the last bit of a square root
    demand_parity(f"prepare_qkv {layer} cache", caches[0][..., prefix:, :], caches[1][..., prefix:, :], 2e-3)
    median, spread = time_graph(lambda: [prepare_qkv(x, *arguments, *mine, **options) for x in projected])
    num_bytes = 2 * 256 * (width + (HEADS + 2 * kv_heads) * head_dim)
    median, spread = 1e3 * median / copies, 1e3 * spread / copies
    return f"qkv     {layer:8} T=256 B=1 {median:9.1f} us ±{spread:5.1f}  {num_bytes / median * 1e-6:5.2f} TB/s"


def sweep(quick: bool) -> None:
    for (layer, num_tokens), tiles in TILES.items():
        prefixes = (1023,) if layer == "sliding" else (1024,) if quick else (1024, 16_384)
        splits = (1, 2, 3, 4) if num_tokens > 1 else (8, 16, 33, 66, 128)
        for prefix in prefixes:
            results = []
            for tile, num_splits in itertools.product(tiles, splits):
                options = {"tile": tile, "num_splits": num_splits, "causal": num_tokens == 1}
                try:
                    check(layer, 1, num_tokens, prefix, **options)
                    results.append((*measure(layer, 1, num_tokens, prefix, **options), num_splits, tile))
                except OutOfResources as error:
                    print(f"  {tile} does not fit: {error}")
            default = default_tile(num_tokens * HEADS // LAYERS[layer][0], LAYERS[layer][1], hopper=True)
            print(f"sweep {layer} T={num_tokens} prefix={prefix}, B=1 (default {tuple(default)}):")
            for median, spread, num_splits, tile in sorted(results)[:8]:
                print(f"  {median:8.1f} us ±{spread:4.1f}  splits={num_splits:<4} {tile or 'as chosen'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time the promising tiles instead of the table")
    parser.add_argument("--quick", action="store_true", help="shorter prefixes only")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA GPU; on this machine run the tests in tests/kernels instead.")
    torch.manual_seed(0)
    print(describe_run())
    canvas = [case for case in CANVAS if not arguments.quick or case[1] <= 1024]

    worst = 0.0
    for layer, prefix in canvas:
        for batch, kernel in itertools.product((1, 2) if prefix <= 16_384 else (1,), kernels(layer, 256)):
            worst = max(worst, check(layer, batch, 256, prefix, kernel=kernel))
        worst = max(worst, check(layer, 2 if prefix <= 16_384 else 1, 1, prefix, causal=True))
    for layer, window in (("sliding", {"window": 1024}), ("full", {})):
        for kernel in kernels(layer, 256):
            worst = max(worst, check(layer, 2, 256, 1023, causal=True, kernel=kernel, **window))
            worst = max(worst, check(layer, 1, 1500, 0, causal=True, kernel=kernel, **window))
    print(f"parity: worst relative error against float64 {worst:.2e}, limit {LIMIT:.0e}; two runs equal", flush=True)
    if arguments.sweep:
        sweep(arguments.quick)
        return

    bandwidth = measure_read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s; floors use it and {MATRIX_RATE / 1e12:.0f} TFLOP/s")
    for layer, prefix in canvas:
        for batch, kernel in itertools.product((1, 2, 4, 8), kernels(layer, 256)):
            print(f"{kernel} {row(layer, batch, 256, prefix, bandwidth, kernel=kernel)}", flush=True)
    for layer, prefix in canvas:
        for batch in (1, 8):
            window = {"window": 1024} if layer == "sliding" else {}
            print(f"triton {row(layer, batch, 1, prefix, bandwidth, causal=True, **window)}", flush=True)
    for layer, window in (("sliding", {"window": 1024}), ("full", {})):
        for num_tokens, prefix in ((256, 1023), (4096, 0)):
            for kernel in kernels(layer, num_tokens):
                line = row(layer, 1, num_tokens, prefix, bandwidth, causal=True, kernel=kernel, **window)
                print(f"{kernel} {line}", flush=True)
    for layer in LAYERS:
        print(run_qkv(layer, 1023), flush=True)


if __name__ == "__main__":
    main()
