"""The small parts of a layer: normalisation and the gated MLP."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.doors import replaceable


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype for sums and exponentials of x: float32, or float64 for a float64 model."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@replaceable
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x / RMS(x) · weight over the last dimension, in float32, rounded once. Note: w, not 1 + w."""
    wide = x.to(wide_dtype(x))
    wide = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        wide = wide * weight.to(wide.dtype)
    return wide.to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


@replaceable
def project(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """Return the outputs (..., N) of several linear layers for one input (..., K)."""
    return [layer(x) for layer in layers]


@replaceable
def gated_gelu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


class GatedMLP(nn.Module):
    """down(gelu(gate(x)) · up(x)): the dense MLP next to the experts."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(gated_gelu(*project(x, self.gate_proj, self.up_proj)))
        return out
