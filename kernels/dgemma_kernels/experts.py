"""The mixture of experts in two launches, each reading every active expert's weights once.

gate_up gathers its rows and ends in GeGLU; down multiplies by the routing weight and writes one row a (token, k) pair,
which `norms.layer_tail` sums in the order of k. A program owns a tile of one expert's rows and a block of its columns;
column blocks run fastest, so that neighbours share the expert. The weights are the products' 64-row operand, which
makes them Hopper's warpgroup instructions at 16 and 32 rows of tokens too; there the memory unit fetches them in whole
blocks. The last programs of gate_up leave memory idle: down's start beside them, each waiting for its own tile alone.
Weights and rows may also be in float8: products of float8 values, to whose float32 sums the scales are applied; hidden
values have a scale for each row and block of a program's columns. Packed weights have tiles of their own, in which
gate and up are one product. Reference twin: `reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dgemma_kernels.blocks import float8_scale, gelu_tanh_times, inside, wait_for_launches_before
from dgemma_kernels.configs import Tile, dependent_launch, expert_config, tensor_descriptors
from dgemma_kernels.packed import DEPTH, HALF, ROWS, Packed, multiply_packed
from dgemma_kernels.quantized import Quantized, split
from dgemma_kernels.router import ExpertTiles


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


@triton.jit
def _token_rows(
    pairs: tl.tensor, first: tl.tensor, slots: tl.tensor, row_inside: tl.tensor, NUM_ACTIVE: tl.constexpr
) -> tl.tensor:
    """Which tokens the slots of a tile are, as a column."""
    token = tl.load(pairs + first + slots, mask=row_inside, other=0) // NUM_ACTIVE
    return token[:, None].to(tl.int64)


@triton.jit
def _load_scales(
    hidden_scale: tl.tensor, row: tl.tensor, row_inside: tl.tensor, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The scales of all blocks of these rows, (rows, blocks and what makes them a power of two). Asked for at once, in
    front of the loop: one block ahead of its products each would still be waited for, a trip to L2 in every turn."""
    BLOCKS: tl.constexpr = triton.cdiv(HIDDEN, BLOCK)
    block = tl.arange(0, triton.next_power_of_2(BLOCKS))[None, :]
    return tl.load(hidden_scale + row[:, None] * BLOCKS + block, mask=row_inside[:, None] & (block < BLOCKS), other=0.0)


@triton.jit
def _add_products(
    sums: tl.tensor, w: tl.tensor, rows: tl.tensor, scales: tl.tensor, block: tl.tensor, FLOAT8: tl.constexpr
) -> tl.tensor:
    """sums + w @ rows, of float8 times the rows' scales of this block, the others of which `scales` holds too. Hopper
    adds products of float8 with 14 bits: those of one block alone, and blocks in float32 (`max_num_imprecise_acc` means
    the same, and waits for each instruction in between)."""
    if not FLOAT8:
        sums = tl.dot(w, rows, sums, input_precision="ieee")
    elif scales is None:
        sums += tl.dot(w, rows)
    else:
        scale = tl.sum(tl.where(tl.arange(0, scales.shape[1])[None, :] == block, scales, 0.0), 1)
        sums += tl.dot(w, rows) * scale[None, :]
    return sums


@triton.jit
def _store_geglu(
    out: tl.tensor,
    out_scale: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    gate_scale: tl.tensor,
    up_scale: tl.tensor,
    x_scale: tl.tensor,
    pairs: tl.tensor,
    row: tl.tensor,
    row_inside: tl.tensor,
    cols: tl.tensor,
    col_inside: tl.tensor,
    block: tl.tensor,
    HIDDEN: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
) -> None:
    if out_scale is None:
        hidden = gelu_tanh_times(gate, up, out.dtype.element_ty).T
    else:
        # Read again (under a modifier, else Triton keeps it from the front, and 40 registers with it).
        token = tl.load(pairs + row, mask=row_inside, other=0, cache_modifier=".ca") // NUM_ACTIVE
        token_scale = tl.load(x_scale + token, mask=row_inside, other=0.0)
        gate *= gate_scale[:, None] * token_scale[None, :]
        up *= up_scale[:, None] * token_scale[None, :]
        hidden = gelu_tanh_times(gate, up, tl.float32)
        scale = float8_scale(hidden, 0)
        tl.store(out_scale + row * triton.cdiv(HIDDEN, gate.shape[0]) + block, scale, mask=row_inside)
        hidden = (hidden / scale[None, :]).to(out.dtype.element_ty).T
    at = row[:, None].to(tl.int64) * HIDDEN + cols[None, :]
    tl.store(out + at, hidden, mask=row_inside[:, None] & col_inside[None, :])


@triton.jit
def _store_weighted(
    out: tl.tensor,
    sums: tl.tensor,
    scale: tl.tensor,
    weights: tl.tensor,
    pair: tl.tensor,
    row_inside: tl.tensor,
    cols: tl.tensor,
    col_inside: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    # Read here, since in front of the loop it would hold back the first weights until `pair` has arrived.
    weight = tl.load(weights + pair, mask=row_inside, other=0.0)
    if scale is not None:
        sums *= scale[:, None]
    result = sums.to(out.dtype.element_ty).to(tl.float32) * weight[None, :]
    at = pair[:, None].to(tl.int64) * WIDTH + cols[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty).T, mask=row_inside[:, None] & col_inside[None, :])


@triton.jit
def _gate_up_tile(
    x: tl.tensor,
    x_scale: tl.tensor,
    gate_up_proj: tl.tensor,
    proj_scale: tl.tensor,
    pairs: tl.tensor,
    out: tl.tensor,
    out_scale: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    num_rows: tl.tensor,
    col: tl.tensor,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    ROWS: tl.constexpr,
    MORE: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    DESCRIBED: tl.constexpr,
) -> None:
    """One tile's rows by COLS columns of the weights, a tensor descriptor where DESCRIBED, else a pointer."""
    FLOAT8: tl.constexpr = x_scale is not None
    cols = col + tl.arange(0, COLS)
    col_inside = inside(cols, HIDDEN, HIDDEN % COLS == 0)
    depth = tl.arange(0, DEPTH)
    slots = tl.arange(0, ROWS)
    row_inside = slots < num_rows
    inputs = x + _token_rows(pairs, first, slots, row_inside, NUM_ACTIVE) * WIDTH + depth[None, :]
    row = expert * 2 * HIDDEN + col
    if not DESCRIBED:
        gates = gate_up_proj + (expert.to(tl.int64) * 2 * HIDDEN + cols[:, None]) * WIDTH + depth[None, :]
    gate_scale, up_scale = None, None
    if proj_scale is not None:  # asked for here: behind the loop they would be one more wait for memory
        gate_scale = tl.load(proj_scale + row + cols - col, mask=col_inside, other=0.0)
        up_scale = tl.load(proj_scale + row + HIDDEN + cols - col, mask=col_inside, other=0.0)
    gate = tl.zeros([COLS, ROWS], tl.float32)
    up = tl.zeros([COLS, ROWS], tl.float32)
    if MORE > 0:
        more = ROWS + tl.arange(0, MORE)
        more_inside = more < num_rows
        more_inputs = x + _token_rows(pairs, first, more, more_inside, NUM_ACTIVE) * WIDTH + depth[None, :]
        more_gate = tl.zeros([COLS, MORE], tl.float32)
        more_up = tl.zeros([COLS, MORE], tl.float32)
    for start in range(0, WIDTH, DEPTH):
        left = inside(depth, WIDTH - start, WIDTH % DEPTH == 0)[None, :]
        # Weights first: their loads need not wait for the rows' addresses, which come from memory too.
        if DESCRIBED:
            gate_w = gate_up_proj.load([row, start])
            up_w = gate_up_proj.load([row + HIDDEN, start])
        else:
            gate_w = tl.load(gates + start, mask=col_inside[:, None] & left, other=0.0)
            up_w = tl.load(gates + HIDDEN * WIDTH + start, mask=col_inside[:, None] & left, other=0.0)
        tokens = tl.load(inputs + start, mask=row_inside[:, None] & left, other=0.0).T
        gate = _add_products(gate, gate_w, tokens, None, None, FLOAT8)
        up = _add_products(up, up_w, tokens, None, None, FLOAT8)
        if MORE > 0:
            more_tokens = tl.load(more_inputs + start, mask=more_inside[:, None] & left, other=0.0).T
            more_gate = _add_products(more_gate, gate_w, more_tokens, None, None, FLOAT8)
            more_up = _add_products(more_up, up_w, more_tokens, None, None, FLOAT8)
    _store_geglu(
        out, out_scale, gate, up, gate_scale, up_scale, x_scale, pairs,
        first + slots, row_inside, cols, col_inside, col // COLS, HIDDEN, NUM_ACTIVE,
    )  # fmt: skip
    if MORE > 0:
        _store_geglu(
            out, out_scale, more_gate, more_up, gate_scale, up_scale, x_scale, pairs,
            first + more, more_inside, cols, col_inside, col // COLS, HIDDEN, NUM_ACTIVE,
        )  # fmt: skip


@triton.jit
def _packed_gate_up_tile(
    x: tl.tensor,
    planes: tl.tensor,
    scale: tl.tensor,
    starts: tl.tensor,
    places: tl.tensor,
    outliers: tl.tensor,
    pairs: tl.tensor,
    out: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    num_rows: tl.tensor,
    col: tl.tensor,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DESCRIBED: tl.constexpr,
) -> None:
    """A block's columns of gate and up are neighbours among the packed rows, and one product."""
    slots = tl.arange(0, ROWS)
    row_inside = slots < num_rows
    rows = x + _token_rows(pairs, first, slots, row_inside, NUM_ACTIVE) * WIDTH
    sums = multiply_packed(
        rows, row_inside, planes, scale, starts, places, outliers, expert, col // COLS,
        (HIDDEN + COLS - 1) // COLS, WIDTH, ROWS, DESCRIBED,
    )  # fmt: skip
    gate, up = sums.reshape(2, COLS, ROWS).permute(1, 2, 0).split()
    cols = col + tl.arange(0, COLS)
    col_inside = inside(cols, HIDDEN, HIDDEN % COLS == 0)
    _store_geglu(
        out, None, gate, up, None, None, None, pairs,
        first + slots, row_inside, cols, col_inside, col // COLS, HIDDEN, NUM_ACTIVE,
    )  # fmt: skip


@triton.jit
def _packed_down_tile(
    hidden: tl.tensor,
    planes: tl.tensor,
    scale: tl.tensor,
    starts: tl.tensor,
    places: tl.tensor,
    outliers: tl.tensor,
    weights: tl.tensor,
    pairs: tl.tensor,
    out: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    num_rows: tl.tensor,
    col: tl.tensor,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DESCRIBED: tl.constexpr,
) -> None:
    slots = tl.arange(0, ROWS)
    row_inside = slots < num_rows
    pair = tl.load(pairs + first + slots, mask=row_inside, other=0)
    rows = hidden + (first + slots)[:, None].to(tl.int64) * HIDDEN
    sums = multiply_packed(
        rows, row_inside, planes, scale, starts, places, outliers, expert, col // COLS,
        (WIDTH + COLS - 1) // COLS, HIDDEN, ROWS, DESCRIBED,
    )  # fmt: skip
    cols = col + tl.arange(0, COLS)
    col_inside = inside(cols, WIDTH, WIDTH % COLS == 0)
    _store_weighted(out, sums, None, weights, pair, row_inside, cols, col_inside, WIDTH)


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
    COL_BLOCKS: tl.constexpr = (HIDDEN + COLS - 1) // COLS
    col = tl.program_id(0) % COL_BLOCKS * COLS
    tile = tl.program_id(0) // COL_BLOCKS
    wait_for_launches_before(DEPENDENT)
    expert, first, num_rows = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    while num_rows > 0:
        if places is not None:
            _packed_gate_up_tile(
                x, gate_up_proj, proj_scale, starts, places, outliers, pairs, out, expert, first, num_rows, col,
                WIDTH, HIDDEN, NUM_ACTIVE, ROWS, COLS, DESCRIBED,
            )  # fmt: skip
        elif MORE > 0 and num_rows > ROWS:  # two loops: half of the experts at 1,024 tokens need no second block
            _gate_up_tile(
                x, x_scale, gate_up_proj, proj_scale, pairs, out, out_scale, expert, first, num_rows, col,
                WIDTH, HIDDEN, NUM_ACTIVE, ROWS, MORE, COLS, DEPTH, DESCRIBED,
            )  # fmt: skip
        else:
            _gate_up_tile(
                x, x_scale, gate_up_proj, proj_scale, pairs, out, out_scale, expert, first, num_rows, col,
                WIDTH, HIDDEN, NUM_ACTIVE, ROWS, 0, COLS, DEPTH, DESCRIBED,
            )  # fmt: skip
        tl.debug_barrier()  # the stores of all threads come before the one that counts
        tl.atomic_add(finished + tile, 1, sem="release")
        tile += grid_tiles
        expert = tl.load(tiles + tile * 3, tile < max_tiles, 0)
        first = tl.load(tiles + tile * 3 + 1, tile < max_tiles, 0)
        num_rows = tl.load(tiles + tile * 3 + 2, tile < max_tiles, 0)


@triton.jit
def _down_tile(
    hidden: tl.tensor,
    hidden_scale: tl.tensor,
    down_proj: tl.tensor,
    proj_scale: tl.tensor,
    weights: tl.tensor,
    pairs: tl.tensor,
    out: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    num_rows: tl.tensor,
    col: tl.tensor,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    MORE: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DESCRIBED: tl.constexpr,
) -> None:
    """As `_gate_up_tile`; hidden values in float8 have a scale for each BLOCK of them."""
    cols = col + tl.arange(0, COLS)
    col_inside = inside(cols, WIDTH, WIDTH % COLS == 0)
    depth = tl.arange(0, DEPTH)
    slots = tl.arange(0, ROWS)
    row_inside = slots < num_rows
    pair = tl.load(pairs + first + slots, mask=row_inside, other=0)
    inputs = hidden + (first + slots)[:, None].to(tl.int64) * HIDDEN + depth[None, :]
    if not DESCRIBED:
        kernels = down_proj + (expert.to(tl.int64) * WIDTH + cols[:, None]) * HIDDEN + depth[None, :]
    FLOAT8: tl.constexpr = hidden_scale is not None
    scale, scales, more_scales = None, None, None
    if FLOAT8:
        scale = tl.load(proj_scale + expert * WIDTH + cols, mask=col_inside, other=0.0)
        scales = _load_scales(hidden_scale, first + slots, row_inside, HIDDEN, BLOCK)
    sums = tl.zeros([COLS, ROWS], tl.float32)
    if MORE > 0:
        more = ROWS + tl.arange(0, MORE)
        more_inside = more < num_rows
        more_pair = tl.load(pairs + first + more, mask=more_inside, other=0)
        more_inputs = hidden + (first + more)[:, None].to(tl.int64) * HIDDEN + depth[None, :]
        more_sums = tl.zeros([COLS, MORE], tl.float32)
        if FLOAT8:
            more_scales = _load_scales(hidden_scale, first + more, more_inside, HIDDEN, BLOCK)
    for start in range(0, HIDDEN, DEPTH):
        left = inside(depth, HIDDEN - start, HIDDEN % DEPTH == 0)[None, :]
        if DESCRIBED:
            w = down_proj.load([expert * WIDTH + col, start])
        else:
            w = tl.load(kernels + start, mask=col_inside[:, None] & left, other=0.0)
        h = tl.load(inputs + start, mask=row_inside[:, None] & left, other=0.0)
        block = start // BLOCK if FLOAT8 else None
        sums = _add_products(sums, w, h.T, scales, block, FLOAT8)
        if MORE > 0:
            more_h = tl.load(more_inputs + start, mask=more_inside[:, None] & left, other=0.0)
            more_sums = _add_products(more_sums, w, more_h.T, more_scales, block, FLOAT8)
    _store_weighted(out, sums, scale, weights, pair, row_inside, cols, col_inside, WIDTH)
    if MORE > 0:
        _store_weighted(out, more_sums, scale, weights, more_pair, more_inside, cols, col_inside, WIDTH)


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
    COL_BLOCKS: tl.constexpr = (WIDTH + COLS - 1) // COLS
    col = tl.program_id(0) % COL_BLOCKS * COLS
    tile = tl.program_id(0) // COL_BLOCKS
    if not OVERLAP:
        wait_for_launches_before(DEPENDENT)
    elif DEPENDENT:  # gate_up's programs all run by now, and what they were given is complete
        tl.extra.cuda.gdc_launch_dependents()
    expert, first, num_rows = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    while num_rows > 0:
        if OVERLAP:
            while tl.atomic_add(finished + tile, 0, sem="acquire") < gate_up_blocks:
                pass
        if places is not None:
            _packed_down_tile(
                hidden, down_proj, proj_scale, starts, places, outliers, weights, pairs, out,
                expert, first, num_rows, col, WIDTH, HIDDEN, ROWS, COLS, DESCRIBED,
            )  # fmt: skip
        elif MORE > 0 and num_rows > ROWS:
            _down_tile(
                hidden, hidden_scale, down_proj, proj_scale, weights, pairs, out,
                expert, first, num_rows, col, WIDTH, HIDDEN, ROWS, MORE, COLS, DEPTH, BLOCK, DESCRIBED,
            )  # fmt: skip
        else:
            _down_tile(
                hidden, hidden_scale, down_proj, proj_scale, weights, pairs, out,
                expert, first, num_rows, col, WIDTH, HIDDEN, ROWS, 0, COLS, DEPTH, BLOCK, DESCRIBED,
            )  # fmt: skip
        tile += grid_tiles
        expert = tl.load(tiles + tile * 3, tile < max_tiles, 0)
        first = tl.load(tiles + tile * 3 + 1, tile < max_tiles, 0)
        num_rows = tl.load(tiles + tile * 3 + 2, tile < max_tiles, 0)
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
