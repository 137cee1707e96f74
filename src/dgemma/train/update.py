"""One update in training: gradients of the objective, the optimizer's step, and the average of the weights.

An update does not wait for the device, except once to see that all weights learn. Its arguments, not clocks or files,
decide its result.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgemma.checks import Words, require
from dgemma.doors import replaceable
from dgemma.model.diffusion import DiffusionGemma
from dgemma.quantization.weights import frozen_tensors, quantized_weights
from dgemma.train.batch import MicroBatch
from dgemma.train.checkpoints import Checkpoints
from dgemma.train.config import TrainConfig
from dgemma.train.log import TrainStep
from dgemma.train.lora import is_adapted
from dgemma.train.objective import Measure, Stateful
from dgemma.train.optimizer import (
    OptimizerFactory,
    WeightAverage,
    adamw,
    learning_rate_factor,
    make_optimizer_state,
    optimizer_state,
)
from dgemma.train.parallel import Parallel

_logger = getLogger("dgemma")

_WATCHED = 8  # updates; in a small batch, self-conditioning is off in some of them


class Measured(NamedTuple):
    """The results of a forward and a backward pass: the loss, and the terms' sums and counts per row (B,)."""

    loss: Tensor
    sums: Mapping[str, Tensor]
    counts: Mapping[str, Tensor]


class Updater:
    """A model in training, with its objective, its optimizer and, with `ema_decay`, the average of its weights."""

    def __init__(
        self,
        model: DiffusionGemma,
        objective: Measure,
        config: TrainConfig,
        parallel: Parallel,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        self.model = parallel.prepare(model, mixed=config.precision == "mixed")
        self.device = model.device
        self.dtype = torch.bfloat16 if config.precision == "mixed" else model.dtype  # of products
        self.objective, self.config, self.parallel = objective, config, parallel
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        require(bool(self.parameters), "train model", "have weights that require gradients", None, "Unfreeze some.")
        if optimizer is None:
            self.optimizer: torch.optim.Optimizer = adamw(
                self.parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
            )
        else:
            self.optimizer = optimizer(self.parameters)
            _check_optimizer(self.optimizer, self.parameters)
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.average = None if config.ema_decay is None else WeightAverage(self.parameters, config.ema_decay)
        self.learning: dict[str, Tensor | bool] = {}  # by weight, whether a gradient has reached it
        if isinstance(objective, Stateful):
            objective.begin(0, self.parameters)

    def update(self, parts: list[MicroBatch], *, step: int, steps: int | None, warmup: int) -> TrainStep:
        """Update the weights, which had `step` updates before, without waiting for the device.

        The learning rate rises for `warmup` updates, and falls until update `steps`, if that is known.
        """
        if isinstance(self.objective, Stateful):
            self.objective.begin(step, self.parameters)
        totals = self._totals(parts, step)
        measured = [self.measure(part, totals) for part in parts]
        grad_norm = self.parallel.clip_grad_norm(self.parameters.values(), self.config.clip)
        if 0 < step <= _WATCHED and self.parallel.world_size == 1:  # in the first update, B = 0 of adapters hides A
            self._watch_gradients(is_last=step == _WATCHED)
        factor = learning_rate_factor(step, steps=steps, warmup=warmup, floor=self.config.final_lr)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(step)
        return TrainStep(
            step=step + 1,
            lr=self.peaks[0] * factor,
            loss=torch.stack([part.loss for part in measured]).sum(),
            grad_norm=grad_norm,
            sums={name: torch.cat([part.sums[name] for part in measured]) for name in measured[0].sums},
            counts={name: torch.cat([part.counts[name] for part in measured]) for name in measured[0].sums},
            parts=parts,
        )

    def _watch_gradients(self, is_last: bool) -> None:
        """Name weights whose gradient is always exactly zero. They would not learn, and the loss does not show it."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.learning[name] = self.learning.get(name, False) | parameter.grad.any()
        if not is_last:  # reading the flags waits for the device
            return
        untrained = [name for name, any_gradient in self.learning.items() if not any_gradient]
        # If no weight had a gradient, the first updates had no loss: runs, for example, that all got the same reward.
        if 0 < len(untrained) < len(self.learning):
            expected = "They will not learn. Routers that choose one expert never have a gradient."
            names = ", ".join(untrained[:3])
            _logger.warning("No gradient reaches %d weights, such as %s. %s", len(untrained), names, expected)

    @replaceable
    def measure(self, part: MicroBatch, totals: Mapping[str, Tensor]) -> Measured:
        """Measure the objective on a micro-batch, and add its gradients to the weights."""
        # No cache of rounded weights: a cache made without gradients would cut the gradients of the next pass.
        autocast = torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        with autocast if self.config.precision == "mixed" else nullcontext():
            terms = self.parallel.forward(self.model, lambda: self.objective(self.model, part.batch, seeds=part.seeds))
        share = self.objective.reduce(terms, totals)
        share.backward()
        sums = {name: value.detach() for name, value in terms.sums.items()}
        return Measured(share.detach(), sums, dict(terms.counts))

    def _totals(self, parts: list[MicroBatch], step: int) -> dict[str, Tensor]:
        """Return the objective's counts over the whole step, and under "process/…" those of this process alone."""
        counts = [self.objective.total_counts(part.batch, part.seeds) for part in parts]
        here = {name: torch.stack([count[name] for count in counts]).sum(0) for name in counts[0]}
        # With several processes, one may get rows without answers, so only a run of one process checks this.
        if "decoder" in here and self.parallel.world_size == 1:
            has_answer = any(length > prompt for part in parts for prompt, length in part.batch.spans or ())
            rule = f"exceed prompt_len in some row of step {step}"
            require(has_answer, "TrainBatch.length", rule, Words("no answer in any row"), "Check the data.")
        everywhere = self.parallel.sum(torch.stack([*here.values(), torch.ones_like(next(iter(here.values())))]))
        return {
            **dict(zip((*here, "processes"), everywhere.unbind(), strict=True)),
            **{f"process/{name}": count for name, count in here.items()},
        }

    def state(self) -> dict[str, Tensor]:
        """Return everything a resumed run needs, by name, except frozen weights: the caller passes those again."""
        frozen = frozen_tensors(self.model)
        state = {f"model.{name}": t for name, t in self.model.state_dict().items() if name not in frozen}
        state |= optimizer_state(self.optimizer, self.parameters)
        if isinstance(self.objective, Stateful):
            state |= self.objective.state()
        return state | (self.average.state if self.average is not None else {})

    def restore(self, checkpoints: Checkpoints, path: Path, *, may_differ: bool) -> None:
        """Load a checkpoint. With `may_differ`, the optimizer or the average may be others than in the checkpoint."""
        stored = checkpoints.names(path)
        make_optimizer_state(self.optimizer, self.parameters, stored, may_differ=may_differ)
        state = self.state()
        if may_differ and self.average is not None and stored.isdisjoint(self.average.state):
            # The earlier run had no average, so the average begins with the loaded weights.
            checkpoints.load(path, {name: state[name] for name in state.keys() - self.average.state.keys()})
            self.average = WeightAverage(self.parameters, self.average.decay)
        else:
            checkpoints.load(path, state)


def check_weights(model: DiffusionGemma, config: TrainConfig) -> None:
    """Raise if the model's weights cannot be trained in this precision."""
    can_learn = is_adapted(model) or not any(quantized_weights(model))
    rule, fix = "have unquantised weights or adapters", "Call add_lora(model) first."
    require(can_learn, "train model", rule, Words("quantised ones, which cannot be trained"), fix)
    fits = config.precision != "mixed" or model.dtype == torch.float32
    fix = "Load the model with dtype=torch.float32, or choose precision='weights'."
    require(fits, "TrainConfig.precision 'mixed'", "train float32 weights", model.dtype, fix)


def _check_optimizer(optimizer: Any, parameters: Mapping[str, Tensor]) -> None:
    """Raise unless the optimizer updates weights of this model, and no others."""
    require(isinstance(optimizer, torch.optim.Optimizer), "train optimizer", "return a torch optimizer", optimizer)
    updated = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    fits, fix = updated and updated <= set(map(id, parameters.values())), "Make it from the named parameters."
    require(bool(fits), "train optimizer", "update only weights of the model, and at least one", optimizer, fix)


@contextmanager
def ready_to_train(model: DiffusionGemma, config: TrainConfig) -> Iterator[None]:
    """Set up the model and torch for the run, and restore both afterwards."""
    recompute, matmul = model.recompute_activations, torch.get_float32_matmul_precision()
    model.recompute_activations = config.recompute_activations
    if config.precision == "mixed":
        torch.set_float32_matmul_precision("high")  # TF32 for the products that autocast leaves in float32
    try:
        yield
    finally:
        model.recompute_activations = recompute
        torch.set_float32_matmul_precision(matmul)
