"""The mixture of experts in two launches, each reading every active expert's weights once.

gate_up gathers its rows and ends in GeGLU; down multiplies by the routing weight and writes one row a (token, k) pair,
which `norms.layer_tail` sums in the order of k. A program owns a tile of one expert's rows and a block of its columns;
column blocks run fastest, so that neighbours share the expert. The weights are the products' 64-row operand, which
makes them Hopper's warpgroup instructions at 16 and 32 rows of tokens too; there the memory unit fetches them in whole
blocks. The last programs of gate_up leave memory idle: down's start beside them, each waiting for its own tile alone.
Weights and rows may also be in float8: products of float8 values, to whose float32 sums the scales are applied; hidden
values have a scale for each row and block of a program's columns. What a program does with its tile is in
`expert_tiles`. Reference twin: `reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dgemma_kernels.formats.float8 import Quantized, split
from dgemma_kernels.formats.packed import DEPTH, HALF, ROWS, Packed, Weights
from dgemma_kernels.ops.blocks import wait_for_launches_before
from dgemma_kernels.ops.configs import Tile, dependent_launch, expert_config, tensor_descriptors
from dgemma_kernels.ops.experts.tiles import (
    Sizes,
    Values,
    down_tile,
    gate_up_tile,
    load_tile,
    packed_down_tile,
    packed_gate_up_tile,
)
from dgemma_kernels.ops.router.kernel import ExpertTiles


def expert_gate_up(
    x: Tensor | Quantized, gate_up_proj: Tensor | Quantized | Packed, tiles: ExpertTiles
) -> Tensor | Quantized:
    """geglu(x[token] @ gate_up_proj[expert].T) for every (token, k) pair, in the order of `tiles.pairs`.

    x: (M, D), gate_up_proj: (E, 2F, D), gate rows first → (M * A, F). Both quantised, or neither; so is the result.
    Packed weights are packed with `gated=True`, and give what plain ones give.

    Example: `hidden = expert_gate_up(expert_in, experts.gate_up_proj, tiles)`.
    """
    rows, row_scale = split(x)
    _require("expert_gate_up", x, gate_up_proj, gate_up_proj.shape[1] // 2 * 2, tiles)
    num_pairs = tiles.pairs.numel()
    if rows.shape[0] * tiles.num_active != num_pairs:
        raise ValueError(
            f"expert_gate_up.tiles must be of the same {rows.shape[0]} tokens, got {num_pairs} pairs of "
            f"{tiles.num_active} a token."
        )
    if isinstance(x, Quantized) and x.block is not None:
        raise ValueError(f"expert_gate_up.x must have one scale a row, got one for each {x.block} columns.")
    tile = expert_config(rows.shape[0], rows.device, weight_dtype(gate_up_proj)).gate_up
    _, double, width = gate_up_proj.shape
    hidden_width = double // 2
    out = torch.empty(num_pairs, hidden_width, dtype=rows.dtype, device=rows.device)
    col_blocks = triton.cdiv(hidden_width, tile.cols)
    out_scale = None
    if isinstance(x, Quantized):
        out_scale = torch.empty(num_pairs, col_blocks, dtype=torch.float32, device=rows.device)
    grid_tiles, proj = _grid_tiles(tiles), _weight_arguments(gate_up_proj, tile)
    _expert_gate_up_kernel[(col_blocks * grid_tiles,)](
        rows,
        row_scale,
        *proj,
        tiles.pairs,
        tiles.tiles,
        tiles.finished,
        out,
        out_scale,
        grid_tiles,
        tiles.tiles.shape[0],
        WIDTH=width,
        HIDDEN=hidden_width,
        NUM_ACTIVE=tiles.num_active,
        **_split_rows(tiles.rows_per_tile),
        COLS=tile.cols,
        DEPTH=tile.depth,
        DESCRIBED=isinstance(proj[0], TensorDescriptor),
        num_warps=tile.warps,
        num_stages=_stages(tile, rows, gate_up_proj),
        maxnreg=tile.registers,
        **dependent_launch(rows.device),
    )
    return Quantized(values=out, scale=out_scale, dtype=x.dtype, block=tile.cols) if out_scale is not None else out


def expert_down(
    hidden: Tensor | Quantized,
    down_proj: Tensor | Quantized | Packed,
    weights: Tensor,
    tiles: ExpertTiles,
    *,
    overlap: bool = False,
) -> Tensor:
    """weights[token, k] * (hidden[pair] @ down_proj[expert].T), each pair's row at its place. → (M, A, D).

    hidden: (M * A, F) in the order of `tiles.pairs`, down_proj: (E, D, F), weights: (M, A) float32. With `overlap` each
    program waits for its own tile's hidden values instead of the whole of `expert_gate_up`, which must be the launch in
    front, over the same tiles, fresh from `sort_by_expert`.

    Example: `rows = expert_down(hidden, experts.down_proj, weights, tiles)`; their sum over k is the experts' output.
    """
    rows, row_scale = split(hidden)
    _require("expert_down", hidden, down_proj, down_proj.shape[1], tiles)
    num_pairs = tiles.pairs.numel()
    if weights.numel() != num_pairs or rows.shape[0] != num_pairs:
        raise ValueError(
            f"expert_down must be given the {num_pairs} pairs of its tiles, got hidden {tuple(rows.shape)} and "
            f"weights {tuple(weights.shape)}."
        )
    if not weights.is_contiguous():
        raise ValueError("expert_down.weights must be contiguous. Call .contiguous() on them first.")
    config = expert_config(num_pairs // tiles.num_active, rows.device, weight_dtype(down_proj))
    tile, block = config.down, hidden.block if isinstance(hidden, Quantized) else None
    if isinstance(hidden, Quantized) and (block is None or block % tile.depth):
        raise ValueError(
            f"expert_down.hidden must have a scale for every whole number of {tile.depth} columns, got {block}. "
            "Give a down tile whose depth divides the columns of gate_up's."
        )
    _, width, hidden_width = down_proj.shape
    out = torch.empty(num_pairs // tiles.num_active, tiles.num_active, width, dtype=hidden.dtype, device=rows.device)
    grid_tiles, proj = _grid_tiles(tiles), _weight_arguments(down_proj, tile)
    _expert_down_kernel[(triton.cdiv(width, tile.cols) * grid_tiles,)](
        rows,
        row_scale,
        *proj,
        weights,
        tiles.pairs,
        tiles.tiles,
        tiles.finished,
        out,
        grid_tiles,
        tiles.tiles.shape[0],
        triton.cdiv(hidden_width, config.gate_up.cols),
        WIDTH=width,
        HIDDEN=hidden_width,
        OVERLAP=overlap,
        **_split_rows(tiles.rows_per_tile),
        COLS=tile.cols,
        DEPTH=tile.depth,
        BLOCK=block,
        DESCRIBED=isinstance(proj[0], TensorDescriptor),
        num_warps=tile.warps,
        num_stages=_stages(tile, rows, down_proj),
        maxnreg=tile.registers if overlap else None,  # measured so; the other form would spill
        **dependent_launch(rows.device),
    )
    return out


def weight_dtype(weights: Tensor | Quantized | Packed) -> torch.dtype:
    """The dtype of what is read, by which tiles are chosen; packed weights are bytes.

    Example: `expert_config(256, x.device, weight_dtype(gate_up_proj)).rows`.
    """
    return weights.planes.dtype if isinstance(weights, Packed) else split(weights)[0].dtype


def _weight_arguments(weights: Tensor | Quantized | Packed, tile: Tile) -> tuple[Tensor | TensorDescriptor | None, ...]:
    """The values, or the planes of packed weights; scales; what else packed ones have."""
    if not isinstance(weights, Packed):
        values, scale = split(weights)
        return _in_blocks(values, tile.cols, tile.depth), scale, None, None, None
    cols = ROWS // 2 if weights.gated else ROWS
    if (tile.cols, tile.depth) != (cols, DEPTH):
        raise ValueError(f"Tile must have {cols} columns and be {DEPTH} deep for these packed weights, got {tile}.")
    planes = _in_blocks(weights.planes, ROWS, HALF)
    return planes, weights.scale, weights.starts, weights.places, weights.outliers


def _stages(tile: Tile, rows: Tensor, weights: Tensor | Quantized | Packed) -> int:
    """Packed weights come 128 deep whatever they multiply: of float32 rows shared memory holds one such block."""
    return 1 if isinstance(weights, Packed) and rows.element_size() > 2 else tile.stages


def _in_blocks(values: Tensor, rows: int, depth: int) -> Tensor | TensorDescriptor:
    """All experts' rows one below the other, for the memory unit to fetch in blocks: neither addresses nor masks."""
    matrix = values.view(-1, values.shape[-1])
    whole = matrix.stride(0) * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0  # what it can fetch
    if not (whole and tensor_descriptors(values.device, values.dtype)):
        return values
    return TensorDescriptor.from_tensor(matrix, [rows, depth])


def _grid_tiles(tiles: ExpertTiles) -> int:
    # Programs step over tiles this far apart: as many as even routing fills. The bound on tiles is up to twice that,
    # and a program that finds nothing to do still costs a launch; a second tile, where there is one, costs less. An
    # expert's tiles are neighbours, so that they run side by side and share its weights in cache.
    num_pairs, num_experts = tiles.pairs.numel(), tiles.num_experts
    return min(num_experts, num_pairs) * triton.cdiv(num_pairs, num_experts * tiles.rows_per_tile)


def _split_rows(rows_per_tile: int) -> dict[str, int]:
    """Blocks are powers of two: 80 rows are 64 and 16, which share the weights that a program has loaded."""
    rows = 1 << (rows_per_tile.bit_length() - 1)
    return {"ROWS": rows, "MORE": rows_per_tile - rows}


@triton.jit(do_not_specialize=["grid_tiles", "max_tiles"])
def _expert_gate_up_kernel(
    x: tl.tensor,
    x_scale: tl.tensor,
    gate_up_proj: tl.tensor,
    proj_scale: tl.tensor,
    starts: tl.tensor,
    places: tl.tensor,
    outliers: tl.tensor,
    pairs: tl.tensor,
    tiles: tl.tensor,
    finished: tl.tensor,
    out: tl.tensor,
    out_scale: tl.tensor,
    grid_tiles: tl.tensor,
    max_tiles: tl.tensor,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    ROWS: tl.constexpr,
    MORE: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    DESCRIBED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    SIZE: tl.constexpr = Sizes(WIDTH, HIDDEN, ROWS, COLS, DEPTH)
    proj = Weights(gate_up_proj, proj_scale, starts, places, outliers)
    given, hidden = Values(x, x_scale), Values(out, out_scale)
    COL_BLOCKS: tl.constexpr = triton.cdiv(HIDDEN, COLS)
    col = tl.program_id(0) % COL_BLOCKS * COLS
    number = tl.program_id(0) // COL_BLOCKS
    wait_for_launches_before(DEPENDENT)
    tile = load_tile(tiles, number, None)
    while tile.num_rows > 0:
        if places is not None:
            packed_gate_up_tile(given, proj, hidden, pairs, tile, col, SIZE, NUM_ACTIVE, DESCRIBED)
        elif MORE > 0 and tile.num_rows > ROWS:  # two loops: half of the experts at 1,024 tokens need no second block
            gate_up_tile(given, proj, hidden, pairs, tile, col, SIZE, MORE, NUM_ACTIVE, DESCRIBED)
        else:
            gate_up_tile(given, proj, hidden, pairs, tile, col, SIZE, 0, NUM_ACTIVE, DESCRIBED)
        tl.debug_barrier()  # the stores of all threads come before the one that counts
        tl.atomic_add(finished + number, 1, sem="release")
        number += grid_tiles
        tile = load_tile(tiles, number, max_tiles)


@triton.jit(do_not_specialize=["grid_tiles", "max_tiles", "gate_up_blocks"])
def _expert_down_kernel(
    hidden: tl.tensor,
    hidden_scale: tl.tensor,
    down_proj: tl.tensor,
    proj_scale: tl.tensor,
    starts: tl.tensor,
    places: tl.tensor,
    outliers: tl.tensor,
    weights: tl.tensor,
    pairs: tl.tensor,
    tiles: tl.tensor,
    finished: tl.tensor,
    out: tl.tensor,
    grid_tiles: tl.tensor,
    max_tiles: tl.tensor,
    gate_up_blocks: tl.tensor,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
    ROWS: tl.constexpr,
    MORE: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DESCRIBED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    SIZE: tl.constexpr = Sizes(WIDTH, HIDDEN, ROWS, COLS, DEPTH)
    proj = Weights(down_proj, proj_scale, starts, places, outliers)
    given = Values(hidden, hidden_scale)
    COL_BLOCKS: tl.constexpr = triton.cdiv(WIDTH, COLS)
    col = tl.program_id(0) % COL_BLOCKS * COLS
    number = tl.program_id(0) // COL_BLOCKS
    if not OVERLAP:
        wait_for_launches_before(DEPENDENT)
    elif DEPENDENT:  # gate_up's programs all run by now, and what they were given is complete
        tl.extra.cuda.gdc_launch_dependents()
    tile = load_tile(tiles, number, None)
    while tile.num_rows > 0:
        if OVERLAP:
            while tl.atomic_add(finished + number, 0, sem="acquire") < gate_up_blocks:
                pass
        if places is not None:
            packed_down_tile(given, proj, weights, pairs, out, tile, col, SIZE, DESCRIBED)
        elif MORE > 0 and tile.num_rows > ROWS:
            down_tile(given, proj, weights, pairs, out, tile, col, SIZE, MORE, BLOCK, DESCRIBED)
        else:
            down_tile(given, proj, weights, pairs, out, tile, col, SIZE, 0, BLOCK, DESCRIBED)
        number += grid_tiles
        tile = load_tile(tiles, number, max_tiles)
    if OVERLAP and DEPENDENT:
        tl.extra.cuda.gdc_wait()  # so that whoever waits for this kernel has waited for all before it


def _require(
    owner: str, x: Tensor | Quantized, weights: Tensor | Quantized | Packed, out_width: int, tiles: ExpertTiles
) -> None:
    (rows, row_scale), shape = split(x), tuple(weights.shape)
    if rows.ndim != 2 or len(shape) != 3 or shape[1:] != (out_width, rows.shape[-1]):
        raise ValueError(
            f"{owner} must be given rows (M, K) and weights (E, N, K), got {tuple(rows.shape)} and {shape}."
        )
    if isinstance(weights, Packed):
        dtype, scale, held = weights.dtype, None, weights.tensors()
        if weights.gated != (owner == "expert_gate_up"):
            raise ValueError(f"{owner} must be given weights packed with gated={not weights.gated}.")
        if tiles.rows_per_tile.bit_count() > 1:
            raise ValueError(
                f"{owner}.tiles must be of a power of two rows for packed weights, got {tiles.rows_per_tile}."
            )
    else:
        proj, scale = split(weights)
        dtype, held = proj.dtype, (proj,)
    if rows.dtype != dtype or not all(tensor.is_contiguous() for tensor in (rows, *held)):
        raise ValueError(f"{owner} must be given contiguous tensors of one dtype, got {rows.dtype} and {dtype}.")
    if rows.dtype.itemsize == 1 and (row_scale is None or scale is None or scale.ndim != 2):
        raise ValueError(f"{owner} must be given {rows.dtype} with scales, one for each output. Call quantize first.")
    if shape[0] != tiles.num_experts:
        raise ValueError(
            f"{owner}.tiles must be of the weights' {shape[0]} experts, got tiles of {tiles.num_experts}. "
            "Route and sort with the same layer's router."
        )
