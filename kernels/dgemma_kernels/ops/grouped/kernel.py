"""Products of tokens with the weights and adapters of their chosen experts, for training. Reference: `reference.py`.

torch's grouped product needs the tokens copied once per choice, and a second product for the adapters, which is then
added. `hopper` gathers the tokens, and the adapters' product is part of its sums.
"""

import torch
from torch import Tensor

from dgemma_kernels.ops.configs import gluon_obstacle, is_hopper

_DEPTH = 64  # columns of a copy


def fits_product(x: Tensor, weights: Tensor, narrow: Tensor, b: Tensor) -> bool:
    """Return True if `multiply` supports these operands. Its copies have 16 bytes or more, and its offsets 32 bits.

    Example: `fits_product(x, experts.gate_up_proj, narrow, experts.gate_up_lora_b)`.
    """
    _, num_cols, width = weights.shape
    return (
        is_hopper(x.device)
        and gluon_obstacle() is None
        and {each.dtype for each in (weights, b, narrow, x)} in ({torch.bfloat16}, {torch.float16})
        and weights.is_contiguous() == b.is_contiguous()
        and num_cols > 16
        and width % _DEPTH == num_cols % 16 == 0
        and b.shape[-1] % 8 == 0 < b.shape[-1] <= _DEPTH
        and 0 < narrow.shape[0] * max(num_cols, width) < 1 << 31
        and all(each.data_ptr() % 16 == 0 for each in (weights, b, narrow, x))
    )


def multiply(
    x: Tensor,
    weights: Tensor,
    narrow: Tensor,
    b: Tensor,
    tiles: Tensor,
    order: Tensor | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """Return x Wᵀ + narrow Bᵀ with the weights of each row's expert, (R, O), or GeGLU of it, (R, O / 2).

    narrow: (R, rank), grouped by expert. x: (R, I), also grouped by expert, or, with `order`, tokens (M, I). order:
    (R,), the choice of each row as token · A + a, where a is its index among the token's A choices. weights: (E, O, I),
    and b: (E, O, rank), both contiguous or both transposed. tiles: those of `group_choices`.

    Example: `multiply(hidden, experts.down_proj, narrow, experts.down_lora_b, groups.tiles)`.
    """
    from dgemma_kernels.ops.grouped import hopper  # Gluon changes with every version of Triton

    assert all(each is None or each.is_contiguous() for each in (x, narrow, order))
    return hopper.multiply(x, weights, narrow, b, tiles, order, gated=gated)
