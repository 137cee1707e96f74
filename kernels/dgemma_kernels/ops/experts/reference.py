"""The experts' two products in plain PyTorch, the reference for `kernel`."""

import torch
from torch import Tensor

from dgemma_kernels.formats import ExpertWeights, Quantized, decode
from dgemma_kernels.formats.fourbit import OrderedRows
from dgemma_kernels.ops.mlp.reference import geglu
from dgemma_kernels.ops.router.kernel import ExpertTiles


def expert_gate_up(x: Tensor | Quantized, gate_up_proj: ExpertWeights, tiles: ExpertTiles) -> Tensor:
    """Return geglu(x[token] @ gate_up_proj[expert].T) by `tiles.pairs`. (M, D), (E, 2F, D) → (M * A, F).

    Float8 operands are multiplied in float64, and the result is not rounded.
    """
    x, gate_up_proj = decode(x), decode(gate_up_proj)
    rows = []
    for expert, first, count in tiles.tiles.tolist():
        tokens = tiles.pairs[first : first + count].long() // tiles.num_active
        rows.append(geglu(x[tokens] @ gate_up_proj[expert].T))
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
    """Return both products, without rounding between them: (M, D), (E, 2F, D), (E, D, F) → (M, A, D).

    They are in float64 if the operands are not plain tensors.
    """
    hidden = expert_gate_up(x.decode() if isinstance(x, OrderedRows) else x, gate_up_proj, tiles)
    return expert_down(hidden, down_proj, weights.to(hidden.dtype), tiles)
