"""Who sees whom. A mask is boolean, True where a query may look, over the prefix's slots and then the new tokens.

Slots of the prefix are left-aligned: row b fills the first `filled[b]` of them, whatever padding its prompt had.
"""

import torch
from torch import Tensor


def causal_mask(
    positions: Tensor, real: Tensor | None, lengths: Tensor, filled: Tensor, num_slots: int, window: int | None
) -> Tensor:
    """Each new token sees the prefix, the real tokens before it and itself, within `window` positions.

    positions (B, T) of the new tokens, real (B, T) False for padding, lengths (B,) tokens in the prefix, filled (B,) of
    them still cached → (B, 1, T, num_slots + T).
    """
    slot = torch.arange(num_slots, device=positions.device)[None, :]
    slot_position = lengths[:, None] - filled[:, None] + slot  # (B, S)
    key_position = torch.cat((slot_position, positions), dim=1)  # (B, S + T)
    new = torch.ones_like(positions, dtype=torch.bool) if real is None else real
    key_real = torch.cat((slot < filled[:, None], new), dim=1)
    # Compared, not subtracted: (B, T, S + T) distances of a long prefix would take gigabytes.
    seen = (key_position[:, None, :] <= positions[:, :, None]) & key_real[:, None, :]
    if window is not None:
        seen &= key_position[:, None, :] > (positions - window)[:, :, None]
    # Padding sees itself, so that its softmax has something to normalise over; nobody reads the result.
    num_new = positions.shape[1]
    seen[:, :, num_slots:] |= torch.eye(num_new, dtype=torch.bool, device=positions.device)
    return seen[:, None]


def canvas_mask(filled: Tensor, num_slots: int, canvas_len: int) -> Tensor:
    """Every canvas position sees the row's whole cached prefix and the whole canvas: (B, 1, 1, num_slots + C)."""
    slot = torch.arange(num_slots + canvas_len, device=filled.device)
    seen = (slot[None, :] < filled[:, None]) | (slot[None, :] >= num_slots)
    return seen[:, None, None, :]
