"""Attention in plain PyTorch, the reference for all its kernels."""

import torch
from torch import Tensor

from dgemma_kernels.formats.float8 import Quantized
from dgemma_kernels.ops.attention.parts import float8_unit

_TILE = 128  # keys of `attention_float8` whose weights are relative to one maximum


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
    spans: Tensor | None = None,
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
    if spans is not None:
        first, last = (length[:, None, None] + spans).split(1, dim=-1)
        seen = seen | ((slot >= first) & (slot <= last))
    used = (slot < length[:, None] + num_tokens)[:, None, :, None]  # slots beyond may be NaN
    keys = keys.masked_fill(~used, 0.0).repeat_interleave(group, 1)
    values = values.masked_fill(~used, 0.0).repeat_interleave(group, 1)
    scores = (queries.transpose(1, 2) @ keys.transpose(2, 3)).masked_fill(~seen[:, None], -torch.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(queries.dtype)
    out = (weights @ values).transpose(1, 2).contiguous()
    return _rounded(out) if float8 else out


def attention_float8(
    queries: Quantized, keys: Tensor, values: Tensor, length: Tensor, *, float8: bool = False, key_factor: float = 1.0
) -> Tensor | Quantized:
    """Attend causally with the operands of both products in float8. Shapes are those of `attention`.

    Queries have a scale per token and head. Values are in units of `float8_unit`, keys in units of `key_factor` times
    as much. The weights of 128 keys are relative to their maximum, in units of 2^-8.
    """
    num_tokens, group, unit = queries.shape[1], queries.shape[2] // keys.shape[1], float8_unit(queries.shape[3])
    num_slots = -(-keys.shape[2] // _TILE) * _TILE
    slot = torch.arange(num_slots, device=keys.device)
    own = length[:, None] + torch.arange(num_tokens, device=keys.device)  # (B, T): each query's slot
    used = (slot < length[:, None] + num_tokens)[:, None, :, None]  # slots beyond may be NaN

    def narrow(cache: Tensor, unit: float) -> Tensor:
        padded = torch.nn.functional.pad(cache, (0, 0, 0, num_slots - cache.shape[2])).masked_fill(~used, 0.0)
        return ((padded.float() / unit).to(torch.float8_e4m3fn).double() * unit).repeat_interleave(group, 1)

    scores = queries.decode().transpose(1, 2) @ narrow(keys, key_factor * unit).transpose(2, 3)
    scores = scores.masked_fill((slot > own[..., None])[:, None], -torch.inf).unflatten(-1, (-1, _TILE))
    top = scores.amax(-1, keepdim=True)  # (B, N, T, tiles, 1)
    weights = (scores - top.clamp(min=torch.finfo(top.dtype).min)).exp()
    share = (top - top.amax(-2, keepdim=True)).exp()
    rounded = (weights * 256).float().to(torch.float8_e4m3fn).double() / 256
    out = (
        (rounded * share).flatten(-2) @ narrow(values, unit) / (weights * share).sum((-2, -1), keepdim=True).squeeze(-1)
    )
    out = out.to(queries.dtype).transpose(1, 2).contiguous()
    return _rounded(out) if float8 else out


def _rounded(out: Tensor) -> Quantized:
    """Round attention (B, T, N, H) to float8 rows (B·T, N·H)."""
    unit = float8_unit(out.shape[3])
    rows = out.flatten(0, 1).flatten(1)
    scale = torch.full(rows.shape[:1], unit, device=rows.device)
    return Quantized(values=(rows / unit).to(torch.float8_e4m3fn), scale=scale, dtype=out.dtype)
