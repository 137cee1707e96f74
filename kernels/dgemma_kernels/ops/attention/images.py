"""Causal attention in which the tokens of an image see each other, in plain PyTorch, for prompts with images."""

import torch
from torch import Tensor

from dgemma.doors import plain
from dgemma.model.attention import attend


def attention_with_images(
    queries: Tensor, keys: Tensor, values: Tensor, length: Tensor, blocks: Tensor, *, window: int | None = None
) -> Tensor:
    """Attend like `attention` with `causal`; a token also sees its whole image.

    blocks: (B, T) int64, the image of each query token, -1 for text. All other arguments are those of `attention`.

    Example: `attention_with_images(queries, cache.keys, cache.values, cache.length, blocks, window=1024)`.
    """
    num_tokens, slot = queries.shape[1], torch.arange(keys.shape[2], device=keys.device)
    number = slot - length[:, None]  # (B, S): the number of the new token in a slot
    own = torch.arange(num_tokens, device=keys.device)[:, None]
    seen = number[:, None] <= own  # (B, T, S)
    if window is not None:
        seen = seen & (number[:, None] > own - window)
    is_new = (number >= 0) & (number < num_tokens)
    of_slot = torch.where(is_new, blocks.gather(1, number.clamp(0, num_tokens - 1)), -1)
    seen = seen | ((of_slot[:, None] == blocks[:, :, None]) & (blocks >= 0)[:, :, None])
    used = (number < num_tokens)[:, None, :, None]  # slots beyond may be NaN
    keys, values = keys.masked_fill(~used, 0.0), values.masked_fill(~used, 0.0)
    return plain(attend)(queries, keys, values, seen[:, None]).contiguous()
