"""The mixture of experts in two launches, each of which reads every active expert's weights once.

gate_up gathers its rows and ends in GeGLU. down multiplies by the routing weight and writes one row per (token, k)
pair; `norms.layer_tail` sums these in the order of k. A program computes a tile of one expert's rows and a block of its
columns. The program index runs over column blocks first, so neighbouring programs share an expert.

The weights are the 64-row operand. So on Hopper the products are warpgroup instructions even for 16 or 32 token rows,
and the memory unit loads weights in whole blocks. While the last programs of gate_up run, memory is partly idle. So
programs of down start next to them, and each waits only for its own tile. Rows and weights may be float8. Their scales
are then applied to float32 sums. A row of hidden values has one scale for each program that computes a part of it. For
many tokens, it has only one. The module `tiles` has the functions that compute a tile.

On Hopper, `hopper` replaces both launches for int4 experts with float8 rows. `hopper_many` replaces them for plain and
float8 experts if there are many tokens. Reference: `reference.py`.
"""

from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dgemma_kernels.blocks import wait_for_launches_before
from dgemma_kernels.formats import ExpertWeights, FourBit, Packed, Quantized, format_of, stored_tensors
from dgemma_kernels.formats.float8 import values_and_scale
from dgemma_kernels.formats.fourbit import COLS, OrderedRows
from dgemma_kernels.formats.packed import DEPTH, HALF, ROWS, Weights
from dgemma_kernels.ops.configs import (
    KEPT_OUTPUT,
    ExpertConfig,
    TileShape,
    dependent_launch,
    expert_config,
    gluon_obstacle,
    is_hopper,
    tensor_descriptors,
)
from dgemma_kernels.ops.experts.tiles import (
    TileOperands,
    TileSizes,
    decoded_down_tile,
    decoded_gate_up_tile,
    down_tile,
    gate_up_tile,
    load_tile,
)
from dgemma_kernels.ops.norms.kernel import round_rows
from dgemma_kernels.ops.router.kernel import ExpertTiles


def expert_gate_up(
    x: Tensor | Quantized, gate_up_proj: ExpertWeights, tiles: ExpertTiles, *, config: ExpertConfig | None = None
) -> Tensor | Quantized:
    """Return geglu(x[token] @ gate_up_proj[expert].T) for every (token, k) pair, in the order of `tiles.pairs`.

    x: (M, D), gate_up_proj: (E, 2F, D), gate rows first → (M * A, F). If one operand is `Quantized`, so are the other
    and the result. Packed weights must be packed with `gated=True`; their result is that of plain weights. `config` has
    the shapes of the tiles, by default those of `configs.expert_config`.

    Example: `hidden = expert_gate_up(expert_in, experts.gate_up_proj, tiles)`.
    """
    rows, row_scale = values_and_scale(x)
    num_pairs = tiles.pairs.numel()
    _check(x, gate_up_proj, tiles, num_pairs // tiles.num_active, gated=True)
    assert not isinstance(x, Quantized) or x.block is None
    config = config or expert_config(rows.shape[0], rows.device, format_of(gate_up_proj))
    tile, one_scale = config.gate_up, config.one_scale and isinstance(x, Quantized)
    _, double, width = gate_up_proj.shape
    hidden_width = double // 2
    if config.persistent and _fits_many(rows, gate_up_proj, tiles, width, hidden_width):
        out = _many().expert_gate_up(x, gate_up_proj, tiles)
        return round_rows(out) if one_scale else out
    out = torch.empty(num_pairs, hidden_width, dtype=x.dtype if one_scale else rows.dtype, device=rows.device)
    col_blocks = triton.cdiv(hidden_width, tile.cols)
    out_scale = None
    if isinstance(x, Quantized) and not one_scale:
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
        ONE_SCALE=one_scale,
        DESCRIBED=isinstance(proj[0], TensorDescriptor),
        **_tile_arguments(tile, rows, gate_up_proj, tiles.rows_per_tile),
    )
    if one_scale:
        return round_rows(out)
    return Quantized(values=out, scale=out_scale, dtype=x.dtype, block=tile.cols) if out_scale is not None else out


def expert_down(
    hidden: Tensor | Quantized,
    down_proj: ExpertWeights,
    weights: Tensor,
    tiles: ExpertTiles,
    *,
    overlap: bool = False,
    config: ExpertConfig | None = None,
) -> Tensor:
    """Return weights[token, k] * (hidden[pair] @ down_proj[expert].T) at [token, k]: (M, A, D).

    hidden: (M * A, F) in the order of `tiles.pairs`, down_proj: (E, D, F), weights: (M, A) float32. With `overlap` each
    program waits for the hidden values of its own tile instead of the whole `expert_gate_up`. `expert_gate_up` must
    then be the previous launch, over the same tiles. No launch before these two may have used the tiles.

    Example: `rows = expert_down(hidden, experts.down_proj, weights, tiles)`; their sum over k is the experts' output.
    """
    rows, row_scale = values_and_scale(hidden)
    num_pairs = tiles.pairs.numel()
    _check(hidden, down_proj, tiles, num_pairs, gated=False)
    assert weights.numel() == num_pairs
    assert weights.is_contiguous()
    config = config or expert_config(num_pairs // tiles.num_active, rows.device, format_of(down_proj))
    tile, block = config.down, hidden.block if isinstance(hidden, Quantized) else None
    one_scale = isinstance(hidden, Quantized) and block is None
    # With one scale per row, the previous launch is `round_rows`. `hopper_many` does not count its tiles.
    overlap = overlap and not (one_scale or config.persistent)
    assert block is None or block % tile.depth == 0, (block, tile)
    _, width, hidden_width = down_proj.shape
    if config.persistent and block is None and _fits_many(rows, down_proj, tiles, width, hidden_width):
        return _many().expert_down(hidden, down_proj, weights, tiles)
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
        BLOCK=block,
        ONE_SCALE=one_scale,
        KEEP="evict_last" if out.nbytes <= KEPT_OUTPUT else "",
        DESCRIBED=isinstance(proj[0], TensorDescriptor),
        **_tile_arguments(tile, rows, down_proj, tiles.rows_per_tile),
    )
    return out


def multiply_experts(
    x: Tensor | Quantized | OrderedRows,
    gate_up_proj: ExpertWeights,
    down_proj: ExpertWeights,
    weights: Tensor,
    tiles: ExpertTiles,
    *,
    config: ExpertConfig | None = None,
) -> Tensor:
    """Return weights[token, k] * (geglu(x[token] @ gate_up_proj[expert].T) @ down_proj[expert].T) at [token, k].

    x: (M, D), gate_up_proj: (E, 2F, D), gate rows first, down_proj: (E, D, F), weights: (M, A) float32 → (M, A, D). No
    earlier launch may have used the tiles. `hopper`, and `hopper_many` for plain weights and tiles of up to 160 rows,
    compute both products in one launch.

    Example: `rows = multiply_experts(expert_in, experts.gate_up_proj, experts.down_proj, weights, tiles)`.
    """
    if isinstance(x, OrderedRows):
        assert (obstacle := float8_obstacle(gate_up_proj, down_proj)) is None, obstacle
        assert isinstance(gate_up_proj, FourBit)
        assert isinstance(down_proj, FourBit)
        from dgemma_kernels.ops.experts import hopper  # here, because other versions of Triton may lack its functions

        return hopper.multiply_experts(x, gate_up_proj, down_proj, weights, tiles)
    config = config or expert_config(x.shape[0], values_and_scale(x)[0].device, format_of(gate_up_proj))
    _, width, hidden_width = down_proj.shape
    if (
        config.persistent
        and tiles.rows_per_tile <= _many().TALL_ROWS  # larger tiles are as fast in two launches
        and isinstance(x, Tensor)
        and isinstance(gate_up_proj, Tensor)
        and isinstance(down_proj, Tensor)
        and all(_fits_many(x, proj, tiles, width, hidden_width) for proj in (gate_up_proj, down_proj))
    ):
        return _many().multiply_experts(x, gate_up_proj, down_proj, weights, tiles)
    rows = expert_gate_up(x, gate_up_proj, tiles, config=config)
    # `hopper_many` does not count finished parts, for which an overlapping `expert_down` would wait forever.
    counts = not (config.persistent and _fits_many(values_and_scale(x)[0], gate_up_proj, tiles, width, hidden_width))
    return expert_down(rows, down_proj, weights, tiles, overlap=counts, config=config)


def float8_obstacle(gate_up_proj: ExpertWeights, down_proj: ExpertWeights) -> str | None:
    """Return a requirement of float8 rows that these weights do not meet, None if they meet all.

    Example: `float8_obstacle(layer.expert_gate_up, layer.expert_down) is None`.
    """
    if not (isinstance(gate_up_proj, FourBit) and isinstance(down_proj, FourBit)) or gate_up_proj.kind != "int4":
        return "experts in int4"
    if any(
        weight.group != COLS or weight.zero is not None or weight.bias is not None
        for weight in (gate_up_proj, down_proj)
    ):
        return "symmetric int4 in groups of 64 columns or more"
    width, hidden = down_proj.shape[1:]
    # `hopper` adds offsets after every 1,024 columns and at the end of a block. Within the last 6 planes, it copies
    # the next block's scales, so only the addition at the end may come there.
    planes = 6 * COLS  # columns in the two rings of `hopper`
    if width % (2 * COLS) or not planes <= (width - 1) % 1024 + 1 <= 1024 < width <= 4096:
        return "a hidden size of 1408 to 4096, a multiple of 128, whose remainder modulo 1024 is 0 or at least 384"
    if hidden % COLS or hidden < planes:
        return f"experts of at least {planes} columns in steps of {COLS}, got {hidden}"
    if gate_up_proj.dtype != torch.bfloat16:
        return f"a model in bfloat16, got {gate_up_proj.dtype}"
    if not is_hopper(gate_up_proj.codes.device):
        return f"a Hopper GPU (compute capability 9.0), got weights on {gate_up_proj.codes.device}"
    return gluon_obstacle()


def fits_many(weights: ExpertWeights, width: int, hidden_width: int) -> bool:
    """Tell if `hopper_many` multiplies rows by these weights, in a version of Triton that runs it.

    Example: `fits_many(layer.expert_down, 2816, 704)`.
    """
    if not isinstance(weights, (Tensor, Quantized)):
        return False
    values, _ = values_and_scale(weights)
    return (
        is_hopper(values.device)
        and values.element_size() <= 2
        and width % 128 == 0
        and hidden_width % 64 == 0
        and values.data_ptr() % 16 == 0
    )


def _fits_many(rows: Tensor, weights: ExpertWeights, tiles: ExpertTiles, width: int, hidden_width: int) -> bool:
    """Tell if `hopper_many` multiplies these rows and weights."""
    return (
        fits_many(weights, width, hidden_width)
        and tiles.rows_per_tile <= _many().WIDE_ROWS
        and tiles.pairs.numel() * max(width, hidden_width) < 1 << 31  # its offsets have 32 bits
        and rows.data_ptr() % 16 == 0
    )


def _many() -> ModuleType:
    from dgemma_kernels.ops.experts import hopper_many  # here, because other versions of Triton may lack its functions

    return hopper_many


def _weight_arguments(weights: ExpertWeights, tile: TileShape) -> tuple[Tensor | TensorDescriptor | None, ...]:
    """Return the fields of `packed.Weights`."""
    if isinstance(weights, (Packed, FourBit)):
        cols, depth = ROWS // 2 if weights.gated else ROWS, DEPTH if isinstance(weights, Packed) else COLS
        assert tile.cols == cols and tile.depth % depth == 0, (cols, depth, tile)  # noqa: PT018
    if isinstance(weights, Packed):
        planes = _in_blocks(weights.planes, ROWS, HALF, "packed")
        return planes, weights.scale, None, None, None, weights.starts, weights.places, weights.outliers
    if isinstance(weights, FourBit):  # by pointers, 1 to 2 µs per layer faster than descriptors
        return weights.codes, weights.scale, weights.zero, weights.bias, weights.row_scale, None, None, None
    values, scale = values_and_scale(weights)
    return _in_blocks(values, tile.cols, tile.depth, format_of(weights)), scale, *[None] * 6


def _tile_arguments(tile: TileShape, rows: Tensor, weights: ExpertWeights, rows_per_tile: int) -> dict[str, Any]:
    """Return the launch arguments that depend on the tile.

    A tile's rows are two blocks of powers of two over the same weights: 80 rows are 64 and 16.
    """
    first = 1 << (rows_per_tile.bit_length() - 1)
    depth, stages, groups = tile.depth, tile.stages, None
    if isinstance(weights, FourBit):
        groups = COLS // weights.group
        if weights.codes.shape[1] % (depth // COLS):  # the depth does not divide the width of the planes
            depth = COLS
    if isinstance(weights, (Packed, FourBit)) and rows.element_size() > 2:
        stages = 1  # of float32 rows no more fit shared memory
    constants = {"ROWS": first, "MORE": rows_per_tile - first, "COLS": tile.cols, "DEPTH": depth, "GROUPS": groups}
    options = {"num_warps": tile.warps, "num_stages": stages, "maxnreg": tile.registers}
    return constants | options | dependent_launch(rows.device)


def _in_blocks(values: Tensor, rows: int, depth: int, format: str) -> Tensor | TensorDescriptor:
    """Return a descriptor of all experts' rows as one matrix, or the tensor where the memory unit cannot load blocks.

    With a descriptor, programs need neither addresses nor masks.
    """
    matrix = values.view(-1, values.shape[-1])
    aligned = matrix.stride(0) * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0
    if not (aligned and tensor_descriptors(values.device, format)):
        return values
    return TensorDescriptor.from_tensor(matrix, [rows, depth])


def _grid_tiles(tiles: ExpertTiles) -> int:
    # The grid has as many tiles as an even spread of tokens over experts needs. Each program takes every
    # `_grid_tiles`-th tile. A grid for the largest possible number of tiles would be up to twice as large. Its idle
    # programs would cost more time than the second tiles of some programs do. An expert's tiles are neighbours, so they
    # run together and share its weights in the cache.
    num_pairs, num_experts = tiles.pairs.numel(), tiles.num_experts
    return min(num_experts, num_pairs) * triton.cdiv(num_pairs, num_experts * tiles.rows_per_tile)


@triton.jit(do_not_specialize=["grid_tiles", "max_tiles"])
def _expert_gate_up_kernel(
    x: tl.tensor,
    x_scale: tl.tensor,
    gate_up_proj: tl.tensor,
    proj_scale: tl.tensor,
    zero: tl.tensor,
    bias: tl.tensor,
    row_scale: tl.tensor,
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
    GROUPS: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    DESCRIBED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    SIZE: tl.constexpr = TileSizes(WIDTH, HIDDEN, NUM_ACTIVE, ROWS, COLS, DEPTH, None, GROUPS, ONE_SCALE, DESCRIBED, "")
    proj = Weights(gate_up_proj, proj_scale, zero, bias, row_scale, starts, places, outliers)
    operands = TileOperands(x, x_scale, proj, None, pairs, out, out_scale)
    COL_BLOCKS: tl.constexpr = triton.cdiv(HIDDEN, COLS)
    col = tl.program_id(0) % COL_BLOCKS * COLS
    number = tl.program_id(0) // COL_BLOCKS
    wait_for_launches_before(DEPENDENT)
    tile = load_tile(tiles, number, None)
    while tile.num_rows > 0:
        if GROUPS is not None or places is not None:
            decoded_gate_up_tile(operands, tile, col, SIZE)
        elif MORE > 0 and tile.num_rows > ROWS:  # at 1,024 tokens half of the experts need only one block
            gate_up_tile(operands, tile, col, SIZE, MORE)
        else:
            gate_up_tile(operands, tile, col, SIZE, 0)
        tl.debug_barrier()  # all threads store before one thread counts the tile
        tl.atomic_add(finished + number, 1, sem="release")
        number += grid_tiles
        tile = load_tile(tiles, number, max_tiles)


@triton.jit(do_not_specialize=["grid_tiles", "max_tiles", "gate_up_blocks"])
def _expert_down_kernel(
    hidden: tl.tensor,
    hidden_scale: tl.tensor,
    down_proj: tl.tensor,
    proj_scale: tl.tensor,
    zero: tl.tensor,
    bias: tl.tensor,
    row_scale: tl.tensor,
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
    GROUPS: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    KEEP: tl.constexpr,
    DESCRIBED: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    SIZE: tl.constexpr = TileSizes(WIDTH, HIDDEN, None, ROWS, COLS, DEPTH, BLOCK, GROUPS, ONE_SCALE, DESCRIBED, KEEP)
    proj = Weights(down_proj, proj_scale, zero, bias, row_scale, starts, places, outliers)
    operands = TileOperands(hidden, hidden_scale, proj, weights, pairs, out, None)
    COL_BLOCKS: tl.constexpr = triton.cdiv(WIDTH, COLS)
    col = tl.program_id(0) % COL_BLOCKS * COLS
    number = tl.program_id(0) // COL_BLOCKS
    if not OVERLAP:
        wait_for_launches_before(DEPENDENT)
    elif DEPENDENT:  # gate_up has waited for all launches before it
        tl.extra.cuda.gdc_launch_dependents()
    tile = load_tile(tiles, number, None)
    while tile.num_rows > 0:
        if OVERLAP:
            while tl.atomic_add(finished + number, 0, sem="acquire") < gate_up_blocks:
                pass
        if GROUPS is not None or places is not None:
            decoded_down_tile(operands, tile, col, SIZE)
        elif MORE > 0 and tile.num_rows > ROWS:
            down_tile(operands, tile, col, SIZE, MORE)
        else:
            down_tile(operands, tile, col, SIZE, 0)
        number += grid_tiles
        tile = load_tile(tiles, number, max_tiles)
    if OVERLAP and DEPENDENT:
        tl.extra.cuda.gdc_wait()  # so that a kernel that waits for this one also waits for all earlier ones


def _check(x: Tensor | Quantized, weights: ExpertWeights, tiles: ExpertTiles, num_rows: int, *, gated: bool) -> None:
    """Assert that the operands belong together. The tiles are of `num_rows` rows."""
    (rows, row_scale), shape = values_and_scale(x), tuple(weights.shape)
    assert rows.shape == (num_rows, shape[2]), (rows.shape, num_rows, shape)
    assert shape[0] == tiles.num_experts
    assert all(tensor.is_contiguous() for tensor in (rows, *stored_tensors(weights)))
    if isinstance(weights, (Packed, FourBit)):
        assert rows.dtype == weights.dtype
        assert weights.gated == gated
        assert tiles.rows_per_tile.bit_count() == 1  # one block of rows
    else:
        values, scale = values_and_scale(weights)
        assert rows.dtype == values.dtype
        assert (row_scale is None) == (scale is None) == (rows.dtype.itemsize > 1)
        assert scale is None or scale.ndim == 2
