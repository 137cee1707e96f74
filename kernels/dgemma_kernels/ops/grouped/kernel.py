"""The product of tokens with the weights of their chosen experts, for training adapters. Reference: `reference.py`.

torch's grouped product needs the tokens copied once per choice, and a second product for the adapters, which is then
added. Here a program gathers the tokens of its tile, or loads rows that are grouped already, and adds the adapters'
product to its sums. It finds the place of its tile from the ends of the groups, so no table of tiles is needed.
Programs of one expert are neighbours and share its weights in the cache. The tiles fit the shared memory of Hopper.

If `hopper` supports a product, it computes the product instead (`_launch`, `_fits_hopper`).
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dgemma.checks import require
from dgemma_kernels.blocks import gelu_tanh_times
from dgemma_kernels.ops import ahead
from dgemma_kernels.ops.configs import gluon_obstacle, is_hopper
from dgemma_kernels.ops.grouped.adapters import find_tile

_ROWS, _COLS, _DEPTH = 128, 256, 64  # of a tile
_LEAST = 16  # fewest columns of a product on tensor cores


class _Sizes(NamedTuple):
    """Sizes of a launch: of the weights, the output's columns, the adapters' rank, and the depth of a load."""

    NUM_COLS: tl.constexpr
    WIDTH: tl.constexpr
    OUT_COLS: tl.constexpr
    RANK: tl.constexpr
    RANK_BLOCK: tl.constexpr
    DEPTH: tl.constexpr


class _Layout(NamedTuple):
    """Four flags: the weights are transposed; B is transposed; the result ends in GeGLU; rows are grouped by expert."""

    FLIPPED: tl.constexpr
    FLIPPED_B: tl.constexpr
    GATED: tl.constexpr
    GROUPED: tl.constexpr


def multiply_tokens(
    x: Tensor,
    weights: Tensor,
    narrow: Tensor,
    b: Tensor,
    order: Tensor,
    ends: Tensor,
    tiles: Tensor | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """Return x Wᵀ + narrow Bᵀ of each choice, where W and B are those of its expert: (R, O), sums in float32.

    x: (M, I) tokens. weights: (E, O, I), contiguous or transposed. order: (R,), the choices grouped by expert, each as
    token · A + a, where a is its index among the token's A choices. narrow: (R, rank), in this order. b: (E, O, rank),
    contiguous or transposed. ends: (E,) int32, where the group of each expert ends. tiles: those of
    `group_choices`; without them, `hopper` is not used. gated: return gelu(first half) · second half instead,
    (R, O / 2).

    Example: `multiply_tokens(x, experts.gate_up_proj, narrow, experts.gate_up_lora_b, groups.order, groups.ends)`.
    """
    if gated and not weights.is_contiguous():
        raise ValueError("multiply_tokens.weights must be contiguous if gated.")
    return _launch("multiply_tokens", x, weights, narrow, b, order, ends, tiles, gated)


def multiply_rows(
    rows: Tensor,
    weights: Tensor,
    ends: Tensor,
    narrow: Tensor | None = None,
    b: Tensor | None = None,
    tiles: Tensor | None = None,
    *,
    scale: float = 1.0,
    by_row: Tensor | None = None,
) -> Tensor:
    """Return scale · by_row · (rows Wᵀ + narrow Bᵀ) for rows (R, I) and narrow (R, rank) grouped by expert: (R, O).

    weights: (E, O, I), contiguous or transposed. ends: (E,) int32, where the group of each expert ends. b: (E, O,
    rank), contiguous or transposed; without narrow and b, only the first product is computed. tiles: as in
    `multiply_tokens`. by_row: (R,) float32.

    Example: `multiply_rows(hidden, experts.down_lora_a, groups.ends)`.
    """
    return _launch("multiply_rows", rows, weights, narrow, b, None, ends, tiles, False, scale, by_row)


class ExpertProduct(NamedTuple):
    """Arguments of `multiply_tokens`; if `order` is None, those of `multiply_rows`."""

    x: Tensor
    weights: Tensor
    narrow: Tensor
    b: Tensor
    order: Tensor | None = None
    gated: bool = False


def calls_of_products(products: Sequence[ExpertProduct], device: torch.device) -> list[partial[Tensor]]:
    """Return calls for `ahead.start`, from tensors on the meta device.

    If `hopper` does not support all products, return an empty list.

    Example: `ahead.start(calls_of_products([ExpertProduct(rows, weights, narrow, b)], torch.device("cuda")))`.
    """
    if not all(_fits_hopper(each.weights, each.b, each.narrow, each.x, device) for each in products):
        return []
    from dgemma_kernels.ops.grouped import hopper

    tiles = torch.empty(1, 3, dtype=torch.int32, device="meta")
    return [
        partial(hopper.multiply, x, weights, narrow, b, tiles, order, gated=gated)
        for x, weights, narrow, b, order, gated in products
    ]


def _launch(
    owner: str,
    x: Tensor,
    weights: Tensor,
    narrow: Tensor | None,
    b: Tensor | None,
    order: Tensor | None,
    ends: Tensor,
    tiles: Tensor | None,
    gated: bool,
    scale: float = 1.0,
    by_row: Tensor | None = None,
) -> Tensor:
    num_experts, num_cols, depth = weights.shape
    flipped, flipped_b = not weights.is_contiguous(), b is not None and not b.is_contiguous()
    stored, stored_b = weights.mT if flipped else weights, b.mT if b is not None and flipped_b else b
    if any(
        each is not None and not each.is_contiguous() for each in (x, narrow, order, ends, stored, stored_b, by_row)
    ):
        raise ValueError(f"{owner} must get contiguous tensors; only weights and b may be transposed.")
    if depth % _DEPTH or stored.shape[-1] * stored.element_size() % 16:
        raise ValueError(
            f"{owner}.weights must have inputs in multiples of {_DEPTH} and rows of a multiple of 16 bytes, got "
            f"{tuple(weights.shape)}."
        )
    num_rows, rank = x.shape[0] if order is None else order.shape[0], 0 if b is None else b.shape[-1]
    if order is not None:
        require(
            num_rows % x.shape[0] == 0,
            f"{owner}.order",
            f"have a multiple of {x.shape[0]} choices, the number of tokens",
            order,
        )
    is_plain = scale == 1 and by_row is None and flipped == flipped_b
    if (
        narrow is not None
        and b is not None
        and tiles is not None
        and is_plain
        and _fits_hopper(weights, b, narrow, x, x.device)
    ):
        from dgemma_kernels.ops.grouped import hopper  # Gluon changes with every version of Triton

        ahead.finish()
        return hopper.multiply(x, weights, narrow, b, tiles, order, gated=gated)
    is_thin = num_cols <= _LEAST
    tile_cols = _LEAST if is_thin else _COLS
    cols, width = (tile_cols // 2, num_cols // 2) if gated else (tile_cols, num_cols)
    last_cols = cols // 2 if not is_thin and 0 < width % cols <= cols // 2 else cols  # of the last tile in a row
    matrix = stored.view(-1, stored.shape[-1])
    blocks = ([_DEPTH, size] if flipped else [size, _DEPTH] for size in (cols, last_cols))
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    num_tiles = num_rows // _ROWS + num_experts  # an upper bound on the number of tiles
    _multiply_tokens_kernel[(num_tiles * triton.cdiv(width, cols),)](
        x if order is not None else TensorDescriptor.from_tensor(x, [_ROWS, _DEPTH]),
        *(TensorDescriptor.from_tensor(matrix, block) for block in blocks),
        narrow,
        stored_b,
        order,
        ends,
        out,
        by_row,
        scale,
        num_rows // x.shape[0],
        NUM_COLS=num_cols,
        WIDTH=depth,
        NUM_EXPERTS=num_experts,
        EXPERT_BLOCK=triton.next_power_of_2(num_experts),
        RANK=rank,
        RANK_BLOCK=max(_LEAST, triton.next_power_of_2(rank)),
        FLIPPED=flipped,
        FLIPPED_B=flipped_b,
        GATED=gated,
        ROWS=_ROWS,
        COLS=cols,
        LAST_COLS=last_cols,
        DEPTH=_DEPTH,
        num_warps=4 if is_thin else 8,
        num_stages=4,
    )
    return out


def _fits_hopper(weights: Tensor, b: Tensor, narrow: Tensor, x: Tensor, device: torch.device) -> bool:
    """Return True if `hopper` can compute this product. Its copies have 16 bytes or more, and its offsets 32 bits."""
    _, num_cols, depth = weights.shape
    return (
        is_hopper(device)
        and gluon_obstacle() is None
        and {each.dtype for each in (weights, b, narrow, x)} in ({torch.bfloat16}, {torch.float16})
        and num_cols > _LEAST
        and depth % _DEPTH == 0
        and num_cols % 16 == b.shape[-1] % 8 == 0 < b.shape[-1] <= _DEPTH
        and 0 < narrow.shape[0] * max(num_cols, depth) < 1 << 31
        and all(each.data_ptr() % 16 == 0 for each in (weights, b, narrow, x))
    )


@triton.jit
def _multiply_tokens_kernel(
    x: tl.tensor,
    weights: tl.tensor,
    last_weights: tl.tensor,
    narrow: tl.tensor,
    b: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    out: tl.tensor,
    by_row: tl.tensor,
    scale: tl.tensor,
    top_k: tl.tensor,
    NUM_COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    FLIPPED: tl.constexpr,
    FLIPPED_B: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    LAST_COLS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    SIZE: tl.constexpr = _Sizes(NUM_COLS, WIDTH, NUM_COLS // 2 if GATED else NUM_COLS, RANK, RANK_BLOCK, DEPTH)
    LAYOUT: tl.constexpr = _Layout(FLIPPED, FLIPPED_B, GATED, order is None)
    COL_BLOCKS: tl.constexpr = triton.cdiv(SIZE.OUT_COLS, COLS)
    tile, col = tl.program_id(0) // COL_BLOCKS, tl.program_id(0) % COL_BLOCKS * COLS
    expert, start, end = find_tile(ends, tile, NUM_EXPERTS, EXPERT_BLOCK, ROWS)
    if expert < NUM_EXPERTS:
        row = start + tl.arange(0, ROWS)
        is_row = row < end
        choice = row.to(tl.int64) if order is None else tl.load(order + row, is_row, 0)
        tokens = x if order is None else x + choice // top_k * WIDTH
        outs = out + row.to(tl.int64) * SIZE.OUT_COLS
        low = None if b is None else narrow + row.to(tl.int64) * RANK
        own_b = None if b is None else b + expert * (NUM_COLS * RANK)
        factor = scale if by_row is None else scale * tl.load(by_row + row, is_row, 0.0)[:, None]
        if LAST_COLS < COLS and col + COLS > SIZE.OUT_COLS:
            _multiply_tile(
                tokens,
                start,
                last_weights,
                low,
                own_b,
                factor,
                outs,
                expert,
                is_row,
                col,
                SIZE,
                LAYOUT,
                ROWS,
                LAST_COLS,
            )
        else:
            _multiply_tile(
                tokens, start, weights, low, own_b, factor, outs, expert, is_row, col, SIZE, LAYOUT, ROWS, COLS
            )


@triton.jit
def _multiply_tile(
    tokens: tl.tensor,
    start: tl.tensor,
    weights: tl.tensor,
    low: tl.tensor,
    b: tl.tensor,
    factor: tl.tensor,
    out: tl.tensor,
    expert: tl.tensor,
    is_row: tl.tensor,
    col: tl.tensor,
    SIZE: tl.constexpr,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    """Compute a tile from column `col` on. low and out point to its rows; b points to its expert's B.

    tokens: pointers to the rows of the tile, or a descriptor of all rows, of which the tile begins at `start`. factor:
    multiplies the result; a number, or (ROWS, 1).
    """
    sums = tl.zeros((ROWS, COLS), tl.float32)
    up_sums = sums
    for begin in range(0, SIZE.WIDTH, SIZE.DEPTH):
        if LAYOUT.GROUPED:
            block = tokens.load([start, begin])
        else:
            block = tl.load(tokens[:, None] + (begin + tl.arange(0, SIZE.DEPTH)[None, :]))
        if LAYOUT.FLIPPED:
            sums = tl.dot(block, weights.load([expert * SIZE.WIDTH + begin, col]), sums)
        else:
            sums = tl.dot(block, weights.load([expert * SIZE.NUM_COLS + col, begin]).T, sums)
        if LAYOUT.GATED:
            up_row = expert * SIZE.NUM_COLS + SIZE.OUT_COLS + col
            up_sums = tl.dot(block, weights.load([up_row, begin]).T, up_sums)
    cols, rank = col + tl.arange(0, COLS), tl.arange(0, SIZE.RANK_BLOCK)
    is_col, is_rank = cols < SIZE.OUT_COLS, rank < SIZE.RANK
    if b is not None:
        low_block = tl.load(low[:, None] + rank[None, :], is_row[:, None] & is_rank[None, :], 0.0)
        if LAYOUT.FLIPPED_B:
            b_at = b + cols[None, :] + rank[:, None] * SIZE.NUM_COLS
        else:
            b_at = b + cols[None, :] * SIZE.RANK + rank[:, None]
        in_b = is_col[None, :] & is_rank[:, None]
        sums = tl.dot(low_block, tl.load(b_at, in_b, 0.0), sums)
        if LAYOUT.GATED:
            up_sums = tl.dot(low_block, tl.load(b_at + SIZE.OUT_COLS * SIZE.RANK, in_b, 0.0), up_sums)
    dtype: tl.constexpr = out.dtype.element_ty
    result = gelu_tanh_times(sums, up_sums, dtype) if LAYOUT.GATED else (sums * factor).to(dtype)
    tl.store(out[:, None] + cols[None, :], result, is_row[:, None] & is_col[None, :])
