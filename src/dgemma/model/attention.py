"""Attention of new tokens over the cached prefix and themselves, causal or bidirectional."""

from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dgemma.model.config import LayerShape, ModelConfig
from dgemma.model.layers import RMSNorm, rms_norm
from dgemma.model.rotary import rotate

Mask = Tensor | BlockMask | Literal["causal"]


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Mask | None) -> Tensor:
    """Return softmax(q·k) v with scale 1: queries (B, T, N, H), keys and values (B, K, S, H) → (B, T, N, H).

    mask: (B, 1, T or 1, S), True where a query sees a key; None means everywhere. With a `BlockMask`, FlexAttention
    skips masked blocks. "causal" requires T = S and is fastest: a query sees keys up to its own position.
    """
    if isinstance(mask, BlockMask):
        return _attend_in_blocks(queries, keys, values, mask)
    batch, num_kv_heads = keys.shape[:2]
    group = queries.shape[2] // num_kv_heads
    # Each kv head becomes a batch entry with its query heads, so that keys are shared and not copied.
    q = rearrange(queries, "b t (k g) h -> (b k) g t h", k=num_kv_heads)
    k, v = (x.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for x in (keys, values))
    if queries.is_cuda:
        # Copied on CUDA: torch's memory-efficient kernel misreads shared keys of some lengths (pytorch issue 191937).
        k, v = k.contiguous(), v.contiguous()
    if isinstance(mask, Tensor):
        mask = mask.expand(batch, num_kv_heads, *mask.shape[2:]).reshape(batch * num_kv_heads, 1, *mask.shape[2:])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal", scale=1.0)
    return rearrange(out, "(b k) g t h -> b t (k g) h", b=batch)


def _attend_in_blocks(queries: Tensor, keys: Tensor, values: Tensor, mask: BlockMask) -> Tensor:
    # FlexAttention is not compiled on a CPU: slow but exact.
    attention = _flex_attention(queries.device.type)
    q, k, v = (x.to(values.dtype) for x in (queries.transpose(1, 2), keys, values))
    out: Tensor = attention(q, k, v, block_mask=mask, scale=1.0, enable_gqa=True)
    return out.transpose(1, 2)


@cache
def _flex_attention(device_type: str) -> Any:
    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention


class Attention(nn.Module):
    """Projections, per-head norms, rotation, attention. Full layers have no v_proj: V is the normed raw key."""

    def __init__(self, config: ModelConfig, shape: LayerShape) -> None:
        super().__init__()
        self.head_dim, self.eps = shape.head_dim, config.rms_norm_eps
        query_dim = config.num_attention_heads * shape.head_dim
        kv_dim = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_dim, bias=False) if shape.is_sliding else None
        self.o_proj = nn.Linear(query_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, config.rms_norm_eps)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, T, N, H), keys and values (B, K, T, H) of x (B, T, D): normed per head, then rotated."""
        heads = (-1, self.head_dim)
        raw_queries = self.q_proj(x).unflatten(-1, heads)
        raw_keys = self.k_proj(x).unflatten(-1, heads)
        raw_values = raw_keys if self.v_proj is None else self.v_proj(x).unflatten(-1, heads)
        queries = rotate(self.q_norm(raw_queries), *rope)
        keys = rotate(self.k_norm(raw_keys), *rope)
        values = rms_norm(raw_values, None, self.eps)
        return queries, keys.transpose(1, 2), values.transpose(1, 2)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None, mask: Mask | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output (B, T, D) and new keys and values, from x (B, T, D) and past ones (B, K, S, H)."""
        queries, keys, values = self.project(x, rope)
        seen_keys, seen_values = keys, values
        if past is not None:
            seen_keys, seen_values = torch.cat((past[0], keys), dim=2), torch.cat((past[1], values), dim=2)
        out = attend(queries, seen_keys, seen_values, mask)
        return self.o_proj(out.flatten(2)), keys, values
