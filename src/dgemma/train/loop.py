"""The training loop: a pure function of its configuration and seed, which a resumed run repeats bit for bit.

Each step: rows from the source, noise from the rows' seeds, the objective's terms, one scalar, one update. Nothing in a
step waits for the GPU; what was computed is read, checked and logged every `log_every` steps, and before anything is
saved.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.diffusion.noise import Noise
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.experts import require_experts
from dgemma.progress import progress_bar
from dgemma.train.balance import RouterLoad, summary
from dgemma.train.batch import BatchSource
from dgemma.train.checkpoints import Checkpoints
from dgemma.train.config import UNPLANNED, TrainConfig
from dgemma.train.description import checksum, describe_run, refuse_changes
from dgemma.train.feed import Part, StepInput, feed
from dgemma.train.interrupt import asked_to_stop
from dgemma.train.log import TrainLog
from dgemma.train.lora import adapters_of
from dgemma.train.optimizer import (
    OptimizerFactory,
    WeightAverage,
    adamw,
    learning_rate_factor,
    make_optimizer_state,
    optimizer_state,
)
from dgemma.train.parallel import Parallel
from dgemma.train.records import Measure, StepRecord, Terms, TrainResult, make_lines
from dgemma.values import describe_noise

logger = logging.getLogger("dgemma")

OnStep = Callable[[StepRecord], bool | None]  # True stops the run; `dgemma.run.records.OnStep` is of denoising steps
Evaluate = Callable[[Any, int], Mapping[str, Any] | None]


def train(
    model: DiffusionGemma,
    objective: Measure,
    source: BatchSource,
    config: TrainConfig,
    *,
    out: str | Path,
    parallel: Parallel | None = None,
    on_step: OnStep | None = None,
    evaluate: Evaluate | None = None,
    optimizer: OptimizerFactory | None = None,
    allow_changes: bool = False,
) -> TrainResult:
    """Train `model` in place, from the last checkpoint in the folder `out` if there is one.

    `out` gets `log.jsonl`, checkpoints `step-000100/` and in the end `final/`, which `from_pretrained` reads (of an
    adapted model `final/adapters.safetensors`, for `load_lora`). The process may be killed at any moment: the same call
    goes on from the last checkpoint, and ends where an uninterrupted run would have. Ctrl-C (and SIGTERM) finishes the
    step, writes a checkpoint and returns. A loss or gradient that is not finite stops the run with FloatingPointError,
    the model as it was at the last checkpoint.

    on_step: called after every step; returning True stops the run as Ctrl-C does. evaluate: `(model, step) -> numbers`
    by name, or None, called with the averaged weights if there are any. optimizer: makes one from named parameters,
    AdamW by default; its learning rates are the peaks that warm-up and cosine scale. allow_changes: go on with another
    configuration, objective, source or optimizer than the run began with.

    Example: `train(model, recipes.trl(model.config), source, TrainConfig(steps=2000, batch_size=64), out="run")`.
    """
    run = _Run(model, objective, source, config, Path(out), parallel or Parallel(), optimizer)
    run.start(allow_changes)
    with _ready_to_train(run.model, config), run.load.watching(), asked_to_stop() as asked:
        interrupted = run.loop(on_step, evaluate, asked)
    return run.finish(interrupted)


class _Run:
    """The state of a run between two steps: weights, optimizer, average, and what is still to be read and logged."""

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
        require_experts(model, "train")
        if config.precision == "mixed" and model.dtype != torch.float32:
            raise ValueError(
                f"TrainConfig.precision 'mixed' must train float32 weights, got {model.dtype}. "
                f"Load the model with dtype=torch.float32, or choose precision='weights'."
            )
        # All processes get the main one's weights; until then only its own mean anything.
        frozen = checksum(p for p in model.parameters() if not p.requires_grad) if parallel.is_main else 0
        self.model = parallel.prepare(model, mixed=config.precision == "mixed")
        self.device = model.device
        self.objective, self.source, self.config = objective, source, config
        self.out, self.parallel = out, parallel
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("train model must have weights that require gradients, got none. Unfreeze some.")
        make = optimizer or (
            lambda named: adamw(named, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
        )
        self.optimizer = make(self.parameters)
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.description = describe_run(
            config,
            objective=objective,
            source=source,
            adapters=adapters_of(model),
            optimizer=self.optimizer,
            model=model.config.to_hf(),
            frozen=int(parallel.sum(torch.tensor(frozen))),
        )
        self.average = None if config.ema_decay is None else WeightAverage(self.parameters, config.ema_decay)
        self.checkpoints = Checkpoints(folder=out, keep_last=config.keep_last, parallel=parallel)
        self.log = TrainLog(out / "log.jsonl")
        self.load = RouterLoad(self.model)
        self.allow_changes = False
        self.step = self.first_step = 0
        self.total = None if config.steps >= UNPLANNED else config.steps  # steps, as far as is known
        self.unread: list[StepRecord] = []
        self.tokens, self.seconds, self.clock = 0, 0.0, 0.0
        self.evaluation: Mapping[str, float] = {}

    def start(self, allow_changes: bool) -> None:
        """Go on from the last checkpoint, or write the first: from then on there is always one to go back to."""
        if self.parallel.is_main:
            self.out.mkdir(parents=True, exist_ok=True)
        self.parallel.barrier()
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
        self.restore(last)
        self.step = self.first_step = int(saved["step"])
        if self.parallel.is_main:
            self.log.cut(self.step)
        self.parallel.barrier()

    def loop(self, on_step: OnStep | None, evaluate: Evaluate | None, asked: threading.Event) -> bool:
        """Train to the end; whether it was stopped before."""
        noise = getattr(self.objective, "noise", None)
        if isinstance(noise, Noise):  # the model says which it learns, so that who evaluates samples under it
            self.model.generation = self.model.generation.after_learning(describe_noise(noise))
        config = self.config
        rows = self.parallel.rows(config.batch_size)
        inputs = feed(
            self.source,
            seed=config.seed,
            rows=rows,
            micro_batch_size=config.micro_batch_size or len(rows),
            steps=range(self.step, config.steps),
            device=self.device,
        )
        show = config.progress and self.parallel.is_main
        bar = progress_bar(desc="training", unit="step", total=self.total, show=show)
        bar.update(self.step)
        self._begin_interval()
        with bar:
            for given in inputs:
                record = self.take_step(given)
                stop = bool(on_step is not None and on_step(record)) or asked.is_set()
                stop = self.parallel.agree(stop) and self.step < config.steps
                if stop or self._due(config.log_every):
                    line = self.read()
                    bar.set_postfix(loss=f"{line['loss']:.4f}", evenness=f"{line['evenness']:.2f}")
                if evaluate is not None and self._due(config.evaluate_every):
                    self.evaluate(evaluate)
                if stop or self._due(config.checkpoint_every):
                    self.save()
                bar.update()
                if stop:
                    inputs.close()
                    return True
        return False

    def _due(self, every: int | None) -> bool:
        return self.step == self.config.steps or (every is not None and self.step % every == 0)

    def take_step(self, given: StepInput) -> StepRecord:
        """One update. Waits for nothing on the device."""
        config, objective = self.config, self.objective
        totals = self._totals(given.parts)
        sums, counts, loss = [], [], torch.zeros((), device=self.device)
        for number, part in enumerate(given.parts, start=1):
            terms = self._measure(part)
            share = objective.reduce(terms, totals)
            self.parallel.before_backward(self.model, last=number == len(given.parts))
            share.backward()
            loss = loss + share.detach()
            sums.append({name: value.detach() for name, value in terms.sums.items()})
            counts.append(dict(terms.counts))
        grad_norm = self.parallel.clip_grad_norm(self.parameters.values(), config.clip)
        factor = learning_rate_factor(self.step, steps=config.steps, warmup=config.warmup, floor=config.final_lr)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.step)
        self.step += 1
        record = StepRecord(
            step=self.step,
            lr=self.peaks[0] * factor,
            loss=loss,
            grad_norm=grad_norm,
            sums={name: torch.cat([part[name] for part in sums]) for name in sums[0]},
            counts={name: torch.cat([part[name] for part in counts]) for name in sums[0]},
            parts=given.parts,
            num_tokens=given.num_tokens,
        )
        self.unread.append(record)
        return record

    def _measure(self, part: Part) -> Terms:
        """The objective's terms on a micro-batch."""
        # No cache of rounded weights: one made by a pass without gradients would cut them off in the next.
        mixed = self.config.precision == "mixed"
        with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False) if mixed else nullcontext():
            return self.parallel.forward(self.model, lambda: self.objective(self.model, part.batch, seeds=part.seeds))

    def _totals(self, parts: list[Part]) -> dict[str, Tensor]:
        """What the objective counts, over the whole step; under "process/…" over this process alone."""
        counts = [self.objective.total_counts(part.batch, part.seeds) for part in parts]
        here = {name: torch.stack([count[name] for count in counts]).sum(0) for name in counts[0]}
        # Of several processes, one may have no answers.
        if "decoder" in here and self.parallel.world_size == 1 and not any(part.batch.has_answer for part in parts):
            raise ValueError(
                f"TrainBatch.length must exceed prompt_len in some row of a step, got no answer at all in step "
                f"{self.step}. Check the data."
            )
        everywhere = self.parallel.sum(torch.stack([*here.values(), torch.ones_like(next(iter(here.values())))]))
        return {
            **dict(zip((*here, "processes"), everywhere.unbind(), strict=True)),
            **{f"process/{name}": count for name, count in here.items()},
        }

    def read(self) -> dict[str, Any]:
        """Fetch what the steps since the last reading computed, make sure it is finite, and log it."""
        lines = make_lines(self.unread, self.parallel)
        for record, line in zip(self.unread, lines, strict=True):
            if not all(map(math.isfinite, line.values())):
                self._stop_not_finite(record, line)
        self._account(lines)
        lines[-1]["router"] = summary(self.parallel.sum(self.load.counts()))
        lines[-1]["evenness"] = min((layer["evenness"] for layer in lines[-1]["router"]), default=1.0)
        if self.parallel.is_main:
            self.log.append(lines)
        self._begin_interval()
        return lines[-1]

    def _begin_interval(self) -> None:
        """What is measured from here on belongs to the next line; saving and evaluating belong to none."""
        self.unread = []
        self.load.reset()
        self.clock = time.perf_counter()

    def _account(self, lines: list[dict[str, Any]]) -> None:
        seconds = time.perf_counter() - self.clock
        tokens = sum(record.num_tokens for record in self.unread) * self.parallel.world_size
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        lines[-1] |= {"tokens_per_second": tokens / seconds, "seconds": seconds}

    def _stop_not_finite(self, record: StepRecord, line: Mapping[str, Any]) -> None:
        last = self.checkpoints.latest()
        assert last is not None  # `start` wrote one
        terms = [name for name, x in line.items() if not math.isfinite(x)]
        finite = torch.stack([values.isfinite() for values in record.sums.values()]).all(0)  # (B,)
        seeds = torch.cat([part.seeds for part in record.parts])[~finite].tolist()
        self.restore(last)
        self.unread = []
        rows = f"in the rows with seeds {seeds}" if seeds else "though every row's terms here are finite"
        cause = "" if seeds else _known_cause(self.device)
        raise FloatingPointError(
            f"train met a number that is not finite at step {record.step}: {', '.join(terms)}, {rows}. The model is as "
            f"it was at {last.name}; lower TrainConfig.lr or clip, or look at those rows.{cause}"
        )

    def evaluate(self, evaluate: Evaluate) -> None:
        if self.unread:
            self.read()
        with ExitStack() as stack:
            if self.average is not None:
                stack.enter_context(self.average.swapped_in())
            stack.enter_context(torch.no_grad())
            found = self.parallel.forward(self.model, lambda: evaluate(self.model, self.step)) or {}
        self.evaluation = {name: float(value) for name, value in found.items()}  # tensors, too
        if self.parallel.is_main:
            self.log.append([{"step": self.step, **{f"evaluation/{k}": v for k, v in self.evaluation.items()}}])
        self._begin_interval()

    def state(self) -> dict[str, Tensor]:
        """Everything a resumed run needs, by name. Frozen weights it is given again: beside adapters they are large."""
        frozen = {name for name, p in self.model.named_parameters() if not p.requires_grad}
        state = {f"model.{name}": t for name, t in self.model.state_dict().items() if name not in frozen}
        state |= optimizer_state(self.optimizer, self.parameters)
        return state | (self.average.state if self.average is not None else {})

    def save(self) -> None:
        if self.unread:
            self.read()
        if self.parallel.is_main:
            self.log.sync()
        self.checkpoints.save(self.step, self.state(), {"step": self.step, **self.description})
        self.clock = time.perf_counter()

    def restore(self, path: Path) -> None:
        stored, may_differ = self.checkpoints.names(path), self.allow_changes
        make_optimizer_state(self.optimizer, self.parameters, stored, may_differ=may_differ)
        state = self.state()
        if may_differ and self.average is not None and stored.isdisjoint(self.average.state):  # it begins here
            self.checkpoints.load(path, {name: state[name] for name in state.keys() - self.average.state.keys()})
            self.average = WeightAverage(self.parameters, self.average.decay)
        else:
            self.checkpoints.load(path, state)

    def finish(self, interrupted: bool) -> TrainResult:
        last = self.checkpoints.latest()
        assert last is not None  # `start` wrote one
        if self.average is not None:
            self.average.put_in()
        final = None
        if interrupted and self.parallel.is_main:  # said once, however many processes
            of_all = "" if self.total is None else f" of {self.total}"
            logger.warning("Training stopped after step %d%s; the same call goes on from %s.", self.step, of_all, last)
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
            averaged=self.average is not None,
            tokens_per_second=self.tokens / self.seconds if self.seconds else 0.0,
            evaluation=self.evaluation,
        )


@contextmanager
def _ready_to_train(model: DiffusionGemma, config: TrainConfig) -> Iterator[None]:
    """The model and torch set up for the run, and afterwards as they were."""
    layers = list(model.layers)
    recompute, matmul = model.recompute_activations, torch.get_float32_matmul_precision()
    model.recompute_activations = config.recompute_activations
    if config.precision == "mixed":
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    try:
        with ExitStack() as stack:
            if config.compile:
                # One code object serves all layers: by kind, by mode, with and without gradients.
                stack.enter_context(torch._dynamo.config.patch(recompile_limit=64))
                for layer in layers:
                    layer.compile(dynamic=False)
            yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None
        model.recompute_activations = recompute
        torch.set_float32_matmul_precision(matmul)


def _known_cause(device: torch.device) -> str:
    """What else may be at fault where only the gradient is not finite."""
    if device.type != "cuda" or (torch.backends.cudnn.version() or 0) >= 92600:
        return ""
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return ""
    return (
        " Or try torch.backends.cuda.enable_cudnn_sdp(False): before cuDNN 9.26 the gradient of its attention under a "
        "mask may not be finite (github.com/pytorch/pytorch/issues/196678)."
    )
