"""The products of `kernel` on Hopper, with the adapter's product as a last step, as `ops.persistent` computes them."""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dgemma_kernels.ops.configs import num_multiprocessors
from dgemma_kernels.ops.grouped.groups import SMALL_TILE, rows_per_tile
from dgemma_kernels.ops.persistent import (
    UNIT,
    Operands,
    Product,
    Tables,
    describe_rows,
    describe_weights,
    multiply_queue,
)


def multiply(
    x: Tensor,
    weights: Tensor,
    narrow: Tensor,
    b: Tensor,
    tiles: Tensor,
    order: Tensor | None,
    *,
    gated: bool,
) -> Tensor:
    """Compute `kernel.multiply`."""
    flipped, (num_experts, num_cols, width), rank = not weights.is_contiguous(), weights.shape, b.shape[-1]
    num_rows, out_cols = narrow.shape[0], num_cols // 2 if gated else num_cols
    out = torch.empty(num_rows, out_cols, dtype=x.dtype, device=x.device)
    _multiply_tokens_hopper_kernel[(num_multiprocessors(x.device),)](
        *(describe_rows(x) if order is None else (x, None, None)),
        *describe_rows(narrow),
        *(describe_weights(matrix, gated=gated, flipped=flipped) for matrix in (weights, b)),
        order,
        tiles,
        out,
        GATED=gated,
        FLIPPED=flipped,
        WIDTH=width,
        OUT=out_cols,
        NUM_ACTIVE=num_rows // x.shape[0],
        RANK=rank,
        TALL=rows_per_tile(num_rows, num_experts) == SMALL_TILE,
        num_warps=4,
    )
    return out


@gluon.jit
def _multiply_tokens_hopper_kernel(
    rows: gl.tensor,  # the tokens, or descriptors of three sizes of blocks
    few_rows: gl.tensor,
    more_rows: gl.tensor,
    narrow: gl.tensor,  # descriptors of the same blocks
    few_narrow: gl.tensor,
    more_narrow: gl.tensor,
    weights: gl.tensor,
    b: gl.tensor,
    order: gl.tensor,
    tiles: gl.tensor,
    out: gl.tensor,
    GATED: gl.constexpr,
    FLIPPED: gl.constexpr,
    WIDTH: gl.constexpr,
    OUT: gl.constexpr,
    NUM_ACTIVE: gl.constexpr,
    RANK: gl.constexpr,
    TALL: gl.constexpr,
) -> None:
    PER_BLOCK: gl.constexpr = 2 if TALL else 1  # units
    BLOCK_OUT: gl.constexpr = PER_BLOCK * (UNIT // 2 if GATED else UNIT)
    BLOCKS: gl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    DEPTH: gl.constexpr = 16 if RANK <= 16 else 64  # of the adapter's step
    SIZE: gl.constexpr = Product(
        GATED, FLIPPED, order is not None, WIDTH, OUT, NUM_ACTIVE, TALL, BLOCKS * PER_BLOCK, BLOCKS, DEPTH, 0, False
    )
    adapter = Operands(narrow, few_narrow, more_narrow, None, b, None, None, out, None)
    operands = Operands(rows, few_rows, more_rows, None, weights, None, None, out, adapter)
    # The first row of the table has the number of tiles and the queue.
    multiply_queue(operands, None, Tables(order, tiles + 3, tiles, None, tiles + 1), SIZE, None, False)
