"""Muon (arXiv:2502.16982): a matrix steps by its momentum made orthogonal, everything else as AdamW has it.

Adam lets the few directions that dominate a matrix's gradient dominate its step; here all of them move alike. The twin
of `torch.optim.Muon`, which knows matrices alone and takes them one by one: here those of one shape go together.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_ROUNDS, _QUINTIC = 5, (3.4445, -4.775, 2.0315)  # five of x ← ax + bx³ + cx⁵ take all of (0.01, 1] to 0.68 … 1.14


def muon(
    parameters: Mapping[str, nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.98),
    momentum: float = 0.95,
    weight_decay: float = 0.0,
) -> "Muon":
    """An optimizer for `train`: Muon over the matrices of the layers, AdamW over embeddings, routers, norms and scales.

    Steps are scaled to Adam's size, so one learning rate does for both. Matrices must be whole: not for FSDP.

    Example: `train(model, objective, source, config, out="run", optimizer=lambda named: muon(named, lr=1e-3))`.
    """

    def is_matrix(name: str) -> bool:
        return name.startswith("layers.") and ".router." not in name and parameters[name].dim() >= 2

    matrices = [parameter for name, parameter in parameters.items() if is_matrix(name)]
    others = [parameter for name, parameter in parameters.items() if not is_matrix(name)]
    groups: list[dict[str, Any]] = [{"params": matrices, "momentum": momentum}, {"params": others}]
    return Muon([group for group in groups if group["params"]], lr=lr, betas=betas, weight_decay=weight_decay)


class Muon(torch.optim.AdamW):
    """AdamW, but for groups with a "momentum": their parameters are matrices (..., rows, columns)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. The matrices' gradients are gone afterwards."""
        if closure is not None:
            raise ValueError("Muon.step closure must be None, got one. Compute the gradients before.")
        for group in self.param_groups:
            if "momentum" in group:
                self._step_matrices(group)
        return super().step()  # of what still has a gradient

    def _step_matrices(self, group: dict[str, Any]) -> None:
        alike: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for matrix in group["params"]:
            if matrix.grad is not None:
                alike[matrix.shape].append((matrix, matrix.grad))
        for shape, pairs in alike.items():
            matrices, grads = map(list, zip(*pairs, strict=True))
            momenta = [self._momentum(matrix) for matrix in matrices]
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            ahead = torch._foreach_lerp(grads, momenta, group["momentum"])  # Nesterov
            steps = orthogonal(torch.stack(ahead)).to(matrices[0].dtype)
            # An orthogonal matrix has entries of size 1/√(its longer side); Adam's steps are about 0.2 of its rate.
            size = 0.2 * max(shape[-2:]) ** 0.5 * group["lr"]
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(matrices, list(steps), alpha=-size)
            for matrix in matrices:
                matrix.grad = None

    def _momentum(self, matrix: Tensor) -> Tensor:
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        momentum: Tensor = state["momentum"]
        return momentum


def orthogonal(matrices: Tensor) -> Tensor:
    """U·Vᵀ of matrices U·S·Vᵀ (..., rows, columns), nearly: but for tiny ones, singular values become 0.68 to 1.14.

    By Newton-Schulz, which is all products: in bfloat16 on a GPU, in float32 elsewhere.

    Example: `orthogonal(torch.randn(4, 8, 16))` has nearly orthonormal rows.
    """
    a, b, c = _QUINTIC
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x.reshape(-1, *x.shape[-2:])  # (n, short, long)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.view(*matrices.shape[:-2], *x.shape[-2:])
    return x.mT if is_tall else x
