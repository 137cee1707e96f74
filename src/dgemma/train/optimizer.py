"""The optimizer of a run: AdamW or Muon, its learning rate, its state by parameter name, and averaged weights."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from dgemma.checks import FINITE, ValueRule, at_least, require, typed
from dgemma.doors import replaceable

OptimizerFactory = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
_ROUNDS, _QUINTIC = 5, (3.4445, -4.775, 2.0315)  # five rounds of x ← ax + bx³ + cx⁵ map (0.01, 1] to 0.68 … 1.14


def learning_rate_factor(step: int, *, steps: int | None, warmup: int, floor: float) -> float:
    """Return the factor of the peak learning rate at `step`: a line up to 1, then half a cosine down to `floor`.

    steps: the length of the whole run; None if it is not known yet, and the rate then stays at its peak.
    """
    if step < warmup:
        return (step + 1) / warmup
    if steps is None:
        return 1.0
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return floor + (1 - floor) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


@replaceable
@typed
def adamw(
    parameters: Mapping[str, nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    fused: bool | None = None,
) -> torch.optim.AdamW:
    """Return AdamW over named parameters. Matrices decay; norms and scales do not. fused: as in torch's AdamW."""
    matrices = [p for p in parameters.values() if p.dim() >= 2]
    scales = [p for p in parameters.values() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, fused=fused)


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the optimizer's tensors as "optimizer.PARAMETER.KEY". Parameters that were never updated have none."""
    state: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            fits, fix = isinstance(value, Tensor), "Use an optimizer of torch.optim."
            require(fits, "train optimizer", f"keep its state in tensors, also {key!r}", value, fix)
            state[f"optimizer.{name}.{key}"] = value
    return state


def make_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], stored: set[str], *, may_differ: bool
) -> None:
    """Create the optimizer's state by a step with gradients and rates of zero, so that it can be loaded.

    may_differ: the stored state may be another optimizer's. A parameter has no state unless all of it was stored.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for name, parameter in parameters.items():
        keys = {f"optimizer.{name}.{key}" for key in optimizer.state.get(parameter, {})}
        has_any = any(key.startswith(f"optimizer.{name}.") for key in stored)
        if not has_any or (may_differ and not keys <= stored):
            optimizer.state.pop(parameter, None)


class WeightAverage:
    """An exponential moving average of the trained weights, in float32.

    Its decay is min(decay, (1 + step) / (10 + step)), so that the initial weights soon count little.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.parameters, self.decay = parameters, decay
        self.weights = {name: p.detach().float().clone() for name, p in parameters.items()}

    @property
    def state(self) -> dict[str, Tensor]:
        return {f"ema.{name}": weight for name, weight in self.weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        current = [p if p.dtype == torch.float32 else p.float() for p in self.parameters.values()]
        torch._foreach_lerp_(list(self.weights.values()), current, 1 - decay)


@torch.no_grad()
def set_weights(parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
    """Give each parameter the values of the same name."""
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


@contextmanager
def other_weights(parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Give parameters other values within the context."""
    own = {name: p.detach().clone() for name, p in parameters.items()}
    set_weights(parameters, weights)
    try:
        yield
    finally:
        set_weights(parameters, own)


@typed
def muon(
    parameters: Mapping[str, nn.Parameter],
    *,
    lr: Annotated[float, at_least(0), FINITE],
    betas: tuple[float, float] = (0.9, 0.98),
    momentum: Annotated[float, ValueRule("be in [0, 1)", lambda value: 0 <= value < 1)] = 0.95,
    weight_decay: float = 0.0,
) -> "Muon":
    """Return an optimizer for `train`: Muon for the matrices of the layers, AdamW for everything else.

    AdamW updates embeddings, routers, self-conditioning, norms and scales. Updates of matrices are scaled to Adam's
    size, so both share one learning rate. Norms and scales do not decay. Matrices must be whole, so this does not work
    with `FullySharded`.

    Example: `train(model, objective, source, config, out="run", optimizer=lambda named: muon(named, lr=1e-3))`.
    """
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
    """Muon (arXiv:2502.16982): updates matrices by their orthogonalised momentum, and everything else with AdamW.

    With Adam, the few directions that dominate the gradient of a matrix also dominate its update. Here all directions
    change equally. The reference is `torch.optim.Muon`, which loops over matrices; here matrices of one shape are
    batched.

    Groups have "matrices", the number stacked in each parameter (..., matrices · rows, columns). Groups with 0 matrices
    are updated by AdamW.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one update."""
        require(closure is None, "Muon.step closure", "be None", closure, "Compute the gradients first.")
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"] if group["matrices"] else ():
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for same in by_shape.values():
                self._step_matrices(same, group)
        others = [group for group in self.param_groups if not group["matrices"]]
        if others:
            adamw = torch.optim.AdamW(others)  # made for each step, so that a copy of this optimizer needs no other
            adamw.state = self.state
            adamw.step()

    def _step_matrices(self, same: list[Tensor], group: dict[str, Any]) -> None:
        """Update parameters of one shape."""
        grads = [parameter.grad for parameter in same if parameter.grad is not None]
        for parameter in same:
            self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        momenta = [self.state[parameter]["momentum"] for parameter in same]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        ahead = torch.stack(torch._foreach_lerp(grads, momenta, group["momentum"]))  # Nesterov
        ahead = ahead.unflatten(-2, (group["matrices"], -1))  # (n, ..., matrices, rows, columns)
        steps = orthogonal(ahead).to(same[0].dtype).flatten(-3, -2)
        # Entries of an orthogonal matrix are about 1/√(longer side); Adam's steps are about 0.2 of its rate.
        size = 0.2 * max(ahead.shape[-2:]) ** 0.5 * group["lr"]
        torch._foreach_mul_(same, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(same, list(steps), alpha=-size)


@replaceable
def orthogonal(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return approximately U·Vᵀ of matrices U·S·Vᵀ (..., rows, columns): singular values become 0.68 to 1.14.

    Singular values below 0.01 of the norm stay smaller. Newton-Schulz iteration in `dtype`.
    """
    a, b, c = _QUINTIC
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x.reshape(-1, *x.shape[-2:])  # (n, short, long)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    x = x.to(dtype)
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.view(*matrices.shape[:-2], *x.shape[-2:])
    return x.mT if is_tall else x
