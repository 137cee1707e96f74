"""Muon (arXiv:2502.16982): updates matrices by their orthogonalised momentum, and everything else with AdamW.

With Adam, the few directions that dominate the gradient of a matrix also dominate its update. Here all directions
change equally. The reference is `torch.optim.Muon`, which loops over matrices; here matrices of one shape are
batched.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_step

from dgemma.checks import typed
from dgemma.train.optimizer import adamw

_ROUNDS, _QUINTIC = 5, (3.4445, -4.775, 2.0315)  # five rounds of x ← ax + bx³ + cx⁵ map (0.01, 1] to 0.68 … 1.14


@typed
def muon(
    parameters: Mapping[str, nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.98),
    momentum: float = 0.95,
    weight_decay: float = 0.0,
) -> "Muon":
    """Return an optimizer for `train`: Muon for the matrices of the layers, AdamW for everything else.

    AdamW updates embeddings, routers, self-conditioning, norms and scales. Updates of matrices are scaled to Adam's
    size, so both share one learning rate. Norms and scales do not decay. Matrices must be whole, so this does not work
    with `FullySharded`.

    Example: `train(model, objective, source, config, out="run", optimizer=lambda named: muon(named, lr=1e-3))`.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"muon momentum must be in [0, 1), got {momentum}. Use 0.95.")
    matrices = {parameter: _num_matrices(name, parameter) for name, parameter in parameters.items()}
    groups: list[dict[str, Any]] = []
    # AdamW's groups show which parameters decay and whether the kernel is fused.
    for group in adamw(parameters, lr=lr, betas=betas, weight_decay=weight_decay).param_groups:
        for number in (0, 1, 2):
            params = [parameter for parameter in group["params"] if matrices[parameter] == number]
            groups.append(
                {"params": params, "matrices": number, "weight_decay": group["weight_decay"], "fused": group["fused"]}
            )
    return Muon([group for group in groups if group["params"]], {"lr": lr, "betas": betas, "momentum": momentum})


def _num_matrices(name: str, parameter: Tensor) -> int:
    """Return how many matrices are stacked in a parameter's rows; 0 for parameters of AdamW."""
    if not name.startswith("layers.") or ".router." in name or parameter.dim() < 2:
        return 0
    return 2 if name.endswith(".gate_up_proj") else 1  # gate and up


class Muon(torch.optim.Optimizer):
    """Optimizer whose groups have "matrices", the number stacked in each parameter (..., matrices · rows, columns).

    Groups with 0 matrices are updated by AdamW.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one update."""
        if closure is not None:
            raise ValueError("Muon.step closure must be None, got a function. Compute the gradients first.")
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["matrices"]:
                self._step_matrices(parameters, group)
            else:
                self._step_others(parameters, group)

    def _step_matrices(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            by_shape[parameter.shape].append(parameter)
        for same in by_shape.values():
            grads = _grads(same)
            momenta = [self._state(parameter, "momentum")["momentum"] for parameter in same]
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            ahead = torch.stack(torch._foreach_lerp(grads, momenta, group["momentum"]))  # Nesterov
            ahead = ahead.unflatten(-2, (group["matrices"], -1))  # (n, ..., matrices, rows, columns)
            steps = orthogonal(ahead).to(same[0].dtype).flatten(-3, -2)
            # Entries of an orthogonal matrix are about 1/√(longer side); Adam's steps are about 0.2 of its rate.
            size = 0.2 * max(ahead.shape[-2:]) ** 0.5 * group["lr"]
            torch._foreach_mul_(same, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(same, list(steps), alpha=-size)

    def _step_others(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self._state(parameter, "exp_avg", "exp_avg_sq") for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if "step" not in state:  # on the device that AdamW uses
                device = parameter.device if group["fused"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        adamw_step(
            parameters,
            _grads(parameters),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=1e-8,
            weight_decay=group["weight_decay"],
            amsgrad=False,
            maximize=False,
            fused=group["fused"] or None,  # None lets torch choose another implementation
        )

    def _state(self, parameter: Tensor, *names: str) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(parameter)
        return state


def _grads(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def orthogonal(matrices: Tensor) -> Tensor:
    """Return approximately U·Vᵀ of matrices U·S·Vᵀ (..., rows, columns): singular values become 0.68 to 1.14.

    Singular values below 0.01 of the norm stay smaller. Newton-Schulz iteration, in bfloat16 on a GPU and in float32
    elsewhere.

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
