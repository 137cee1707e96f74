"""The experts' two products for many tokens on Hopper, in one launch or two, as `ops.persistent` computes them.

gate_up gathers its tokens and ends in GeGLU. down multiplies by the routing weights. With both products in one launch,
the first items of down run while the last of gate_up do. `kernel.multiply_experts`, `expert_gate_up` and `expert_down`
select this module. `kernel` has the same products in Triton.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dgemma_kernels.formats import Quantized
from dgemma_kernels.formats.float8 import values_and_scale
from dgemma_kernels.ops.configs import dependent_launch, num_multiprocessors
from dgemma_kernels.ops.persistent import (
    TALL_ROWS,
    UNIT,
    WIDE_ROWS,
    Operands,
    Product,
    Tables,
    describe_rows,
    describe_weights,
    multiply_queue,
)
from dgemma_kernels.ops.router.kernel import ExpertTiles

__all__ = ["TALL_ROWS", "WIDE_ROWS", "expert_down", "expert_gate_up", "multiply_experts"]

_NONE = Operands(*[None] * 8)


def expert_gate_up(x: Tensor | Quantized, gate_up_proj: Tensor | Quantized, tiles: ExpertTiles) -> Tensor:
    """Return geglu(x[token] @ gate_up_proj[expert].T) as `kernel.expert_gate_up` does. Inputs may be float8; the result
    never is.

    The tiles have at most TALL_ROWS or WIDE_ROWS rows.

    Example: `hidden = expert_gate_up(expert_in, experts.gate_up_proj, tiles)`.
    """
    hidden = _empty_hidden(x, gate_up_proj, tiles)
    _launch(_gate_up_operands(x, gate_up_proj, hidden), _NONE, tiles)
    return hidden


def expert_down(
    hidden: Tensor | Quantized, down_proj: Tensor | Quantized, weights: Tensor, tiles: ExpertTiles
) -> Tensor:
    """Return weights[token, k] * (hidden[pair] @ down_proj[expert].T) at [token, k], as `kernel.expert_down` does.

    Float8 hidden values have one scale per row.

    Example: `rows = expert_down(hidden, experts.down_proj, weights, tiles)`.
    """
    down = _down_operands(hidden, down_proj, weights, tiles)
    _launch(_NONE, down, tiles)
    return down.out


def multiply_experts(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, weights: Tensor, tiles: ExpertTiles) -> Tensor:
    """Return both products in one launch, which computes the first items of down while the last of gate_up run.

    No earlier launch may have used the tiles.

    Example: `rows = multiply_experts(expert_in, experts.gate_up_proj, experts.down_proj, weights, tiles)`.
    """
    hidden = _empty_hidden(x, gate_up_proj, tiles)
    down = _down_operands(hidden, down_proj, weights, tiles)
    _launch(_gate_up_operands(x, gate_up_proj, hidden), down, tiles)
    return down.out


def _empty_hidden(x: Tensor | Quantized, gate_up_proj: Tensor | Quantized, tiles: ExpertTiles) -> Tensor:
    rows, _ = values_and_scale(x)
    return torch.empty(tiles.pairs.numel(), gate_up_proj.shape[1] // 2, dtype=x.dtype, device=rows.device)


def _gate_up_operands(x: Tensor | Quantized, gate_up_proj: Tensor | Quantized, hidden: Tensor) -> Operands:
    rows, row_scale = values_and_scale(x)
    values, scale = values_and_scale(gate_up_proj)
    return Operands(rows, None, None, row_scale, describe_weights(values, gated=True), scale, None, hidden)


def _down_operands(
    hidden: Tensor | Quantized, down_proj: Tensor | Quantized, weights: Tensor, tiles: ExpertTiles
) -> Operands:
    rows, row_scale = values_and_scale(hidden)
    values, scale = values_and_scale(down_proj)
    num_tokens = tiles.pairs.numel() // tiles.num_active
    out = torch.empty(num_tokens, tiles.num_active, values.shape[1], dtype=hidden.dtype, device=rows.device)
    return Operands(*describe_rows(rows), row_scale, describe_weights(values), scale, weights, out)


def _launch(up: Operands, down: Operands, tiles: ExpertTiles) -> None:
    out = up.out if down.out is None else down.out
    wide, narrow = (up.rows, up.out) if down.out is None else (down.out, down.rows.base)
    _experts_many_kernel[(num_multiprocessors(out.device),)](
        up.rows,
        up.row_scale,
        up.proj,
        up.proj_scale,
        up.out,
        *down[:-1],
        tiles.pairs,
        tiles.tiles,
        tiles.finished,
        tiles.queue,
        WIDTH=wide.shape[-1],
        HIDDEN=narrow.shape[-1],
        NUM_ACTIVE=tiles.num_active,
        TALL=tiles.rows_per_tile <= TALL_ROWS,
        num_warps=4,
        **dependent_launch(out.device),
    )


@gluon.jit
def _experts_many_kernel(
    x: gl.tensor,  # the operands of gate_up, or all None
    x_scale: gl.tensor,
    gate_up: gl.tensor,
    gate_up_scale: gl.tensor,
    hidden: gl.tensor,
    hidden_rows: gl.tensor,  # those of down, or all None
    few_hidden_rows: gl.tensor,
    more_hidden_rows: gl.tensor,
    hidden_scale: gl.tensor,
    down: gl.tensor,
    down_scale: gl.tensor,
    weights: gl.tensor,
    out: gl.tensor,
    pairs: gl.tensor,
    tiles: gl.tensor,
    finished: gl.tensor,
    queue: gl.tensor,
    WIDTH: gl.constexpr,
    HIDDEN: gl.constexpr,
    NUM_ACTIVE: gl.constexpr,
    TALL: gl.constexpr,
    DEPENDENT: gl.constexpr,
) -> None:
    UP_UNITS: gl.constexpr = HIDDEN // (UNIT // 2)
    DOWN_UNITS: gl.constexpr = WIDTH // UNIT
    UP_BLOCKS: gl.constexpr = (UP_UNITS + 1) // 2 if TALL else UP_UNITS
    DOWN_BLOCKS: gl.constexpr = (DOWN_UNITS + 1) // 2 if TALL else DOWN_UNITS
    HAS_BOTH: gl.constexpr = gate_up is not None and down is not None
    HALVES_BEFORE: gl.constexpr = 2 * UP_BLOCKS if HAS_BOTH else 0
    UP: gl.constexpr = Product(True, False, True, WIDTH, HIDDEN, NUM_ACTIVE, TALL, UP_UNITS, UP_BLOCKS, 0, 0, HAS_BOTH)
    DOWN: gl.constexpr = Product(
        False, False, False, HIDDEN, WIDTH, NUM_ACTIVE, TALL, DOWN_UNITS, DOWN_BLOCKS, 0, HALVES_BEFORE, False
    )
    of_up = Operands(x, None, None, x_scale, gate_up, gate_up_scale, None, hidden, None)
    of_down = Operands(
        hidden_rows, few_hidden_rows, more_hidden_rows, hidden_scale, down, down_scale, weights, out, None
    )
    tables = Tables(pairs, tiles, queue + 1, finished, queue)
    if HAS_BOTH:
        multiply_queue(of_up, of_down, tables, UP, DOWN, DEPENDENT)
    elif gate_up is not None:
        multiply_queue(of_up, None, tables, UP, None, DEPENDENT)
    else:
        multiply_queue(of_down, None, tables, DOWN, None, DEPENDENT)
