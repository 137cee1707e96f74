"""The vision tower of Gemma 4: a bidirectional transformer over patches, pooled and projected into soft tokens."""

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor, nn

from dgemma.model.layers import GatedMLP, RMSNorm, rms_norm, wide_dtype
from dgemma.model.rotary import rotate
from dgemma.model.vision.config import VisionConfig
from dgemma.model.vision.images import Images


class PatchEmbedder(nn.Module):
    """A linear map of the pixels of each patch, plus one learned vector for its column and one for its row."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.input_proj = nn.Linear(config.patch_dim, config.hidden_size, bias=False)
        self.position_embedding_table = nn.Parameter(torch.empty(2, config.position_embedding_size, config.hidden_size))

    def forward(self, patches: Tensor, positions: Tensor) -> Tensor:
        """Return embeddings (I, L, D) of patches (I, L, patch_dim) at columns and rows (I, L, 2)."""
        x = self.input_proj((2 * (patches - 0.5)).to(self.input_proj.weight.dtype))  # pixels in [-1, 1]
        columns, rows = self.position_embedding_table
        return x + (columns[positions[..., 0]] + rows[positions[..., 1]])


def rotary_table_2d(config: VisionConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin at columns and rows: positions (I, L, 2) → two (I, L, 1, 2, H / 2).

    The first half of a head rotates by the column, the second by the row, each with a full set of frequencies.
    """
    half = config.head_dim // 2
    pair = torch.arange(half // 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * config.rope_theta ** (-2.0 * pair / half)  # (I, L, 2, H / 4)
    angles = torch.cat((angles, angles), dim=-1)[:, :, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


class VisionAttention(nn.Module):
    """Every patch sees every patch of its image. Queries and keys are normed and rotated, values only normed."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        inner = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Return the output (I, L, D) of x (I, L, D). mask: (I, 1, 1, L), True for patches that are not padding."""
        q, k, v = (
            rearrange(project(x), "i l (n h) -> i l n h", h=self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (
            rotate(norm(heads).unflatten(-1, (2, -1)), *rope).flatten(-2)
            for norm, heads in ((self.q_norm, q), (self.k_norm, k))
        )
        v = rms_norm(v, None, self.eps)
        q, k, v = (rearrange(heads, "i l n h -> i n l h") for heads in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        return self.o_proj(rearrange(out, "i n l h -> i l (n h)"))


class VisionLayer(nn.Module):
    """Attention, then a gated MLP, each with a norm before and after it."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        norm = (config.hidden_size, config.rms_norm_eps)
        self.self_attn = VisionAttention(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(*norm)
        self.post_attention_layernorm = RMSNorm(*norm)
        self.pre_feedforward_layernorm = RMSNorm(*norm)
        self.post_feedforward_layernorm = RMSNorm(*norm)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rope, mask))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class VisionTower(nn.Module):
    """Patches → transformer → mean of each 3 × 3 patches → scale and standardise.

    Example: `tower(ImageProcessor()(["photo.jpg"]))[0].shape` is (256, 1152) for a square photo.
    """

    std_bias: Tensor | None
    std_scale: Tensor | None

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedder = PatchEmbedder(config)
        self.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_hidden_layers))
        for name, value in (("std_bias", torch.zeros), ("std_scale", torch.ones)):
            self.register_buffer(name, value(config.hidden_size) if config.standardize else None)

    def forward(self, images: Images) -> list[Tensor]:
        """Return the soft tokens (num_tokens, D) of each image."""
        positions = images.positions
        mask = (positions[..., 0] >= 0)[:, None, None]  # (I, 1, 1, L)
        positions = positions.clamp(min=0)
        x = self.patch_embedder(images.patches, positions)
        rope = rotary_table_2d(self.config, positions, x.dtype)
        for layer in self.layers:
            x = layer(x, rope, mask)
        return [self._pool(patches, *grid) for patches, grid in zip(x, images.grids, strict=True)]

    def _pool(self, patches: Tensor, columns: int, rows: int) -> Tensor:
        """Return the tokens (num_tokens, D) of one image from its patches (L, D), which padding follows."""
        k = self.config.pooling_kernel_size
        real = patches[: columns * rows].to(wide_dtype(patches))
        pooled = reduce(real, "(y dy x dx) d -> (y x) d", "mean", dy=k, dx=k, x=columns // k).to(patches.dtype)
        # In float32, because the scaled values can exceed the range of float16.
        wide = pooled.to(wide_dtype(patches)) * self.config.hidden_size**0.5
        if self.std_bias is not None and self.std_scale is not None:
            wide = (wide - self.std_bias.to(wide.dtype)) * self.std_scale.to(wide.dtype)
        return wide.to(patches.dtype)


class VisionProjection(nn.Module):
    """A norm without a weight, then a linear map to the width of the text model."""

    def __init__(self, config: VisionConfig, hidden_size: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.embedding_projection = nn.Linear(config.hidden_size, hidden_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return embeddings (T, D) of the text model for soft tokens (T, D of the tower)."""
        return self.embedding_projection(rms_norm(tokens, None, self.eps))
