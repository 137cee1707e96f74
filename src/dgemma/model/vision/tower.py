"""The vision tower of Gemma 4: a bidirectional transformer over patches, pooled and projected into embeddings.

The reference is transformers' Gemma4VisionModel. Images are not padded: the patches of all images form one sequence,
and only attention works image by image.
"""

from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor, nn

from dgemma.model.config import VisionConfig
from dgemma.model.layers import GatedMLP, RMSNorm, rms_norm, wide_dtype
from dgemma.model.rotary import rotate
from dgemma.model.vision.images import Images


class PatchEmbedder(nn.Module):
    """A linear map of the pixels of each patch, plus one learned vector for its column and one for its row."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.input_proj = nn.Linear(config.patch_dim, config.hidden_size, bias=False)
        self.position_embedding_table = nn.Parameter(torch.empty(2, config.position_embedding_size, config.hidden_size))

    def forward(self, patches: Tensor, positions: Tensor) -> Tensor:
        """Return embeddings (L, D) of patches (L, patch_dim) uint8 at columns and rows (L, 2)."""
        pixels = 2 * (patches.float() / 255 - 0.5)
        columns, rows = self.position_embedding_table
        placed = columns[positions[:, 0]] + rows[positions[:, 1]]
        return self.input_proj(pixels.to(placed.dtype)) + placed


def rotary_table_2d(config: VisionConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin at columns and rows: positions (L, 2) → two (L, 1, 2, H / 2).

    The first half of a head rotates by the column, the second by the row, each with a full set of frequencies.
    """
    half = config.head_dim // 2
    pair = torch.arange(half // 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * config.rope_theta ** (-2.0 * pair / half)  # (L, 2, H / 4)
    angles = torch.cat((angles, angles), dim=-1)[:, None]
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

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], num_patches: tuple[int, ...]) -> Tensor:
        """Return the output (L, D) of x (L, D), the patches of images of these sizes."""
        q, k, v = (
            rearrange(project(x), "l (n h) -> l n h", h=self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (rotate(heads.unflatten(-1, (2, -1)), *rope).flatten(-2) for heads in (self.q_norm(q), self.k_norm(k)))
        v = rms_norm(v, None, self.eps)
        q, k, v = (rearrange(heads, "l n h -> 1 n l h").split(num_patches, dim=2) for heads in (q, k, v))
        attend = partial(F.scaled_dot_product_attention, scale=1.0)
        out = torch.cat([attend(*image) for image in zip(q, k, v, strict=True)], dim=2)
        return self.o_proj(rearrange(out, "1 n l h -> l (n h)"))


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

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], num_patches: tuple[int, ...]) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rope, num_patches))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class VisionTower(nn.Module):
    """Patches → transformer → mean of each 3 × 3 patches → standardise → norm → embeddings of the text model.

    Example: `model.vision(ImageProcessor()(["photo.jpg"])).shape` is (256, 2816) for a square photo.
    """

    std_bias: Tensor | None
    std_scale: Tensor | None

    def __init__(self, config: VisionConfig, text_hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.patch_embedder = PatchEmbedder(config)
        self.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_hidden_layers))
        for name in ("std_bias", "std_scale"):
            self.register_buffer(name, torch.empty(config.hidden_size) if config.standardize else None)
        self.embedding_projection = nn.Linear(config.hidden_size, text_hidden_size, bias=False)

    def forward(self, images: Images) -> Tensor:
        """Return the embeddings (T, D) of the images' tokens, one image after the other."""
        images.check(self.config)
        positions = images.positions
        x = self.patch_embedder(images.patches, positions)
        rope = rotary_table_2d(self.config, positions, x.dtype)
        for layer in self.layers:
            x = layer(x, rope, images.num_patches)
        parts = zip(x.split(images.num_patches), images.grids, strict=True)
        return self.project(torch.cat([self._pool(part, columns) for part, (columns, _) in parts]))

    def project(self, pooled: Tensor) -> Tensor:
        """Return embeddings (T, D) of the means of patches (T, hidden_size)."""
        # In float32, because the scaled values can exceed the range of float16.
        wide = pooled.to(wide_dtype(pooled)) * self.config.hidden_size**0.5
        if self.std_bias is not None and self.std_scale is not None:
            wide = (wide - self.std_bias.to(wide.dtype)) * self.std_scale.to(wide.dtype)
        return self.embedding_projection(rms_norm(wide.to(pooled.dtype), None, self.config.rms_norm_eps))

    def _pool(self, patches: Tensor, columns: int) -> Tensor:
        """Return the means (T, D) of squares of an image's patches (L, D)."""
        side = self.config.pooling_kernel_size
        wide = patches.to(wide_dtype(patches))
        return reduce(wide, "(y dy x dx) d -> (y x) d", "mean", dy=side, dx=side, x=columns // side).to(patches.dtype)
