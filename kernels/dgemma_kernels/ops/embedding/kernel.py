"""From token ids to the first layer's input in one launch: lookup, scale, self-conditioning update, two norms.

Values round to the model's dtype where the reference model rounds them. Reference: `reference.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def embed(
    tokens: Tensor, table: Tensor, next_weight: Tensor, update: Tensor | None, *, scale: float, norm: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x = table[tokens] * scale + update, normed without a weight if `norm`, and the first layer's norm of x.

    tokens: (M,) int64, each within the table. table: (V, D). update: (M, D) or None. next_weight: (D,). Returns
    (x, norm(x) * next_weight), both (M, D).

    Example: `x, normed = embed(canvas.flatten(), table, weight, update, scale=53.0, norm=True, eps=1e-6)`.
    """
    num_tokens, width = tokens.shape[0], table.shape[1]
    assert tokens.is_contiguous()
    assert table.is_contiguous()
    assert update is None or update.is_contiguous()
    x = torch.empty(num_tokens, width, dtype=table.dtype, device=table.device)
    normed = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _embed_kernel[(num_tokens,)](
        tokens,
        table,
        update,
        next_weight,
        x,
        normed,
        scale,
        eps,
        width,
        NORM=norm,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return x, normed


@triton.jit
def _embed_kernel(
    tokens: tl.tensor,
    table: tl.tensor,
    update: tl.tensor,
    next_weight: tl.tensor,
    x: tl.tensor,
    normed: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    width: tl.tensor,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    dtype = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    at = row * width + cols
    token = tl.load(tokens + row)
    value = tl.load(table + token * width + cols, mask=inside, other=0.0).to(tl.float32)
    value = (value * scale).to(dtype).to(tl.float32)
    if update is not None:
        value = (value + tl.load(update + at, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    if NORM:
        value = (value / tl.sqrt(tl.sum(value * value, 0) / width + eps)).to(dtype).to(tl.float32)
    tl.store(x + at, value, mask=inside)
    value = value / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    value *= tl.load(next_weight + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, value, mask=inside)
