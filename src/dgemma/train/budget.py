"""Training for a number of minutes: a schedule of steps that ends when the time does."""

import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dgemma.model.diffusion import DiffusionGemma
from dgemma.train.batch import BatchSource
from dgemma.train.checkpoints import Checkpoints
from dgemma.train.config import UNPLANNED, TrainConfig
from dgemma.train.interrupt import asked_to_stop
from dgemma.train.log import TrainLog
from dgemma.train.loop import Evaluate, OnStep, train
from dgemma.train.optimizer import OptimizerFactory
from dgemma.train.parallel import Parallel
from dgemma.train.records import Measure, StepRecord, TrainResult

logger = logging.getLogger("dgemma")

_MOST_MINUTES = 10**7  # 19 years: of many more, a step is no share that could be measured
_SHORT = 5  # minutes: below, compiling takes more than it gives
_NUM_PACED = 10  # steps that make a pace; the earlier half compiles and warms up, and does not count
_WARMUP_PART = 10  # at most one step in so many
_LOOKS = (0.1, 0.3, 0.6, 0.85, 1.0)  # shares of the time
_PLANNED = 0.97  # the share that steps are planned for: every look writes a checkpoint, and so does the end
_EARLY = 0.9  # a run whose steps are over before has become faster, and has time for more


def train_for(
    model: DiffusionGemma,
    objective: Measure,
    source: BatchSource,
    config: TrainConfig,
    *,
    minutes: float | None,
    out: str | Path,
    on_step: OnStep | None = None,
    evaluate: Evaluate | None = None,
    optimizer: OptimizerFactory | None = None,
    allow_changes: bool = False,
) -> TrainResult:
    """`train` on one process, for `minutes` instead of `config.steps` steps; None: for those.

    How many steps fit is not known before, and on a shared GPU their pace changes. So the run looks at the clock a few
    times, at first as soon as it has a pace, and goes on with as many steps as fit into what is left: the learning rate
    comes down when the time ends. At most a tenth of the steps warm up. Where the steps were too many, the run takes
    one last step at its end. Given the same call again, a run that was killed or stopped goes on; its earlier minutes
    count (they are in `time.json` beside the log). With allow_changes and more minutes, a finished one does too.

    Example: `train_for(model, objective, source, TrainConfig(steps=1, batch_size=64), minutes=7, out="run")`.
    """
    run = partial(train, model, objective, source, out=out, evaluate=evaluate, optimizer=optimizer)
    if minutes is None:
        return run(config=config, on_step=on_step, allow_changes=allow_changes)
    if not 0 < minutes <= _MOST_MINUTES:
        raise ValueError(
            f"train_for minutes must be above 0 and at most {_MOST_MINUTES}, got {minutes}. Use None for config.steps."
        )
    if config.compile and minutes < _SHORT:
        logger.warning(
            "Of %g minutes, compiling takes one or two, without learning. Leave compile out of so short a run.",
            minutes,
        )
    times = _Times(Path(out) / "time.json")
    step, plan, spent = _read(Path(out), times)
    planned = plan["steps"]
    if allow_changes and step >= planned:  # of a finished run no steps are left
        planned = UNPLANNED  # until there is a pace, the learning rate stays at the peak after its warm-up
    now = _plan(config, planned)
    if plan.get("warmup") == config.warmup:  # then it was not cut: also by earlier versions, and by `train`
        now = replace(now, warmup=config.warmup)
    watch = _Watch(seconds=60 * minutes, spent=spent, on_step=on_step, times=times, every=config.checkpoint_every)
    if planned == UNPLANNED:
        logger.info("Training for %g minutes; how many steps that makes is known after the first tenth.", minutes)
    with asked_to_stop() as asked:
        while True:
            with watch.unheard(asked):
                result = run(config=now, on_step=watch, allow_changes=allow_changes)
            watch.note(result.step)
            if asked.is_set() or not (watch.has_stopped if result.interrupted else watch.is_early):
                return replace(result, num_new_steps=result.step - step)
            now, allow_changes = _plan(config, result.step + watch.steps_left()), True
            logger.info("Step %d of %d planned, %.0f%% of the time is over.", result.step, now.steps, 100 * watch.share)
            watch.start()


def _plan(config: TrainConfig, steps: int) -> TrainConfig:
    """So many steps, of which at most a tenth warm up: a short run would do nothing else."""
    return replace(config, steps=steps, warmup=min(config.warmup, steps // _WARMUP_PART))


class _Times:
    """`time.json`: the seconds a run had taken at its checkpoints. Those in the log leave out evaluating and saving."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at: dict[int, float] = {}

    def read(self, last_step: int) -> None:
        """What was noted up to `last_step`; nothing by runs of earlier versions."""
        try:
            noted = json.loads(self.path.read_text())
            self.at = {int(step): float(seconds) for step, seconds in noted.items() if int(step) <= last_step}
        except (OSError, ValueError, AttributeError):
            self.at = {}

    def note(self, step: int, seconds: float) -> None:
        self.at[step] = seconds
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.at) + "\n")
        os.replace(new, self.path)


def _read(out: Path, times: _Times) -> tuple[int, dict[str, Any], float]:
    """The step of the last checkpoint of a run begun earlier, its configuration, and the seconds up to it."""
    checkpoints = Checkpoints(folder=out, keep_last=1, parallel=Parallel())
    last = checkpoints.latest()
    if last is None:
        times.path.unlink(missing_ok=True)
        return 0, {"steps": UNPLANNED}, 0.0
    run = checkpoints.read_run(last)
    times.read(run["step"])
    noted = max(times.at, default=0)
    taken = [
        (step, seconds)
        for step, seconds in zip(*TrainLog(out / "log.jsonl").column("seconds"), strict=True)
        if step <= run["step"]
    ]
    since = sum(seconds for step, seconds in taken if step > noted)
    spent = max(times.at.get(noted, 0.0) + since, sum(seconds for _, seconds in taken))
    return run["step"], run["config"], spent


class _Watch:
    """Given to `train` as `on_step`: stops the run when it is time to plan again, and says how many steps are left."""

    def __init__(
        self, *, seconds: float, spent: float, on_step: OnStep | None, times: _Times, every: int | None
    ) -> None:
        self.seconds, self.on_step = seconds, on_step
        self.times, self.every = times, every
        self.began = time.perf_counter() - spent
        self.start()
        self.look = 0.0

    def start(self) -> None:
        self.shares = [self.share]  # of the time: now, and after each step since
        self.look = next((look for look in _LOOKS if look > self.shares[0]), math.inf)
        self.has_stopped = False

    @property
    def share(self) -> float:
        """How much of the time is over."""
        return (time.perf_counter() - self.began) / self.seconds

    @property
    def is_early(self) -> bool:
        return len(self.shares) > 1 and self.shares[-1] < _EARLY

    def __call__(self, record: StepRecord) -> bool:
        if self.on_step is not None and self.on_step(record):
            return True
        self.shares.append(self.share)
        if self.every is not None and record.step % self.every == 0:  # a checkpoint follows
            self.note(record.step)
        has_pace = len(self.shares) > _NUM_PACED
        self.has_stopped = self.look < math.inf and self.shares[-1] >= (self.look if has_pace else 1.0)
        return self.has_stopped

    def note(self, step: int) -> None:
        """Write down the time, for the run to go on from; a call that took no step takes no time."""
        if len(self.shares) > 1:
            self.times.note(step, time.perf_counter() - self.began)

    def steps_left(self) -> int:
        """How many fit, at the pace of the later half of those just taken; at least one, with which a run ends."""
        if self.share >= _PLANNED:
            return 1
        paced = self.shares[(len(self.shares) - 1) // 2 :]
        pace = (paced[-1] - paced[0]) / (len(paced) - 1)
        return max(1, int((_PLANNED - self.share) / pace))

    @contextmanager
    def unheard(self, asked: threading.Event) -> Iterator[None]:
        """What `train` says of a run that stopped for a look, and for nothing else, is not so."""

        def is_heard(record: logging.LogRecord) -> bool:
            return not self.has_stopped or asked.is_set()

        logger.addFilter(is_heard)
        try:
            yield
        finally:
            logger.removeFilter(is_heard)
