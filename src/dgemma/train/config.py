"""The settings of a training run."""

from dataclasses import dataclass
from typing import Literal

from dgemma.checks import check_count, check_probability, check_size, check_types, require_field

_MOST_ROWS = 1 << 20  # of a batch; more would fill the memory before the first step
_MOST_LR = 1e30  # torch cannot convert a much larger number to float32
_MOST_MINUTES = 10**7  # 19 years; in a longer run, one step would be too small a share of the time to measure


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a training run; the defaults are those of the published fine-tuning recipe.

    Give either `steps` or `minutes`. With `minutes` the run measures its pace, plans as many steps as fit, and lowers
    the learning rate accordingly; at most a tenth of the steps warm up. When a run is resumed, the time of its earlier
    calls counts towards `minutes`.

    precision: `"mixed"` computes in bfloat16 and keeps weights, norms and softmax in float32; `"weights"` computes in
    the dtype of the weights. `batch_size` counts rows over all processes. `micro_batch_size` is the number of rows that
    one process runs at once; it changes no result unless the objective's `reduction` is "micro_batch". `ema_decay`
    averages the weights; the average is evaluated and returned.

    Example: `TrainConfig(steps=2000, batch_size=64, lr=3e-4, ema_decay=0.999)`.
    """

    steps: int | None = None
    minutes: float | None = None
    batch_size: int
    micro_batch_size: int | None = None  # None: all rows at once
    lr: float = 1.5e-4
    betas: tuple[float, float] = (0.95, 0.99)
    weight_decay: float = 1e-4
    clip: float = 1.0  # the largest norm of the gradient
    warmup: int = 100  # steps
    final_lr: float = 0.1  # the last learning rate, as a fraction of the peak
    ema_decay: float | None = None
    precision: Literal["mixed", "weights"] = "mixed"
    recompute_activations: bool = False
    seed: int = 0
    log_every: int = 20
    evaluate_every: int | None = None  # None: only after the last step
    checkpoint_every: int = 1000  # steps; sooner if these take more than five minutes
    keep_last: int = 2  # checkpoints
    progress: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.betas, list):
            object.__setattr__(self, "betas", tuple(self.betas))
        check_types(self)
        for name in ("steps", "micro_batch_size", "evaluate_every"):
            if getattr(self, name) is not None:
                check_count(self, name)
        for name in ("batch_size", "log_every", "checkpoint_every", "keep_last"):
            check_count(self, name)
        check_count(self, "warmup", least=0)
        check_size(self, "weight_decay")
        check_size(self, "clip", above=0, fix="Use math.inf to never clip.")
        check_probability(self, "final_lr", fix="It is a fraction of the peak; use 0.1, as published.")
        are_betas = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        in_time = self.minutes is None or 0 < self.minutes <= _MOST_MINUTES
        has_one = (self.steps is None) != (self.minutes is None)
        for name, fits, rule in (
            ("steps", has_one, "be None exactly if minutes is set"),
            ("minutes", in_time, f"be above 0 and at most {_MOST_MINUTES}"),
            ("batch_size", self.batch_size <= _MOST_ROWS, f"be at most {_MOST_ROWS}"),
            ("lr", 0 <= self.lr <= _MOST_LR, f"be from 0 to {_MOST_LR:g}"),
            ("betas", are_betas, "be two numbers in [0, 1)"),
            ("ema_decay", self.ema_decay is None or 0 < self.ema_decay < 1, "be None or in (0, 1)"),
        ):
            require_field(fits, self, name, rule)
