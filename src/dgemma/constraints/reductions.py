"""Reductions over values that share an index: log-sum, maximum and logical or."""

import torch
from torch import Tensor

from dgemma.diffusion.reductions import finite, safe_log


def log_sum_by(values: Tensor, index: Tensor, size: int, *, top: Tensor | None = None) -> Tensor:
    """Log-sum of the values (..., n) that share an index (n,): (..., size), -inf where there are none.

    top: the result of `max_by`, if it is known.
    """
    base = finite(max_by(values, index, size) if top is None else top).detach()
    flat, flat_base = values.flatten(0, -2), base.flatten(0, -2)
    total = torch.zeros_like(flat_base).index_add_(1, index, (flat - flat_base[:, index]).exp())
    return base + safe_log(total).view_as(base)


def max_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Maximum of the values (..., n) that share an index (n,): (..., size), -inf where there are none."""
    flat = values.flatten(0, -2)
    top = flat.new_full((len(flat), size), -torch.inf)
    return top.scatter_reduce_(1, index.expand_as(flat), flat, "amax").view(*values.shape[:-1], size)


def any_by(flags: Tensor, index: Tensor, size: int) -> Tensor:
    """Logical or of the flags (..., n) that share an index (n,): (..., size)."""
    return max_by(flags.float(), index, size) > 0


def first_of_each(index: Tensor, size: int) -> Tensor:
    """Return where each value below `size` begins in an ascending index (n,), and n at the end: (size + 1,) int64."""
    return torch.searchsorted(index, torch.arange(size + 1, device=index.device))


def log_flags(flags: Tensor) -> Tensor:
    """Return 0 where a flag is set and -inf elsewhere, in float64."""
    return torch.where(flags, 0.0, -torch.inf).double()
