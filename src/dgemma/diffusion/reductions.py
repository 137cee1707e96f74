"""Logarithms and log-sums with gradients where a value is -inf."""

import torch
from torch import Tensor


def log_sum(values: Tensor) -> Tensor:
    """Log-sum over the last dimension, (..., n) → (...). Unlike torch's, it has a gradient if all values are -inf."""
    base = finite(values.amax(-1)).detach()
    return base + safe_log((values - base[..., None]).exp().sum(-1))


def safe_log(values: Tensor) -> Tensor:
    """The logarithm. At 0 it is -inf, with gradient 0 instead of infinity, so that no NaN flows back."""
    positive = values > 0
    return torch.where(positive, torch.where(positive, values, 1.0).log(), -torch.inf)


def finite(values: Tensor) -> Tensor:
    """Replace -inf, the maximum of an empty set, by 0, so that it can be subtracted."""
    return values.masked_fill(values == -torch.inf, 0.0)
