"""The settings of a training run."""

from dataclasses import dataclass
from typing import Annotated, Literal

from dgemma.checks import Count, Probability, ValueRule, above, at_least, at_most, check_types, require_field

_MOST_ROWS = 1 << 20  # of a batch; more would fill the memory before the first step
_MOST_LR = 1e30  # torch cannot convert a much larger number to float32
_MOST_MINUTES = 10**7  # 19 years; in a longer run, one step would be too small a share of the time to measure
_BETAS = ValueRule("be two numbers in [0, 1)", lambda betas: all(0 <= beta < 1 for beta in betas))
SHARE = ValueRule("be in (0, 1)", lambda value: 0 < value < 1)


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

    steps: Count | None = None
    minutes: Annotated[float, above(0), at_most(_MOST_MINUTES)] | None = None
    batch_size: Annotated[int, at_least(1), at_most(_MOST_ROWS)]
    micro_batch_size: Count | None = None  # None: all rows at once
    lr: Annotated[float, at_least(0), at_most(_MOST_LR)] = 1.5e-4
    betas: Annotated[tuple[float, float], _BETAS] = (0.95, 0.99)
    weight_decay: Annotated[float, at_least(0)] = 1e-4
    clip: Annotated[float, above(0)] = 1.0  # the largest norm of the gradient
    warmup: Annotated[int, at_least(0)] = 100  # steps
    final_lr: Probability = 0.1  # the last learning rate, as a fraction of the peak
    ema_decay: Annotated[float, SHARE] | None = None
    precision: Literal["mixed", "weights"] = "mixed"
    recompute_activations: bool = False
    seed: int = 0
    log_every: Count = 20
    evaluate_every: Count | None = None  # None: only after the last step
    checkpoint_every: Count = 1000  # steps; sooner if these take more than five minutes
    keep_last: Count = 2  # checkpoints
    progress: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        has_one = (self.steps is None) != (self.minutes is None)
        require_field(has_one, self, "steps", "be None exactly if minutes is set")
