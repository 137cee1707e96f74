"""Tiles of the experts' two products at the published sizes: each promising tile alone, then the best pair.

python kernels/benchmarks/experts_sweep.py 256 512                    at 256 and at 512 tokens
python kernels/benchmarks/experts_sweep.py 256 --weights packed       with the experts in 12 bits (fp8: in float8)
python kernels/benchmarks/experts_sweep.py 256 --distinct 84          routed over 84 experts per layer

The sweep reports and skips tiles that are wrong or do not fit. Put the fastest tiles into a table of `configs`.
"""

import argparse
import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from experts import (
    DTYPE,
    GPU,
    A,
    D,
    E,
    F,
    Layer,
    Report,
    check_experts,
    draw_hidden,
    draw_index,
    draw_input,
    draw_layer,
    draw_rows,
    reporting,
    run_experts,
    sort,
)
from timing import time_graph

from dgemma_kernels.formats import ENCODERS
from dgemma_kernels.ops import configs
from dgemma_kernels.ops.experts import kernel as experts
from dgemma_kernels.ops.router import kernel as router
from dgemma_kernels.ops.router.reference import count_pairs

# Tiles to try by rows per tile: (columns, depth, warps, stages), and the limit of registers if there is one.
GATE_UP_TILES = {
    16: [(64, 128, 4, 4), (64, 64, 4, 8), (32, 128, 4, 4), (32, 256, 4, 3), (16, 256, 4, 4)],
    32: [(64, 64, 4, 8), (64, 128, 4, 4), (128, 64, 8, 5)],
    48: [(64, 64, 4, 5), (64, 64, 4, 8), (64, 128, 4, 4), (128, 64, 8, 4)],
    64: [(64, 64, 4, 4), (64, 64, 4, 6), (64, 64, 4, 8), (64, 128, 4, 4), (128, 64, 8, 4), (128, 64, 8, 5)],
    80: [(64, 64, 4, 4), (64, 64, 4, 6), (64, 64, 8, 4), (128, 64, 8, 4)],
    96: [(64, 64, 4, 4), (64, 64, 4, 6), (64, 64, 8, 4), (128, 64, 8, 4)],
    128: [(64, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4)],
    144: [(64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4)],
    160: [(64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4)],
    192: [(128, 64, 8, 3), (128, 64, 8, 4)],
    288: [(64, 64, 8, 3), (64, 64, 8, 4)],
}
DOWN_TILES = {
    16: [(64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 6), (32, 128, 4, 4)],
    32: [(64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 4)],
    48: [(64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 4)],
    64: [(64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 6), (128, 64, 4, 4), (128, 64, 8, 4), (256, 64, 8, 4)],
    80: [(64, 64, 4, 4), (128, 64, 8, 4), (128, 64, 8, 6)],
    96: [(64, 64, 4, 4), (128, 64, 8, 4), (128, 64, 8, 6)],
    128: [(128, 64, 4, 3), (128, 64, 8, 3), (256, 64, 8, 3)],
    144: [(128, 64, 4, 3), (128, 64, 8, 3), (256, 64, 8, 3)],
    160: [(128, 64, 4, 3), (128, 64, 8, 3), (256, 64, 8, 3)],
    192: [(128, 64, 8, 3), (256, 64, 8, 3)],
    288: [(128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 3)],
}
# The same in float8. Hidden values have one scale per row and gate_up tile. So gate_up tiles have 64 columns, because
# 64 divides the published hidden width of 704.
FLOAT8_GATE_UP_TILES = {
    16: [(64, 256, 4, 4), (64, 256, 4, 5), (64, 128, 4, 8), (64, 128, 4, 5)],
    32: [
        *((64, 256, 4, 5), (64, 256, 4, 4), (64, 256, 4, 2), (64, 256, 8, 5)),
        *((64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 4, 10)),
    ],
    64: [(64, 128, 4, 8), (64, 128, 4, 4), (64, 256, 4, 4), (64, 128, 8, 4)],
    80: [(64, 128, 4, 4), (64, 128, 8, 4), (64, 128, 4, 8), (64, 256, 4, 4)],
    96: [(64, 128, 8, 4)],
    128: [(64, 128, 8, 4), (128, 128, 8, 3)],  # from here with one scale per row
    144: [(64, 128, 4, 3), (64, 128, 4, 4), (128, 128, 8, 3)],
    160: [(64, 128, 4, 3), (64, 128, 4, 4), (128, 128, 8, 3)],
    288: [(64, 128, 8, 3), (64, 128, 8, 4)],
}
FLOAT8_DOWN_TILES = {
    16: [(64, 64, 4, 5), (64, 64, 4, 11), (128, 64, 4, 6)],
    32: [
        *((64, 64, 4, 5), (64, 64, 4, 4), (64, 64, 4, 8), (64, 64, 4, 11), (64, 64, 8, 5), (128, 64, 4, 5)),
        *((128, 64, 8, 5), (128, 64, 4, 8), (128, 64, 4, 11), (256, 64, 8, 5)),
    ],
    64: [(128, 64, 8, 5), (128, 64, 4, 5), (64, 64, 4, 5), (64, 64, 4, 8), (128, 64, 8, 8), (256, 64, 8, 5)],
    80: [(128, 64, 8, 5), (64, 64, 4, 5), (128, 64, 8, 4), (128, 64, 4, 4)],
    96: [(128, 64, 8, 5)],
    128: [(128, 128, 8, 3), (256, 128, 8, 3)],
    144: [(128, 128, 4, 3), (128, 128, 8, 3), (256, 128, 8, 3)],
    160: [(128, 128, 4, 3), (128, 128, 8, 3), (256, 128, 8, 3)],
    288: [(128, 128, 8, 3), (128, 128, 8, 4)],
}
# The format fixes the blocks of packed weights.
PACKED_GATE_UP_TILES, PACKED_DOWN_TILES = (
    {
        rows: [(cols, 128, w, s, *bound) for w in (4, 8) for s in (2, 3, 4) for bound in bounds]
        for rows in (16, 32, 64, 128)
    }
    for cols, bounds in ((64, ((), (168,))), (128, ((),)))
)
# The format also fixes the blocks of four-bit weights.
FOUR_BIT_GATE_UP_TILES, FOUR_BIT_DOWN_TILES = (
    {
        rows: [(cols, depth, 4, s, *bound) for depth in depths for s in (3, 4) for bound in ((), (128,))]
        for rows in (16, 32, 64, 128)
    }
    for cols, depths in ((64, (64, 128)), (128, (64,)))
)
TILES = {
    "bf16": (GATE_UP_TILES, DOWN_TILES),
    "packed": (PACKED_GATE_UP_TILES, PACKED_DOWN_TILES),
    "fp8": (FLOAT8_GATE_UP_TILES, FLOAT8_DOWN_TILES),
    "int4": (FOUR_BIT_GATE_UP_TILES, FOUR_BIT_DOWN_TILES),
    "nvfp4": (FOUR_BIT_GATE_UP_TILES, FOUR_BIT_DOWN_TILES),
}


@contextlib.contextmanager
def expert_table(table: tuple[configs.ExpertConfig, ...], format: str) -> Iterator[None]:
    name, tables = configs.gpu_name(GPU), configs.EXPERTS[format]
    before = tables.get(name, tables["default"])
    tables[name] = table
    try:
        yield
    finally:
        tables[name] = before


def sweep(report: Report, layers: list[Layer], tokens: int, distinct: int) -> None:
    """Time tiles of gate_up and of down for each sensible number of rows, then the best pair."""
    index = [draw_index(tokens, distinct) for _ in layers]
    active = sum(i.unique().numel() for i in index) / len(layers)
    format = layers[0].format
    gate_up_tiles, down_tiles = TILES[format]
    x, weights = draw_input(tokens, format), torch.rand(tokens, A, device=GPU)
    hiddens = {one: draw_hidden(tokens * A, format, None if one else 64) for one in (False, True)}
    first, second = layers[0].expert_bytes(active)
    flops = 6.0 * tokens * A * D * F

    def timed(config: configs.ExpertConfig, which: str, num_bytes: float, flops: float) -> float:
        def run() -> None:
            for layer, tile in zip(layers, tiles, strict=True):
                if which == "gate_up":
                    experts.expert_gate_up(x, layer.gate_up, tile)
                elif which == "down":
                    experts.expert_down(hiddens[config.one_scale], layer.down, weights, tile)
                else:
                    run_experts(x, layer, weights, tile)

        shown = {"gate_up": [config.gate_up], "down": [config.down]}.get(which, [config.gate_up, config.down])
        name = f"{which} {tokens}: {config.rows} rows, {' and '.join(map(label, shown))}"
        try:
            with expert_table((config,), format):
                if which == "both":
                    check_experts(name, layers[0], index[0])
                tiles = [sort(i, count_pairs(i, E), format) for i in index]
                return report.add(name, time_graph(run, replays=15), len(layers), num_bytes, flops)
        except (Exception, SystemExit) as error:  # a tile that does not fit or is wrong is a result too
            print(f"{name}: {type(error).__name__}: {str(error)[:100]}", flush=True)
            return float("inf")

    print(f"{tokens} tokens, {active:.1f} active experts", flush=True)
    together = {}
    for rows in rows_worth_trying(tokens, format):
        ups, downs = {}, {}
        for shape in gate_up_tiles[rows]:
            config = make_config(rows, shape, down_tiles[rows][0], format)
            ups[shape] = timed(config, "gate_up", first, flops * 2 / 3)
        for shape in down_tiles[rows]:
            config = make_config(rows, gate_up_tiles[rows][0], shape, format)
            downs[shape] = timed(config, "down", second, flops / 3)
        best = make_config(rows, min(ups, key=ups.__getitem__), min(downs, key=downs.__getitem__), format)
        together[best] = timed(best, "both", first + second, flops)
    best = min(together, key=together.__getitem__)
    print(f"BEST at {tokens}: {together[best]:.1f} us per layer, {together[best] * 30 / 1e3:.2f} ms for 30\n{best}")


def rows_worth_trying(tokens: int, format: str) -> list[int]:
    """Return the rows per tile to try: from an expert's average number of rows to twice that.

    For an average of 128 or more, they are 128 to 288. With fewer rows, weights are read repeatedly. With more rows,
    arithmetic is wasted.
    """
    average = min(max(tokens * A // E, 16), 128)
    limit = 2 * average if average < 128 else 288
    return [rows for rows in TILES[format][0] if average <= rows <= limit]


def compile_tile(rows: int, gate_up: tuple[int, ...], down: tuple[int, ...], format: str) -> None:
    """Compile one tile's kernel into Triton's cache, from which the sweep loads it. One expert's weights suffice.

    One of the two tiles is empty: its kernel is not compiled.
    """
    index = torch.zeros(8, A, dtype=torch.int32, device=GPU)
    tiles = router.sort_by_expert(index, count_pairs(index, 1), rows)
    config = make_config(rows, gate_up or down, down or gate_up, format)
    encode = ENCODERS[format]
    with contextlib.suppress(Exception), expert_table((config,), format):
        if gate_up:
            experts.expert_gate_up(draw_input(8, format), encode(draw_rows(1, 2 * F, D), DTYPE, gated=True), tiles)
        else:
            routing = torch.ones(8, A, device=GPU)
            hidden = draw_hidden(8 * A, format, None if config.one_scale else 64)
            experts.expert_down(hidden, encode(draw_rows(1, D, F), DTYPE, gated=False), routing, tiles)


def compile_tiles(rows: set[int], format: str) -> None:
    gate_up_tiles, down_tiles = TILES[format]
    jobs: list[tuple[Any, ...]] = [(r, shape, (), format) for r in rows for shape in gate_up_tiles[r]]
    jobs += [(r, (), shape, format) for r in rows for shape in down_tiles[r]]
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_tile, *zip(*jobs, strict=True)))


def make_config(
    rows: int, gate_up: tuple[int, ...], down: tuple[int, ...], format: str = "bf16"
) -> configs.ExpertConfig:
    one_scale = format == "fp8" and rows >= 128
    return configs.ExpertConfig(1 << 62, rows, configs.TileShape(*gate_up), configs.TileShape(*down), one_scale)


def label(tile: configs.TileShape) -> str:
    bound = "" if tile.registers is None else f" r{tile.registers}"
    return f"{tile.cols}x{tile.depth} w{tile.warps} s{tile.stages}{bound}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=int, nargs="+", metavar="TOKENS", help="sizes to compare tiles at")
    parser.add_argument("--weights", choices=tuple(ENCODERS), default="bf16", help="storage format of the experts")
    parser.add_argument("--distinct", type=int, default=E, help="experts the routing is drawn from (%(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="distinct layers of weights, 1.5 GB each (%(default)s)")
    parser.add_argument("--output", type=Path, help="where to write the numbers as JSON")
    arguments = parser.parse_args()
    format = arguments.weights
    with reporting(arguments.output) as report:
        compile_tiles({rows for tokens in arguments.tokens for rows in rows_worth_trying(tokens, format)}, format)
        layers = [draw_layer(format) for _ in range(arguments.layers)]
        for tokens in arguments.tokens:
            sweep(report, layers, tokens, arguments.distinct)


if __name__ == "__main__":
    main()
