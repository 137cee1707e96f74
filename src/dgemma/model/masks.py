"""Attention masks: boolean, True where a query sees a key; keys are the prefix's slots, then the new tokens.

Slots of the prefix are left-aligned: row b fills the first `filled[b]` of them. Padding of the prompt has no slot.
"""

import torch
from torch import Tensor


def causal_mask(
    positions: Tensor,
    real: Tensor | None,
    lengths: Tensor,
    filled: Tensor,
    num_slots: int,
    window: int | None,
    blocks: Tensor | None = None,
) -> Tensor:
    """Return the mask under which new tokens see the prefix, earlier real tokens and themselves, within `window`.

    positions: (B, T) of the new tokens. real: (B, T), False for padding. lengths: (B,) of the prefix. filled: (B,)
    cached slots. blocks: (B, T), the image of each token, -1 for text; a token also sees its whole image. Returns
    (B, 1, T, num_slots + T).
    """
    slot = torch.arange(num_slots, device=positions.device)[None, :]
    slot_position = lengths[:, None] - filled[:, None] + slot  # (B, S)
    key_position = torch.cat((slot_position, positions), dim=1)  # (B, S + T)
    new = torch.ones_like(positions, dtype=torch.bool) if real is None else real
    key_real = torch.cat((slot < filled[:, None], new), dim=1)
    # Positions are compared, not subtracted: (B, T, S + T) distances of a long prefix would take gigabytes.
    visible = (key_position[:, None, :] <= positions[:, :, None]) & key_real[:, None, :]
    if window is not None:
        visible &= key_position[:, None, :] > (positions - window)[:, :, None]
    # Padding sees itself, because a softmax over nothing is NaN. The result is not used.
    num_new = positions.shape[1]
    visible[:, :, num_slots:] |= torch.eye(num_new, dtype=torch.bool, device=positions.device)
    if blocks is not None:
        visible[:, :, num_slots:] |= (blocks[:, :, None] == blocks[:, None, :]) & (blocks >= 0)[:, :, None]
    return visible[:, None]


def canvas_mask(filled: Tensor, num_slots: int, canvas_len: int) -> Tensor:
    """Return the mask under which a canvas sees the cached prefix and all of itself: (B, 1, 1, num_slots + C)."""
    slot = torch.arange(num_slots + canvas_len, device=filled.device)
    visible = (slot[None, :] < filled[:, None]) | (slot[None, :] >= num_slots)
    return visible[:, None, None, :]
