"""The move of a sliding layer's newest tokens in plain PyTorch, the reference for `kernel`."""

from torch import Tensor


def forget(keys: Tensor, values: Tensor, lengths: Tensor, keep: int) -> None:
    """Move each row's last `keep` of lengths[b] tokens to its front, in place. (layers, B, K, capacity, H), (B,)."""
    for row, count in enumerate(lengths.tolist()):
        for tensor in (keys, values):
            if count > keep:
                tensor[:, row, :, :keep] = tensor[:, row, :, count - keep : count].clone()
