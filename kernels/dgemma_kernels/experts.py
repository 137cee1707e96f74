"""The mixture of experts and the dense MLP beside it in two launches, each reading every weight in use once.

gate_up gathers its rows and ends in GeGLU; down multiplies by the routing weight and writes one row a (token, k) pair,
which `norms.layer_tail` sums in the order of k. A program owns a tile of one expert's rows and a block of its columns;
column blocks run fastest, so that neighbours share the expert. The weights are the products' 64-row operand, which
makes them Hopper's warpgroup instructions at 16 and 32 rows of tokens too. The dense MLP is one more expert, that has
every token; its programs, which mostly read what is in cache, lie between those that wait for memory. Reference twin:
`reference`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgemma_kernels.blocks import gelu_tanh_times, inside, wait_for_launches_before
from dgemma_kernels.configs import DenseTile, dependent_launch, expert_config
from dgemma_kernels.router import ExpertTiles

_DENSE = (DenseTile(rows=32, stages=2), DenseTile(rows=32, stages=2))  # where a GPU's table has none


class DenseGateUp(NamedTuple):
    """The dense MLP's first product: x (M, D), weight (2F', D), gate rows first."""

    x: Tensor
    weight: Tensor


class DenseDown(NamedTuple):
    """The dense MLP's second product: hidden (M, F'), weight (D, F')."""

    hidden: Tensor
    weight: Tensor


def expert_gate_up(
    x: Tensor, gate_up_proj: Tensor, tiles: ExpertTiles, dense: DenseGateUp | None = None
) -> tuple[Tensor, Tensor | None]:
    """geglu(x[token] @ gate_up_proj[expert].T) for every (token, k) pair, in the order of `tiles.pairs`.

    x: (M, D), gate_up_proj: (E, 2F, D), gate rows first → (M * A, F), and geglu(dense.x @ dense.weight.T) (M, F').

    Example: `hidden, dense_hidden = expert_gate_up(expert_in, proj, tiles, DenseGateUp(dense_in, weight))`.
    """
    _require("expert_gate_up", x, gate_up_proj, gate_up_proj.shape[1] // 2 * 2, x.shape[-1])
    if x.shape[0] * tiles.num_active != tiles.pairs.numel():
        raise ValueError(
            f"expert_gate_up.tiles must be of the same {x.shape[0]} tokens, got {tiles.pairs.numel()} pairs of "
            f"{tiles.num_active} a token."
        )
    config = expert_config(x.shape[0], x.device)
    tile, dense_tile = config.gate_up, (config.dense or _DENSE)[0]
    num_experts, double, width = gate_up_proj.shape
    hidden_width, dense_width = double // 2, 0
    out, dense_out = torch.empty(tiles.pairs.numel(), hidden_width, dtype=x.dtype, device=x.device), None
    if dense is not None:
        _require_dense("expert_gate_up", dense.x, dense.weight, x.shape, x.dtype)
        dense_width = dense.weight.shape[0] // 2
        dense_out = torch.empty(x.shape[0], dense_width, dtype=x.dtype, device=x.device)
    grid_tiles = _grid_tiles(tiles, num_experts)
    programs = triton.cdiv(hidden_width, tile.cols) * grid_tiles
    dense_programs = triton.cdiv(dense_width, tile.cols) * triton.cdiv(x.shape[0], dense_tile.rows)
    _expert_gate_up_kernel[(programs + dense_programs,)](
        x,
        gate_up_proj,
        tiles.pairs,
        tiles.tiles,
        tiles.finished,
        out,
        *(x, gate_up_proj, out) if dense is None else (dense.x, dense.weight, dense_out),
        grid_tiles,
        tiles.tiles.shape[0],
        x.shape[0],
        dense_programs,
        _dense_every(programs, dense_programs),
        WIDTH=width,
        HIDDEN=hidden_width,
        DENSE=dense_width,
        NUM_ACTIVE=tiles.num_active,
        ROWS=tiles.rows_per_tile,
        COLS=tile.cols,
        DEPTH=tile.depth,
        STAGES=tile.stages,
        DENSE_ROWS=dense_tile.rows,
        DENSE_STAGES=dense_tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent_launch(x.device),
    )
    return out, dense_out


def expert_down(
    hidden: Tensor,
    down_proj: Tensor,
    weights: Tensor,
    tiles: ExpertTiles,
    dense: DenseDown | None = None,
    *,
    overlap: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """weights[token, k] * (hidden[pair] @ down_proj[expert].T), each pair's row at its place. → (M, A, D).

    hidden: (M * A, F) in the order of `tiles.pairs`, down_proj: (E, D, F), weights: (M, A) float32. The second result
    is dense.hidden @ dense.weight.T (M, D). With `overlap` a program waits for its own tile's hidden values and not for
    the whole of `expert_gate_up`, which must be the launch in front, over the same, fresh tiles.

    Example: `rows, dense = expert_down(hidden, proj, weights, tiles, DenseDown(dense_hidden, weight))`; the sum of the
    rows over k is the experts' output.
    """
    _require("expert_down", hidden, down_proj, down_proj.shape[1], hidden.shape[-1])
    num_pairs = tiles.pairs.numel()
    if weights.numel() != num_pairs or hidden.shape[0] != num_pairs or not weights.is_contiguous():
        raise ValueError(
            f"expert_down must be given the {num_pairs} pairs of its tiles, got hidden {tuple(hidden.shape)} and "
            f"weights {tuple(weights.shape)}."
        )
    num_tokens = num_pairs // tiles.num_active
    config = expert_config(num_tokens, hidden.device)
    tile, dense_tile = config.down, (config.dense or _DENSE)[1]
    num_experts, width, hidden_width = down_proj.shape
    out = torch.empty(num_tokens, tiles.num_active, width, dtype=hidden.dtype, device=hidden.device)
    dense_out, dense_width = None, 0
    if dense is not None:
        dense_width = dense.weight.shape[-1]
        _require_dense("expert_down", dense.hidden, dense.weight, (num_tokens, dense_width), hidden.dtype)
        dense_out = torch.empty(num_tokens, width, dtype=hidden.dtype, device=hidden.device)
    grid_tiles, col_blocks = _grid_tiles(tiles, num_experts), triton.cdiv(width, tile.cols)
    programs = col_blocks * grid_tiles
    dense_programs = 0 if dense is None else col_blocks * triton.cdiv(num_tokens, dense_tile.rows)
    _expert_down_kernel[(programs + dense_programs,)](
        hidden,
        down_proj,
        weights,
        tiles.pairs,
        tiles.tiles,
        tiles.finished,
        out,
        *(hidden, down_proj, out) if dense is None else (dense.hidden, dense.weight, dense_out),
        grid_tiles,
        tiles.tiles.shape[0],
        num_tokens,
        dense_programs,
        _dense_every(programs, dense_programs),
        triton.cdiv(hidden_width, config.gate_up.cols),
        triton.cdiv(dense_width, config.gate_up.cols) * triton.cdiv(num_tokens, (config.dense or _DENSE)[0].rows),
        WIDTH=width,
        HIDDEN=hidden_width,
        DENSE=dense_width,
        OVERLAP=overlap,
        ROWS=tiles.rows_per_tile,
        COLS=tile.cols,
        DEPTH=tile.depth,
        STAGES=tile.stages,
        DENSE_ROWS=dense_tile.rows,
        DENSE_STAGES=dense_tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent_launch(hidden.device),
    )
    return out, dense_out


def _grid_tiles(tiles: ExpertTiles, num_experts: int) -> int:
    # Programs step over tiles this far apart. The bound on tiles is half as large again as what even routing uses at
    # one canvas, and a program that finds nothing to do still costs a launch, a second tile where there is one less.
    # Where experts of several tiles are the rule, these must run side by side to share the weights in cache.
    num_pairs = tiles.pairs.numel()
    several = 2 * num_pairs > num_experts * tiles.rows_per_tile
    return tiles.tiles.shape[0] if several else min(num_experts, num_pairs)


def _dense_every(programs: int, dense_programs: int) -> int:
    """How far apart the dense MLP's programs lie: all within the first half, each among some that wait for memory."""
    return max((programs + dense_programs) // max(2 * dense_programs, 1), 1)


@triton.jit
def _place(dense_programs: tl.tensor, dense_every: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Whether this program is the dense MLP's, and its number among those or among the experts'."""
    program = tl.program_id(0)
    at = program // dense_every
    is_dense = (program % dense_every == dense_every - 1) & (at < dense_programs)
    return is_dense, tl.where(is_dense, at, program - tl.minimum(at, dense_programs))


@triton.jit
def _gate_up_tile(
    inputs: tl.tensor,  # (ROWS, DEPTH) pointers
    gates: tl.tensor,  # (COLS, DEPTH) pointers
    row_inside: tl.tensor,
    col_inside: tl.tensor,
    dtype: tl.constexpr,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    depth = tl.arange(0, DEPTH)
    gate = tl.zeros([COLS, ROWS], tl.float32)
    up = tl.zeros([COLS, ROWS], tl.float32)
    for start in tl.range(0, WIDTH, DEPTH, num_stages=STAGES):
        left = inside(depth, WIDTH - start, WIDTH % DEPTH == 0)[None, :]
        # Weights first: their loads need not wait for the rows' addresses, which come from memory too.
        gate_w = tl.load(gates + start, mask=col_inside[:, None] & left, other=0.0)
        up_w = tl.load(gates + HIDDEN * WIDTH + start, mask=col_inside[:, None] & left, other=0.0)
        tokens = tl.load(inputs + start, mask=row_inside[:, None] & left, other=0.0).T
        gate = tl.dot(gate_w, tokens, gate, input_precision="ieee")
        up = tl.dot(up_w, tokens, up, input_precision="ieee")
    return gelu_tanh_times(gate, up, dtype).T


@triton.jit(do_not_specialize=["grid_tiles", "max_tiles", "num_tokens", "dense_programs", "dense_every"])
def _expert_gate_up_kernel(
    x: tl.tensor,
    gate_up_proj: tl.tensor,
    pairs: tl.tensor,
    tiles: tl.tensor,
    finished: tl.tensor,
    out: tl.tensor,
    dense_x: tl.tensor,
    dense_proj: tl.tensor,
    dense_out: tl.tensor,
    grid_tiles: tl.tensor,
    max_tiles: tl.tensor,
    num_tokens: tl.tensor,
    dense_programs: tl.tensor,
    dense_every: tl.tensor,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    DENSE: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    DENSE_ROWS: tl.constexpr,
    DENSE_STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    dtype: tl.constexpr = out.dtype.element_ty
    is_dense, program = _place(dense_programs, dense_every)
    depth = tl.arange(0, DEPTH)
    slots = tl.arange(0, ROWS)
    wait_for_launches_before(DEPENDENT)
    if is_dense:
        row_blocks = tl.cdiv(num_tokens, DENSE_ROWS)
        cols = program // row_blocks * COLS + tl.arange(0, COLS)
        col_inside = inside(cols, DENSE, DENSE % COLS == 0)
        row = program % row_blocks * DENSE_ROWS + tl.arange(0, DENSE_ROWS)
        row_inside = row < num_tokens
        inputs = dense_x + row[:, None].to(tl.int64) * WIDTH + depth[None, :]
        gates = dense_proj + cols[:, None].to(tl.int64) * WIDTH + depth[None, :]
        hidden = _gate_up_tile(
            inputs, gates, row_inside, col_inside, dtype, WIDTH, DENSE, DENSE_ROWS, COLS, DEPTH, DENSE_STAGES
        )
        at = row[:, None].to(tl.int64) * DENSE + cols[None, :]
        tl.store(dense_out + at, hidden, mask=row_inside[:, None] & col_inside[None, :])
        _count(finished + max_tiles)
    else:
        COL_BLOCKS: tl.constexpr = (HIDDEN + COLS - 1) // COLS
        cols = program % COL_BLOCKS * COLS + tl.arange(0, COLS)
        col_inside = inside(cols, HIDDEN, HIDDEN % COLS == 0)
        tile = program // COL_BLOCKS
        expert = tl.load(tiles + tile * 3)
        first = tl.load(tiles + tile * 3 + 1)
        num_rows = tl.load(tiles + tile * 3 + 2)
        while num_rows > 0:
            row_inside = slots < num_rows
            token = tl.load(pairs + first + slots, mask=row_inside, other=0) // NUM_ACTIVE
            inputs = x + token[:, None].to(tl.int64) * WIDTH + depth[None, :]
            gates = gate_up_proj + (expert.to(tl.int64) * 2 * HIDDEN + cols[:, None]) * WIDTH + depth[None, :]
            hidden = _gate_up_tile(
                inputs, gates, row_inside, col_inside, dtype, WIDTH, HIDDEN, ROWS, COLS, DEPTH, STAGES
            )
            at = (first + slots)[:, None].to(tl.int64) * HIDDEN + cols[None, :]
            tl.store(out + at, hidden, mask=row_inside[:, None] & col_inside[None, :])
            _count(finished + tile)
            tile += grid_tiles
            expert = tl.load(tiles + tile * 3, tile < max_tiles, 0)
            first = tl.load(tiles + tile * 3 + 1, tile < max_tiles, 0)
            num_rows = tl.load(tiles + tile * 3 + 2, tile < max_tiles, 0)


@triton.jit
def _count(counter: tl.tensor) -> None:
    """One more program has stored its part, for whoever sees the new count."""
    tl.debug_barrier()  # the stores of all threads come before the one that counts
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def _await(counter: tl.tensor, count: tl.tensor) -> None:
    """Wait until `count` programs of the launch in front have stored their parts; all of them run already."""
    while tl.atomic_add(counter, 0, sem="acquire") < count:
        pass


@triton.jit
def _down_tile(
    inputs: tl.tensor,  # (ROWS, DEPTH) pointers
    kernels: tl.tensor,  # (COLS, DEPTH) pointers
    row_inside: tl.tensor,
    col_inside: tl.tensor,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    depth = tl.arange(0, DEPTH)
    sums = tl.zeros([COLS, ROWS], tl.float32)
    for start in tl.range(0, HIDDEN, DEPTH, num_stages=STAGES):
        left = inside(depth, HIDDEN - start, HIDDEN % DEPTH == 0)[None, :]
        w = tl.load(kernels + start, mask=col_inside[:, None] & left, other=0.0)
        h = tl.load(inputs + start, mask=row_inside[:, None] & left, other=0.0)
        sums = tl.dot(w, h.T, sums, input_precision="ieee")
    return sums


@triton.jit(
    do_not_specialize=[
        "grid_tiles",
        "max_tiles",
        "num_tokens",
        "dense_programs",
        "dense_every",
        "gate_up_blocks",
        "dense_gate_up_programs",
    ]
)
def _expert_down_kernel(
    hidden: tl.tensor,
    down_proj: tl.tensor,
    weights: tl.tensor,
    pairs: tl.tensor,
    tiles: tl.tensor,
    finished: tl.tensor,
    out: tl.tensor,
    dense_hidden: tl.tensor,
    dense_proj: tl.tensor,
    dense_out: tl.tensor,
    grid_tiles: tl.tensor,
    max_tiles: tl.tensor,
    num_tokens: tl.tensor,
    dense_programs: tl.tensor,
    dense_every: tl.tensor,
    gate_up_blocks: tl.tensor,
    dense_gate_up_programs: tl.tensor,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    DENSE: tl.constexpr,
    OVERLAP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    DENSE_ROWS: tl.constexpr,
    DENSE_STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    COL_BLOCKS: tl.constexpr = (WIDTH + COLS - 1) // COLS
    is_dense, program = _place(dense_programs, dense_every)
    depth = tl.arange(0, DEPTH)
    slots = tl.arange(0, ROWS)
    if not OVERLAP:
        wait_for_launches_before(DEPENDENT)
    elif DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    if is_dense:
        if OVERLAP:
            _await(finished + max_tiles, dense_gate_up_programs)
        row_blocks = tl.cdiv(num_tokens, DENSE_ROWS)
        cols = program // row_blocks * COLS + tl.arange(0, COLS)
        col_inside = inside(cols, WIDTH, WIDTH % COLS == 0)
        row = program % row_blocks * DENSE_ROWS + tl.arange(0, DENSE_ROWS)
        row_inside = row < num_tokens
        inputs = dense_hidden + row[:, None].to(tl.int64) * DENSE + depth[None, :]
        kernels = dense_proj + cols[:, None].to(tl.int64) * DENSE + depth[None, :]
        sums = _down_tile(inputs, kernels, row_inside, col_inside, DENSE, DENSE_ROWS, COLS, DEPTH, DENSE_STAGES)
        at = row[:, None].to(tl.int64) * WIDTH + cols[None, :]
        result = sums.to(dense_out.dtype.element_ty).T
        tl.store(dense_out + at, result, mask=row_inside[:, None] & col_inside[None, :])
    else:
        cols = program % COL_BLOCKS * COLS + tl.arange(0, COLS)
        col_inside = inside(cols, WIDTH, WIDTH % COLS == 0)
        tile = program // COL_BLOCKS
        expert = tl.load(tiles + tile * 3)
        first = tl.load(tiles + tile * 3 + 1)
        num_rows = tl.load(tiles + tile * 3 + 2)
        while num_rows > 0:
            if OVERLAP:
                _await(finished + tile, gate_up_blocks)
            row_inside = slots < num_rows
            pair = tl.load(pairs + first + slots, mask=row_inside, other=0)
            inputs = hidden + (first + slots)[:, None].to(tl.int64) * HIDDEN + depth[None, :]
            kernels = down_proj + (expert.to(tl.int64) * WIDTH + cols[:, None]) * HIDDEN + depth[None, :]
            sums = _down_tile(inputs, kernels, row_inside, col_inside, HIDDEN, ROWS, COLS, DEPTH, STAGES)
            # Read here, since in front of the loop it would hold back the first weights until `pair` has arrived.
            weight = tl.load(weights + pair, mask=row_inside, other=0.0)
            result = sums.to(out.dtype.element_ty).to(tl.float32) * weight[None, :]
            at = pair[:, None].to(tl.int64) * WIDTH + cols[None, :]
            tl.store(out + at, result.to(out.dtype.element_ty).T, mask=row_inside[:, None] & col_inside[None, :])
            tile += grid_tiles
            expert = tl.load(tiles + tile * 3, tile < max_tiles, 0)
            first = tl.load(tiles + tile * 3 + 1, tile < max_tiles, 0)
            num_rows = tl.load(tiles + tile * 3 + 2, tile < max_tiles, 0)
    if OVERLAP and DEPENDENT:
        tl.extra.cuda.gdc_wait()  # so that whoever waits for this kernel has waited for all before it


def _require(owner: str, x: Tensor, proj: Tensor, out_width: int, in_width: int) -> None:
    if x.ndim != 2 or proj.ndim != 3 or proj.shape[1:] != (out_width, in_width):
        raise ValueError(
            f"{owner} must be given rows (M, K) and weights (E, N, K), got {tuple(x.shape)} and {tuple(proj.shape)}."
        )
    if x.dtype != proj.dtype or not (x.is_contiguous() and proj.is_contiguous()):
        raise ValueError(f"{owner} must be given contiguous tensors of one dtype, got {x.dtype} and {proj.dtype}.")


def _require_dense(owner: str, x: Tensor, weight: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tuple(x.shape) != tuple(shape) or weight.ndim != 2 or weight.shape[1] != shape[1]:
        raise ValueError(
            f"{owner}.dense must be {tuple(shape)} and weights (N, {shape[1]}), got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}."
        )
    if {x.dtype, weight.dtype} != {dtype} or not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError(f"{owner}.dense must be contiguous tensors of {dtype}, got {x.dtype} and {weight.dtype}.")
