"""The optimizer of a run: AdamW, warm-up and cosine, its state by parameter name, and the average of the weights."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dgemma.checks import require, typed

OptimizerFactory = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]


def learning_rate_factor(step: int, *, steps: int | None, warmup: int, floor: float) -> float:
    """Return the factor of the peak learning rate at `step`: a line up to 1, then half a cosine down to `floor`.

    steps: the length of the whole run; None if it is not known yet, and the rate then stays at its peak.

    Example: `learning_rate_factor(49, steps=1000, warmup=100, floor=0.1)` is 0.5.
    """
    if step < warmup:
        return (step + 1) / warmup
    if steps is None:
        return 1.0
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return floor + (1 - floor) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


@typed
def adamw(
    parameters: Mapping[str, nn.Parameter], *, lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """Return AdamW over named parameters, with a fused kernel on a GPU. Matrices decay; norms and scales do not.

    Example: `adamw(dict(model.named_parameters()), lr=1.5e-4, betas=(0.95, 0.99), weight_decay=1e-4)`.
    """
    named = all(isinstance(parameter, nn.Parameter) for parameter in parameters.values())
    require(bool(parameters) and named, "adamw parameters", "map names to parameters, at least one", parameters)
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        require(0 <= value < math.inf, f"adamw {name}", "be finite and >= 0", value)
    require(all(0 <= beta < 1 for beta in betas), "adamw betas", "be in [0, 1)", betas)
    matrices = [p for p in parameters.values() if p.dim() >= 2]
    scales = [p for p in parameters.values() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": scales, "weight_decay": 0.0}]
    on_gpu = all(p.device.type == "cuda" for p in parameters.values())
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, fused=on_gpu)


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the optimizer's tensors as "optimizer.PARAMETER.KEY". Parameters that were never updated have none."""
    state: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"train optimizer must keep its state in tensors, got {key!r} of type {type(value).__name__}. "
                    "Use an optimizer of torch.optim."
                )
            state[f"optimizer.{name}.{key}"] = value
    return state


def make_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], stored: set[str], *, may_differ: bool
) -> dict[str, Tensor]:
    """Create the optimizer's state with the names that were `stored`, so that it can be loaded.

    Optimizers create their state in the first step. So this takes a step with gradients and learning rates of zero.
    may_differ: the stored state may belong to another optimizer. A weight whose state is incomplete then has none.
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
    return optimizer_state(optimizer, parameters)


class WeightAverage:
    """An exponential moving average of the trained weights, in float32.

    Its decay is min(decay, (1 + step) / (10 + step)), so that the initial weights soon count little.

    Example: `average = WeightAverage(dict(model.named_parameters()), 0.999); average.update(step)`.
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

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Replace the model's weights by the average within the context."""
        weights = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.put_in()
        try:
            yield
        finally:
            self._put(weights)

    def put_in(self) -> None:
        """Replace the model's weights by the average."""
        self._put(self.weights)

    @torch.no_grad()
    def _put(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])
