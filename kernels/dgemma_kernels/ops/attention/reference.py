"""Attention in plain PyTorch, the reference for all its kernels."""

import torch
from torch import Tensor

from dgemma_kernels.formats.float8 import Quantized
from dgemma_kernels.ops.attention.parts import float8_unit


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    canvas_len: int = 0,
    keep: int = 0,
    float8: bool = False,
) -> Tensor | Quantized:
    """Attend from T tokens to prefix and each other. (B, T, N, H), (B, K, capacity, H) twice, (B,) → (B, T, N, H)."""
    num_tokens, group = queries.shape[1], queries.shape[2] // keys.shape[1]
    slot = torch.arange(keys.shape[2], device=keys.device)
    own = length[:, None] + torch.arange(num_tokens, device=keys.device)  # (B, T): each query's slot
    last = own if causal else (length[:, None] + num_tokens - 1).expand_as(own)
    seen = slot <= last[..., None]  # (B, T, capacity)
    if window is not None:
        seen = seen & (slot > own[..., None] - window)
    if canvas_len:
        start = length[:, None, None] + num_tokens - canvas_len  # (B, 1, 1): the canvas's first slot
        from_canvas = (slot < start + canvas_len) & ((slot >= start - keep) if window is not None else True)
        seen = torch.where(own[..., None] >= start, from_canvas, seen)
    used = (slot < length[:, None] + num_tokens)[:, None, :, None]  # slots beyond may be NaN
    keys = keys.masked_fill(~used, 0.0).repeat_interleave(group, 1)
    values = values.masked_fill(~used, 0.0).repeat_interleave(group, 1)
    scores = (queries.transpose(1, 2) @ keys.transpose(2, 3)).masked_fill(~seen[:, None], -torch.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(queries.dtype)
    out = (weights @ values).transpose(1, 2).contiguous()
    if not float8:
        return out
    unit = float8_unit(queries.shape[3])
    rows = out.flatten(0, 1).flatten(1)  # (B·T, N·H)
    scale = torch.full(rows.shape[:1], unit, device=rows.device)
    return Quantized(values=(rows / unit).to(torch.float8_e4m3fn), scale=scale, dtype=queries.dtype)
