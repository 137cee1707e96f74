"""Head norms, rotation and cache write in plain PyTorch, the reference for `kernel`."""

import torch
from torch import Tensor

from dgemma_kernels.formats.float8 import Quantized, quantize
from dgemma_kernels.ops.norms.reference import rms_norm


def prepare_qkv(
    projected: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    inv_freq: Tensor,
    start: Tensor,
    length: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    eps: float,
    scales: tuple[Tensor, Tensor] | None = None,
    rotary_pairs: int | None = None,
    float8: bool = False,
) -> Tensor | Quantized:
    """Norm per head, rotate q and k, write k and v to slots length + [0, T). Return the queries (B, T, N, H).

    With `rotary_pairs`, key_weight multiplies the queries in columns that do not rotate.
    """
    batch, kv_heads, _, head_dim = keys.shape
    if scales is not None:
        projected = (projected * scales[0][:, None] * scales[1]).to(projected.dtype)
    heads = projected.unflatten(1, (-1, head_dim)).unflatten(0, (batch, -1))  # (B, T, heads, H)
    query, key, value = heads[:, :, :num_heads], heads[:, :, num_heads : num_heads + kv_heads], heads[:, :, -kv_heads:]
    if rotary_pairs is not None:
        own = (torch.arange(head_dim, device=keys.device) % (head_dim // 2)) < rotary_pairs
        query_weight = torch.where(own, query_weight.float(), query_weight.float() * key_weight.float())
        key_weight = torch.where(own, key_weight, torch.ones_like(key_weight))
    offset = torch.arange(heads.shape[1], device=keys.device)
    angle = (start[:, None] + offset)[..., None].to(inv_freq.dtype) * inv_freq  # (B, T, H / 2)
    cos, sin = (torch.cat([part, part], -1).to(projected.dtype)[:, :, None] for part in (angle.cos(), angle.sin()))

    def rotate(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    slot = (length[:, None] + offset)[:, None, :, None].expand(-1, kv_heads, -1, head_dim)
    keys.scatter_(2, slot, rotate(rms_norm(key, key_weight, eps)).transpose(1, 2))
    values.scatter_(2, slot, rms_norm(value, None, eps).transpose(1, 2))
    queries = rotate(rms_norm(query, query_weight, eps)).contiguous()
    return quantize(queries) if float8 else queries
