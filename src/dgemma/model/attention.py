"""Attention of new tokens over the cached prefix and themselves, causal or bidirectional."""

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dgemma.doors import replaceable
from dgemma.model.config import LayerShape, ModelConfig
from dgemma.model.layers import RMSNorm, rms_norm
from dgemma.model.layers import project as project_each
from dgemma.model.rotary import rotate

Mask = Tensor | Literal["causal"]


@replaceable
def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Mask | None) -> Tensor:
    """Return softmax(q·k) v with scale 1: queries (B, T, N, H), keys and values (B, K, S, H) → (B, T, N, H).

    mask: (B, 1, T or 1, S), True where a query sees a key; None means everywhere. "causal" requires T = S: a query
    sees keys up to its own position.
    """
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

    @replaceable
    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, T, N, H), keys and values (B, K, T, H) of x (B, T, D): normed per head, then rotated."""
        queries, keys, *others = (out.unflatten(-1, (-1, self.head_dim)) for out in self.raw_heads(x))
        values = rms_norm(others[0] if others else keys, None, self.eps)
        queries, keys = rotate(self.q_norm(queries), *rope), rotate(self.k_norm(keys), *rope)
        return queries, keys.transpose(1, 2), values.transpose(1, 2)

    def raw_heads(self, x: Tensor) -> list[Tensor]:
        """Return the projections of x (..., D): queries and keys, and values if the layer has `v_proj`."""
        return project_each(x, self.q_proj, self.k_proj, *(() if self.v_proj is None else (self.v_proj,)))

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
