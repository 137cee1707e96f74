"""The parts of a layer of the vision tower between its products, in plain PyTorch."""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dgemma.model.layers import rms_norm
from dgemma.model.rotary import rotate


def norm_patch_heads(
    projected: Tensor, query_norm: Tensor, key_norm: Tensor, cos: Tensor, sin: Tensor, *, num_heads: int, eps: float
) -> Tensor:
    """Norm queries, keys and values per head, and rotate the first two: (L, 3·N·H) → (3, N, L, H), without padding."""
    q, k, v = rearrange(projected, "l (three n h) -> three l n h", three=3, n=num_heads)
    rope = [table[:, None].unflatten(-1, (2, -1)) for table in (cos, sin)]
    normed = (rms_norm(q, query_norm, eps), rms_norm(k, key_norm, eps))
    q, k = (rotate(heads.unflatten(-1, (2, -1)), *rope).flatten(-2) for heads in normed)
    return rearrange(torch.stack((q, k, rms_norm(v, None, eps))), "three l n h -> three n l h")


def attend_patches(heads: Tensor, spans: Tensor, head_dim: int) -> Tensor:
    """Attend from every patch to the patches of its image: (3, N, L, W), (L, 2) → (L, N·H)."""
    patch = torch.arange(heads.shape[2], device=heads.device)
    seen = (patch >= spans[:, :1]) & (patch < spans[:, 1:])
    q, k, v = heads[..., :head_dim]
    out = F.scaled_dot_product_attention(q, k, v, seen, scale=1.0).masked_fill(~seen.any(1)[:, None], 0.0)
    return rearrange(out, "n l h -> l (n h)")


def add_normed(x: Tensor, update: Tensor, norm: Tensor, next_norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y = x + norm(update) * norm, and norm(y) * next_norm. x, update: (L, D), norms: (D,)."""
    out = x + rms_norm(update, norm, eps)
    return out, rms_norm(out, next_norm, eps)
