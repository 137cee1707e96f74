"""How a model is trained: one frozen value, validated in one place."""

import math
from dataclasses import dataclass

UNPLANNED = 10**9  # steps of a run that will know later how many fit: see `train_for`


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained; the defaults are the published fine-tuning recipe's.

    precision: `"mixed"` computes in bfloat16 with float32 weights, norms and softmax; `"weights"` computes everything
    in the weights' own dtype. `batch_size` counts rows over all processes; `micro_batch_size` is what one process runs
    at once, and changes no result, unless the objective's `reduction` is "micro_batch". `ema_decay` averages the
    weights; the average is evaluated and handed back.

    Example: `TrainConfig(steps=2000, batch_size=64, lr=3e-4, ema_decay=0.999)`.
    """

    steps: int
    batch_size: int
    micro_batch_size: int | None = None  # None: all rows at once
    lr: float = 1.5e-4
    betas: tuple[float, float] = (0.95, 0.99)
    weight_decay: float = 1e-4
    clip: float = 1.0  # the gradient's largest norm
    warmup: int = 100
    final_lr: float = 0.1  # where the cosine ends, of the peak
    ema_decay: float | None = None
    precision: str = "mixed"
    recompute_activations: bool = False
    compile: bool = False
    seed: int = 0
    log_every: int = 20
    evaluate_every: int | None = None  # None: only after the last step
    checkpoint_every: int = 1000
    keep_last: int = 2
    progress: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        for name in ("steps", "batch_size", "micro_batch_size", "log_every", "evaluate_every", "checkpoint_every"):
            value = getattr(self, name)
            optional = name in ("micro_batch_size", "evaluate_every")
            whole = isinstance(value, int) and value >= 1
            _require(optional if value is None else whole, name, "be a whole number, at least 1", self)
        _require(self.keep_last >= 1, "keep_last", "be at least 1, or nothing could be resumed", self)
        _require(self.warmup >= 0, "warmup", "be at least 0 steps", self)
        _require(0 <= self.lr < math.inf, "lr", "be at least 0", self)
        _require(all(0 <= beta < 1 for beta in self.betas) and len(self.betas) == 2, "betas", "be two in [0, 1)", self)
        _require(self.weight_decay >= 0, "weight_decay", "be at least 0", self)
        _require(self.clip > 0, "clip", "be above 0; math.inf never clips", self)
        _require(0 <= self.final_lr <= 1, "final_lr", "be in [0, 1], a fraction of the peak", self)
        _require(self.ema_decay is None or 0 < self.ema_decay < 1, "ema_decay", "be in (0, 1) or None", self)
        _require(self.precision in ("mixed", "weights"), "precision", "be 'mixed' or 'weights'", self)


def _require(condition: bool, name: str, rule: str, owner: object) -> None:
    if not condition:
        raise ValueError(f"{type(owner).__name__}.{name} must {rule}, got {getattr(owner, name)!r}.")
