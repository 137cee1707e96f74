"""Attention masks: boolean, True where a query sees a key; keys are the prefix's slots, then the new tokens.

Slots of the prefix are left-aligned: row b fills the first `filled[b]` of them. Padding of the prompt has no slot.
"""

import torch
from torch import Tensor

from dgemma.model.cache import LayerCache, PrefixCache


def causal_mask(
    cache: PrefixCache, layer: LayerCache, positions: Tensor, real: Tensor | None, image_index: Tensor | None = None
) -> Tensor:
    """Return the mask under which new tokens see the prefix, earlier real tokens and themselves, within the window.

    positions: (B, T) of the new tokens. real: (B, T), False for padding. image_index: (B, T), each token's image, -1
    for text; a token also sees its whole image. Returns (B, 1, T, S + T), where S slots of the layer are in use.
    """
    filled, num_slots = layer.filled(cache.lengths), layer.num_filled(cache.num_slots)
    slot = torch.arange(num_slots, device=positions.device)[None, :]
    slot_position = cache.lengths[:, None] - filled[:, None] + slot  # (B, S)
    key_position = torch.cat((slot_position, positions), dim=1)  # (B, S + T)
    new = torch.ones_like(positions, dtype=torch.bool) if real is None else real
    key_real = torch.cat((slot < filled[:, None], new), dim=1)
    # Positions are compared, not subtracted: (B, T, S + T) distances of a long prefix would take gigabytes.
    visible = (key_position[:, None, :] <= positions[:, :, None]) & key_real[:, None, :]
    if layer.window is not None:
        visible &= key_position[:, None, :] > (positions - layer.window)[:, :, None]
    # Padding sees itself, because a softmax over nothing is NaN. The result is not used.
    visible[:, :, num_slots:] |= torch.eye(positions.shape[1], dtype=torch.bool, device=positions.device)
    if image_index is not None:
        visible[:, :, num_slots:] |= same_image(image_index)
    return visible[:, None]


def same_image(image_index: Tensor) -> Tensor:
    """Return the pairs of tokens that belong to one image: image_index (B, T), -1 for text → (B, T, T) bool."""
    return (image_index[:, :, None] == image_index[:, None, :]) & (image_index >= 0)[:, :, None]


def canvas_mask(cache: PrefixCache, layer: LayerCache, canvas_len: int) -> Tensor:
    """Return the mask under which a canvas sees the cached prefix and all of itself: (B, 1, 1, S + C)."""
    filled, num_slots = layer.filled(cache.lengths), layer.num_filled(cache.num_slots)
    slot = torch.arange(num_slots + canvas_len, device=filled.device)
    visible = (slot[None, :] < filled[:, None]) | (slot[None, :] >= num_slots)
    return visible[:, None, None, :]
