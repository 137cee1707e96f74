"""Muon (arXiv:2502.16982): a matrix steps by its momentum made orthogonal, everything else as AdamW has it.

Adam lets the few directions that dominate a matrix's gradient dominate its step; here all of them move alike. The twin
of `torch.optim.Muon`, which knows matrices alone and takes them one by one: here those of one shape go together.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_step

from dgemma.train.optimizer import adamw

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

    Steps are scaled to Adam's size, so one learning rate does for both. Norms and scales do not decay. Matrices
    must be whole: not for FSDP.

    Example: `train(model, objective, source, config, out="run", optimizer=lambda named: muon(named, lr=1e-3))`.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"muon momentum must lie in [0, 1), got {momentum}. Usual is 0.95.")
    matrices = {parameter: _num_matrices(name, parameter) for name, parameter in parameters.items()}
    groups: list[dict[str, Any]] = []
    # It knows what decays, and where its kernel is fused.
    for group in adamw(parameters, lr=lr, betas=betas, weight_decay=weight_decay).param_groups:
        for number in (0, 1, 2):
            chosen = [parameter for parameter in group["params"] if matrices[parameter] == number]
            kept = {name: group[name] for name in ("weight_decay", "fused")}
            groups.append({"params": chosen, "matrices": number, **kept})
    return Muon([group for group in groups if group["params"]], {"lr": lr, "betas": betas, "momentum": momentum})


def _num_matrices(name: str, parameter: Tensor) -> int:
    """How many matrices stand one above the other in a parameter's rows; none in what is left to AdamW."""
    if not name.startswith("layers.") or ".router." in name or parameter.dim() < 2:
        return 0
    return 2 if name.endswith(".gate_up_proj") else 1  # gate and up are two, as they are outside the experts


class Muon(torch.optim.Optimizer):
    """Each group says how many "matrices" its parameters (..., matrices · rows, columns) have; with 0 it is AdamW's."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update."""
        if closure is not None:
            raise ValueError("Muon.step closure must be None, got one. Compute the gradients before.")
        for group in self.param_groups:
            touched = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["matrices"]:
                self._step_matrices(touched, group)
            else:
                self._step_others(touched, group)

    def _step_matrices(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            alike[parameter.shape].append(parameter)
        for same in alike.values():
            grads = _grads(same)
            momenta = [self._state(parameter, "momentum")["momentum"] for parameter in same]
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            ahead = torch.stack(torch._foreach_lerp(grads, momenta, group["momentum"]))  # Nesterov
            ahead = ahead.unflatten(-2, (group["matrices"], -1))  # (n, ..., matrices, rows, columns)
            steps = orthogonal(ahead).to(same[0].dtype).flatten(-3, -2)
            # An orthogonal matrix has entries of size 1/√(its longer side); Adam's steps are about 0.2 of its rate.
            size = 0.2 * max(ahead.shape[-2:]) ** 0.5 * group["lr"]
            torch._foreach_mul_(same, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(same, list(steps), alpha=-size)

    def _step_others(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self._state(parameter, "exp_avg", "exp_avg_sq") for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if "step" not in state:  # as AdamW has it
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
            fused=group["fused"] or None,  # None leaves torch the choice among the others
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
