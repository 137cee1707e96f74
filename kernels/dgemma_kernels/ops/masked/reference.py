"""Attention under any boolean mask, in plain PyTorch."""

from torch import Tensor

from dgemma.doors import plain
from dgemma.model import attention


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return the library's attention. A query that sees no key gets NaN here, and zeros from the kernel."""
    out: Tensor = plain(attention.attend)(queries, keys, values, mask)
    return out
