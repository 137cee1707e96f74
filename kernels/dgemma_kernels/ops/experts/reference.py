"""The experts' two products in plain PyTorch, the reference for `kernel`."""

import torch
from torch import Tensor

from dgemma_kernels.formats import ExpertWeights, Quantized, decode
from dgemma_kernels.formats.fourbit import OrderedRows
from dgemma_kernels.ops.mlp.reference import geglu
from dgemma_kernels.ops.router.kernel import ExpertTiles


def expert_gate_up(
    x: Tensor | Quantized, gate_up_proj: ExpertWeights, tiles: ExpertTiles, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return geglu(x[token] @ gate_up_proj[expert].T) by `tiles.pairs`. (M, D), (E, 2F, D) → (M * A, F).

    Float8 operands are multiplied in float64, and the result is not rounded, unless `dtype` is given.
    """
    x, gate_up_proj = decode(x), decode(gate_up_proj)
    rows = []
    for expert, first, count in tiles.tiles.tolist():
        tokens = tiles.pairs[first : first + count].long() // tiles.num_active
        rows.append(geglu((x[tokens] @ gate_up_proj[expert].T).to(dtype or x.dtype)))
    return torch.cat(rows)


def expert_down(
    hidden: Tensor | Quantized,
    down_proj: ExpertWeights,
    weights: Tensor,
    tiles: ExpertTiles,
    *,
    overlap: bool = False,
) -> Tensor:
    """Return weights[pair] * (hidden @ down_proj[expert].T). (M * A, F), (E, D, F), (M, A) → (M, A, D)."""
    hidden, down_proj = decode(hidden), decode(down_proj)
    out = hidden.new_empty(hidden.shape[0], down_proj.shape[1])
    for expert, first, count in tiles.tiles.tolist():
        pairs = tiles.pairs[first : first + count].long()
        rows = hidden[first : first + count] @ down_proj[expert].T
        out[pairs] = (rows * weights.flatten()[pairs, None]).to(hidden.dtype)
    return out.view(-1, tiles.num_active, down_proj.shape[1])


def multiply_experts(
    x: Tensor | Quantized | OrderedRows,
    gate_up_proj: ExpertWeights,
    down_proj: ExpertWeights,
    weights: Tensor,
    tiles: ExpertTiles,
) -> Tensor:
    """Return both products: (M, D), (E, 2F, D), (E, D, F) → (M, A, D).

    They are in float64 if the operands are not plain tensors. Between them, hidden values do not round, except those of
    `OrderedRows`: they round to the rows' dtype and then to float8.
    """
    if isinstance(x, OrderedRows):
        hidden = round_hidden(expert_gate_up(x.decode(), gate_up_proj, tiles, dtype=x.dtype))
    else:
        hidden = expert_gate_up(x, gate_up_proj, tiles)
    return expert_down(hidden, down_proj, weights.to(hidden.dtype), tiles)


def round_hidden(hidden: Tensor) -> Tensor:
    """Round hidden values (R, F) to float8, with a power of two as the scale of every 64 columns, in float64.

    Divided by its scale, the largest value of 64 is from 128 to 256.

    Example: `round_hidden(torch.full((1, 64), 2.1))` is 2.0 everywhere.
    """
    groups = hidden.double().unflatten(1, (-1, 64))
    scale = torch.exp2(groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-119).log2().floor() - 7)
    return ((groups / scale).to(torch.float8_e4m3fn).double() * scale).flatten(1)
