"""The training loop: a pure function of its configuration and seed, unless `minutes` limits it. It resumes bit for bit.

Each step takes rows from the source, draws noise from their seeds, measures the objective's terms, reduces them to a
scalar and updates the weights. No step waits for the GPU. The numbers are read, checked and logged every `log_every`
steps or ten seconds, and before anything is saved. A checkpoint is written every `checkpoint_every` steps, and after
five minutes without one. This wait is longer if writing would take more than 5 % of the time. Ctrl-C, SIGTERM and the
limit `minutes` stop a run between two steps.
"""

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch

from dgemma.checkpoint.identity import fingerprint
from dgemma.checks import require, typed
from dgemma.diffusion.noise import Noise
from dgemma.files import flush
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.released import require_experts
from dgemma.printing import progress_bar
from dgemma.quantization.weights import frozen_tensors
from dgemma.sampling.named import describe_noise
from dgemma.train.batch import BatchSource, feed
from dgemma.train.checkpoints import Checkpoints, describe_config, describe_optimizer, lock_folder, refuse_changes
from dgemma.train.config import TrainConfig
from dgemma.train.log import OnTrainStep, RouterLoad, TrainLog, TrainResult, TrainStep, make_lines, peak_gb, summary
from dgemma.train.lora import adapters_of
from dgemma.train.objective import Measure
from dgemma.train.optimizer import OptimizerFactory, other_weights, set_weights
from dgemma.train.parallel import Parallel
from dgemma.train.stopping import TimeBudget, stop_request
from dgemma.train.trackers import TRACKERS, tracking
from dgemma.train.update import Updater, check_weights, ready_to_train
from dgemma.values import identify

logger = logging.getLogger("dgemma")

_WARMUP_PART = 10  # in a run limited by minutes, at most one step in ten warms up
_LONGEST_UNREAD = 10  # seconds; then steps are read and logged, even if they are fewer than `log_every`
_LONGEST_UNSAVED = 300  # seconds; then a checkpoint is written, even after fewer than `checkpoint_every` steps
_SAVING_PART = 20  # such checkpoints take at most 1/20 of the time

Evaluate = Callable[[Any, int], Mapping[str, Any] | None]


@typed
def train(
    model: DiffusionGemma,
    objective: Measure,
    source: BatchSource,
    config: TrainConfig,
    *,
    out: str | Path,
    parallel: Parallel | None = None,
    on_step: OnTrainStep | None = None,
    evaluate: Evaluate | None = None,
    optimizer: OptimizerFactory | None = None,
    allow_changes: bool = False,
    trackers: str | Sequence[str] = (),
) -> TrainResult:
    """Train `model` in place, from the last checkpoint in the folder `out` if there is one.

    `out` gets `log.jsonl`, checkpoints `step-000100/` and at the end `final/`, which `from_pretrained` reads. An
    adapted model gets the folder `final/adapters`, which `load_lora` reads. The process may be killed at any moment:
    the same call continues from the last checkpoint and gives the same result as an uninterrupted run with the same
    number of steps. Checkpoints are about five minutes apart at most, unless writing one takes over 15 seconds. On
    Ctrl-C or SIGTERM `train` finishes the step, writes a checkpoint and returns. A loss or gradient that is not finite
    raises FloatingPointError and restores the model from the last checkpoint.

    - on_step: called after every step; returning True stops the run as Ctrl-C does. A dictionary of numbers and texts
      is added to the log.
    - evaluate: a function of (model, step) that returns a dictionary of numbers, or None. If weights are averaged, the
      model has the average.
    - optimizer: makes an optimizer from named parameters, by default AdamW. Its learning rates are peak values; warm-up
      and the cosine schedule multiply them by a factor up to 1.
    - allow_changes: continue with another configuration, objective, source or optimizer than the run began with. A
      finished run with `config.minutes` can be continued with more minutes this way.
    - trackers: "tensorboard", "wandb" or "trackio", or several of them, which get every line of the log.

    Example: `train(model, recipes.trl(model.config), source, TrainConfig(steps=2000, batch_size=64), out="run")`.
    """
    require_experts(model, "train")
    for name, value in (("objective", objective), ("source", source)):
        require(not isinstance(value, type), f"train {name}", "be an instance, not a class", value)
    names = [trackers] if isinstance(trackers, str) else trackers
    require({*names} <= TRACKERS.keys(), "train trackers", f"be among {', '.join(TRACKERS)}", names)
    run = _Run(model, objective, source, config, Path(out), parallel or Parallel(), optimizer)
    with lock_folder(run.out) if run.parallel.is_main else nullcontext():
        run.start(allow_changes)
        with tracking(names if run.parallel.is_main else (), run.out, run.step, run.description) as run.track:
            with ready_to_train(run.model, config), run.load.watching(), stop_request() as request:
                interrupted = run.loop(on_step, evaluate, request)
            return run.finish(interrupted)


class _Run:
    """The state of a run between two steps: its updater, its files, its time, and the steps not yet read and logged."""

    def __init__(
        self,
        model: DiffusionGemma,
        objective: Measure,
        source: BatchSource,
        config: TrainConfig,
        out: Path,
        parallel: Parallel,
        optimizer: OptimizerFactory | None,
    ) -> None:
        check_weights(model, config)
        # Before `Updater` prepares the model, only the main process is sure to have the weights.
        frozen = {"weights": fingerprint(frozen_tensors(model))} if parallel.is_main else {}
        self.updater = Updater(model, objective, config, parallel, optimizer)
        self.model, self.device = self.updater.model, self.updater.device
        self.objective, self.source, self.config = objective, source, config
        self.out, self.parallel = out, parallel
        self.description = {  # saved with every checkpoint
            "config": describe_config(config),
            "objective": identify(objective),
            "source": identify(source),
            "adapters": identify(adapters_of(model)),
            "optimizer": describe_optimizer(self.updater.optimizer),
            "model": model.config.to_hf(),
            "frozen weights": parallel.collect(frozen)["weights"],
        }
        self.checkpoints = Checkpoints(folder=out, keep_last=config.keep_last, parallel=parallel)
        self.log = TrainLog(out / "log.jsonl")
        self.track: Callable[[Mapping[str, Any]], None] = lambda line: None
        self.load = RouterLoad(self.model)
        self.allow_changes = False
        self.step = self.first_step = 0
        self.steps = config.steps  # of the whole run; None until it is planned
        self.budget = None if config.minutes is None else TimeBudget(config.minutes, 0.0)
        self.unread: list[TrainStep] = []
        self.notes: dict[int, Mapping[str, Any]] = {}  # of steps that are not yet read
        self.tokens, self.seconds, self.clock = 0, 0.0, 0.0
        self.saved_at, self.save_pause = time.perf_counter(), float(_LONGEST_UNSAVED)
        self.evaluation: Mapping[str, float] = {}

    def start(self, allow_changes: bool) -> None:
        """Continue from the last checkpoint, or write the first one, so that there always is one to restore."""
        self.parallel.barrier()  # the main process has made the folder
        self.checkpoints.clear_unfinished()
        last = self.checkpoints.latest()
        if last is None:
            if self.parallel.is_main:
                self.log.path.unlink(missing_ok=True)
            self.save()
            return
        saved, self.allow_changes = self.checkpoints.read_run(last), allow_changes
        if not allow_changes:
            refuse_changes(self.description, saved, self.out)
        self.updater.restore(self.checkpoints, last, may_differ=self.allow_changes)
        self.step = self.first_step = saved["step"]
        if self.config.minutes is not None:
            self.budget = TimeBudget(self.config.minutes, saved.get("seconds", 0.0))
            self.steps = saved.get("planned steps")
            if allow_changes and self.step == self.steps:  # finished, and continued with more minutes
                self.steps = None
        if self.parallel.is_main:
            self.log.cut(self.step)
        self.parallel.barrier()

    def loop(self, on_step: OnTrainStep | None, evaluate: Evaluate | None, request: threading.Event) -> bool:
        """Train to the end; return True if the run was stopped before."""
        noise = getattr(self.objective, "noise", None)
        if isinstance(noise, Noise):  # becomes the default of `generate`, which callbacks may call
            self.model.generation = self.model.generation.after_learning(describe_noise(noise))
        if self.steps is not None and self.step >= self.steps:
            return False
        config = self.config
        rows = self.parallel.rows(config.batch_size)
        inputs = feed(
            self.source,
            seed=config.seed,
            rows=rows,
            micro_batch_size=config.micro_batch_size or len(rows),
            steps=range(self.step, config.steps or sys.maxsize),
            vocab_size=self.model.config.vocab_size,
            device=self.device,
        )
        if self.steps is None and self.parallel.is_main:
            logger.info("Training for %g minutes; the steps are planned after the first tenth.", config.minutes)
        show = config.progress and self.parallel.is_main
        bar = progress_bar(desc="training", unit="step", total=self.steps, show=show)
        bar.update(self.step)
        self._begin_interval()
        with bar, closing(inputs):
            for parts in inputs:
                try:
                    record = self.updater.update(parts, step=self.step, steps=self.steps, warmup=self._warmup())
                except FloatingPointError as error:  # a prediction, perhaps with weights that an earlier step spoilt
                    if self.parallel.world_size > 1:
                        raise  # the other processes are still in this step, so none of them would answer
                    if self.unread:
                        self.read()  # names that step
                    raise FloatingPointError(f"{error} {self._restore()}") from None
                self.step += 1
                self.unread.append(record)
                answer = None if on_step is None else on_step(record)
                if isinstance(answer, Mapping):
                    note = {name: value.item() if hasattr(value, "item") else value for name, value in answer.items()}
                    self.notes[self.step], answer = note, None
                stop = bool(answer) or request.is_set()
                self._plan()
                bar.total = self.steps
                stop = self.parallel.any(stop) and self.step != self.steps
                # Several processes must read together, so their clocks do not count.
                is_late = self.parallel.world_size == 1 and time.perf_counter() - self.clock > _LONGEST_UNREAD
                is_read = stop or self._due(config.log_every) or is_late
                if is_read:
                    bar.set_postfix_str(self.describe(self.read()))
                if evaluate is not None and self._due(config.evaluate_every):
                    self.evaluate(evaluate)
                is_old = time.perf_counter() - self.saved_at > self.save_pause
                # All processes reach `any` at the same step.
                if stop or self._due(config.checkpoint_every) or (is_read and self.parallel.any(is_old)):
                    self.save()
                bar.update()
                if stop or self.step == self.steps:
                    break
        return stop

    def _due(self, every: int | None) -> bool:
        return self.step == self.steps or (every is not None and self.step % every == 0)

    def _plan(self) -> None:
        """With `config.minutes`, estimate again how many steps fit into the time."""
        if self.budget is None:
            return
        share = torch.tensor(self.budget.share if self.parallel.is_main else 0.0, dtype=torch.float64)
        share_of_main = float(self.parallel.sum(share))  # all processes must make the same plan
        steps = self.budget.plan(self.step, self.steps, share_of_main)
        if steps != self.steps and self.parallel.is_main:
            logger.info("Step %d of %d planned steps, %.0f%% of the time.", self.step, steps, 100 * share_of_main)
        self.steps = steps

    def _warmup(self) -> int:
        """Return the number of warm-up steps: at most a tenth of the steps if the run is limited by time."""
        warmup = self.config.warmup
        return warmup if self.budget is None or self.steps is None else min(warmup, self.steps // _WARMUP_PART)

    def read(self) -> dict[str, Any]:
        """Fetch the numbers of the steps since the last reading, check that they are finite, and log them."""
        lines = make_lines(self.unread, self.parallel)
        for record, line in zip(self.unread, lines, strict=True):
            if not all(map(math.isfinite, line.values())):
                self._stop_not_finite(record, line)
            line |= self.notes.pop(record.step, {})
        seconds = time.perf_counter() - self.clock
        tokens = sum(record.num_tokens for record in self.unread) * self.parallel.world_size
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        lines[-1] |= {"tokens_per_second": tokens / seconds, "seconds": seconds}
        lines[-1]["memory_gb"] = peak_gb(self.device)
        lines[-1]["router"] = summary(self.parallel.sum(self.load.counts()))
        lines[-1]["evenness"] = min((layer["evenness"] for layer in lines[-1]["router"]), default=1.0)
        self.append(lines)
        self._begin_interval()
        return lines[-1]

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add lines to the log and send them to the trackers."""
        if self.parallel.is_main:
            self.log.append(lines)
            for line in lines:
                self.track(line)

    def describe(self, line: Mapping[str, Any]) -> str:
        """Return a line of the log in short, for the progress bar: losses, speed, peak memory and time left."""
        terms = [f"{name.removeprefix('loss/')} {line[name]:.3f}" for name in line if name.startswith("loss/")]
        terms += [f"{line['tokens_per_second']:,.0f} tokens/s", f"{line['memory_gb']:.1f} GB"]
        if self.budget is not None:  # otherwise the bar itself knows
            terms.append(f"{max(0.0, self.budget.limit - self.budget.seconds) / 60:.1f} min left")
        return ", ".join(terms)

    def _begin_interval(self) -> None:
        """Start the measurements of the next log line. Saving and evaluating are not measured."""
        self.unread = []
        self.load.reset()
        self.clock = time.perf_counter()

    def _stop_not_finite(self, record: TrainStep, line: Mapping[str, Any]) -> None:
        terms = [name for name, x in line.items() if not math.isfinite(x)]
        finite = torch.stack([values.isfinite() for values in record.sums.values()]).all(0)  # (B,)
        seeds = torch.cat([part.seeds for part in record.parts])[~finite].tolist()
        rows = f"in the rows with seeds {seeds}" if seeds else "although the terms of every row here are finite"
        advice = "Lower TrainConfig.lr or TrainConfig.clip."
        if record.step == 1:
            checked = "those rows" if seeds else "the objective"
            advice = f"No update came before, so the learning rate is not the cause. Check {checked} and the weights."
        elif 0 < len(seeds) < len(finite):
            advice = "Check those rows, because others here are finite. If they are right, lower TrainConfig.lr."
        raise FloatingPointError(
            f"train computed a number that is not finite at step {record.step}: {', '.join(terms)}, {rows}. "
            f"{self._restore()} {advice}"
        )

    def _restore(self) -> str:
        """Give the model the weights of the last checkpoint, and say so."""
        last = self.checkpoints.latest()
        assert last is not None  # `start` wrote a checkpoint
        self.updater.restore(self.checkpoints, last, may_differ=self.allow_changes)
        self.unread = []
        return f"The model is restored from {last.name}."

    def evaluate(self, evaluate: Evaluate) -> None:
        if self.unread:
            self.read()
        average = self.updater.average
        with nullcontext() if average is None else other_weights(average.parameters, average.weights), torch.no_grad():
            numbers = self.parallel.forward(self.model, lambda: evaluate(self.model, self.step)) or {}
        require(isinstance(numbers, Mapping), "train evaluate", "return a dictionary of numbers, or None", numbers)
        self.evaluation = {name: float(value) for name, value in numbers.items()}
        self.append([{"step": self.step, **{f"evaluation/{k}": v for k, v in self.evaluation.items()}}])
        self._begin_interval()

    def save(self) -> None:
        if self.unread:
            self.read()
        began = time.perf_counter()
        if self.parallel.is_main and self.log.path.is_file():
            flush(self.log.path)
        time_plan = {} if self.budget is None else {"seconds": self.budget.seconds, "planned steps": self.steps}
        self.checkpoints.save(self.step, self.updater.state(), {"step": self.step, **time_plan, **self.description})
        self.clock = self.saved_at = time.perf_counter()
        self.save_pause = max(_LONGEST_UNSAVED, _SAVING_PART * (self.saved_at - began))

    def finish(self, interrupted: bool) -> TrainResult:
        last = self.checkpoints.latest()
        assert last is not None  # `start` wrote a checkpoint
        average, final = self.updater.average, None
        if average is not None:
            set_weights(average.parameters, average.weights)
        if interrupted and self.parallel.is_main:
            of_all = "" if self.steps is None else f" of {self.steps}"
            logger.warning(
                "Training stopped after step %d%s. The same call continues from %s.", self.step, of_all, last
            )
        if not interrupted:
            final = self.out / "final"
            self.parallel.save_pretrained(self.model, final)
        return TrainResult(
            step=self.step,
            num_new_steps=self.step - self.first_step,
            interrupted=interrupted,
            checkpoint=last,
            final=final,
            log=self.log,
            tokens_per_second=self.tokens / self.seconds if self.seconds else 0.0,
            evaluation=self.evaluation,
        )
