"""The vision tower over kernels, captured once per number of patches. The reference is `VisionTower`."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dgemma.model.vision.images import Images
from dgemma.model.vision.tower import VisionLayer, VisionTower, rotary_table_2d
from dgemma_kernels.engine.graphs import Captured, GraphMemory, Graphs
from dgemma_kernels.engine.weights import fuse
from dgemma_kernels.ops.mlp.kernel import geglu
from dgemma_kernels.ops.norms.kernel import rms_norm
from dgemma_kernels.ops.vision.kernel import add_normed, attend_patches, norm_patch_heads

# Patches of a captured forward. From 630 on, they are images of 70, 140, 280 and so on tokens.
_SIZES = (36, 72, 144, 288, 630, 1260, 2520, 5040, 7560, 10_080)
_MOST = _SIZES[-1]  # patches of one forward, unless an image has more


class Patches(NamedTuple):
    """The patches of some images, padded to a fixed number, and their places."""

    pixels: Tensor  # (L, patch_dim) uint8
    positions: Tensor  # (L, 2) column and row
    spans: Tensor  # (L, 2) int32, for `attend_patches`
    tokens: Tensor  # (L / 9, 9) the patches of each token


@dataclass(frozen=True, kw_only=True)
class _TowerLayer:
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    query_norm: Tensor
    key_norm: Tensor
    norms: tuple[Tensor, Tensor, Tensor, Tensor]  # before and after attention, before and after the MLP


class FusedTower:
    """Computes what `tower` computes. Its caller holds the turn of `memory`."""

    def __init__(self, tower: VisionTower, memory: GraphMemory) -> None:
        self._tower, self._memory = tower, memory
        self._layers = [_take_layer(layer) for layer in tower.layers]  # type: ignore[arg-type]
        self._graphs = Graphs()

    def __call__(self, images: Images) -> Tensor:
        """Return the embeddings (T, D) of the images' tokens, one image after the other."""
        images.check(self._tower.config)
        return torch.cat([self._embed(images.select(group)) for group in _groups(images.num_patches)])

    def warm_up(self) -> None:
        """Compile and capture the forwards of all sizes."""
        for size in _SIZES:
            self._captured(size)

    def _embed(self, images: Images) -> Tensor:
        patches = _pad(images)
        return self._captured(len(patches.pixels))(patches)[: sum(images.num_tokens)].clone()

    def _captured(self, num_patches: int) -> Captured:
        return self._graphs.remembered(num_patches, partial(self._capture, num_patches))

    def _capture(self, num_patches: int) -> Captured:
        config, zeros = self._tower.config, partial(torch.zeros, device=self._memory.device)
        patches = Patches(  # of no image
            zeros(num_patches, config.patch_dim, dtype=torch.uint8),
            zeros(num_patches, 2, dtype=torch.int64),
            zeros(num_patches, 2, dtype=torch.int32),
            zeros(num_patches // config.pooling_kernel_size**2, config.pooling_kernel_size**2, dtype=torch.int64),
        )
        captured = Captured(self.run, patches, self._memory, lambda run: partial(run, num_layers=1))
        captured.graph.mark_stale()
        return captured

    def run(self, *of_patches: Tensor, num_layers: int | None = None) -> Tensor:
        """Return the embeddings of all tokens (L / 9, D) from `Patches`, with only the first layers if asked.

        Nothing here reads the device.
        """
        patches, tower, config = Patches(*of_patches), self._tower, self._tower.config
        x = tower.patch_embedder(patches.pixels, patches.positions)
        cos, sin = (table.flatten(1) for table in rotary_table_2d(config, patches.positions, x.dtype))
        eps, num_heads = config.rms_norm_eps, config.num_attention_heads
        normed = rms_norm(x, self._layers[0].norms[0], eps)
        following = [layer.norms[0] for layer in self._layers[1:]] + [self._layers[0].norms[0]]  # the last is not used
        for layer, next_norm in list(zip(self._layers, following, strict=True))[:num_layers]:
            _, after_attention, before_mlp, after_mlp = layer.norms
            heads = norm_patch_heads(
                normed @ layer.qkv.T, layer.query_norm, layer.key_norm, cos, sin, num_heads=num_heads, eps=eps
            )
            attended = attend_patches(heads, patches.spans, config.head_dim) @ layer.o.T
            x, normed = add_normed(x, attended, after_attention, before_mlp, eps)
            x, normed = add_normed(x, geglu(normed @ layer.gate_up.T) @ layer.down.T, after_mlp, next_norm, eps)
        return tower.project(x[patches.tokens].float().mean(1).to(x.dtype))


def _take_layer(layer: VisionLayer) -> _TowerLayer:
    attention, mlp = layer.self_attn, layer.mlp
    dtype = attention.o_proj.weight.dtype
    return _TowerLayer(
        qkv=fuse([attention.q_proj, attention.k_proj, attention.v_proj], dtype),
        o=attention.o_proj.weight.detach(),
        gate_up=fuse([mlp.gate_proj, mlp.up_proj], dtype),
        down=mlp.down_proj.weight.detach(),
        query_norm=attention.q_norm.weight.detach(),
        key_norm=attention.k_norm.weight.detach(),
        norms=(
            layer.input_layernorm.weight.detach(),
            layer.post_attention_layernorm.weight.detach(),
            layer.pre_feedforward_layernorm.weight.detach(),
            layer.post_feedforward_layernorm.weight.detach(),
        ),
    )


def _groups(num_patches: tuple[int, ...]) -> list[list[int]]:
    """Divide images into groups of at most _MOST patches, in order."""
    groups: list[list[int]] = [[]]
    for number, size in enumerate(num_patches):
        if groups[-1] and sum(num_patches[n] for n in groups[-1]) + size > _MOST:
            groups.append([])
        groups[-1].append(number)
    return groups


def _pad(images: Images) -> Patches:
    """Return the patches of images and their places, padded to one of a few sizes, on the host."""
    side, total = images.pooling, sum(images.num_patches)
    size = next((size for size in _SIZES if size >= total), total)
    pad = lambda x, length, value=0: torch.nn.functional.pad(x, (0, 0, 0, length - len(x)), value=value)  # noqa: E731
    spans, tokens, start = [], [], 0
    for columns, rows in images.grids:
        numbers = torch.arange(start, start + columns * rows)
        start += columns * rows
        spans.append(torch.tensor([[numbers[0], start]], dtype=torch.int32).expand(len(numbers), 2))
        squares = numbers.view(rows // side, side, columns // side, side).permute(0, 2, 1, 3)
        tokens.append(squares.reshape(-1, side * side))
    return Patches(
        pad(images.patches, size),
        pad(images.positions, size),
        pad(torch.cat(spans), size, total),
        pad(torch.cat(tokens), size // side**2),
    )
