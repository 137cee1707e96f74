"""One update in training: gradients of the objective, the optimizer's step, and the average of the weights.

An update never waits for the device. Its arguments, not clocks or files, decide its result. On one GPU, compiled passes
with repeated shapes are CUDA graphs: one call per pass, so the GPU does not wait for launches.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dgemma.checks import show
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.experts import Experts
from dgemma.model.fused import fusing
from dgemma.model.quantized import frozen_tensors, quantized_weights
from dgemma.train.batch import MicroBatch, StepInput
from dgemma.train.canvases import sizes_of
from dgemma.train.checkpoints import Checkpoints
from dgemma.train.config import TrainConfig
from dgemma.train.log import TrainStep
from dgemma.train.lora import is_adapted, rounded_once
from dgemma.train.losses import LOSSES
from dgemma.train.objective import Measure, Objective
from dgemma.train.optimizer import (
    OptimizerFactory,
    WeightAverage,
    adamw,
    learning_rate_factor,
    make_optimizer_state,
    optimizer_state,
)
from dgemma.train.parallel import Parallel

_WARMUP_PASSES = 2  # passes before a shape is captured; they compile functions and choose kernels
_MOST_GRAPHS = 8  # graphs; further shapes run as usual
_MOST_SHAPES = 1000  # shapes to count; rows of arbitrary lengths rarely repeat one


class Updater:
    """A model in training, with its objective, its optimizer and, with `ema_decay`, the average of its weights.

    Example: `Updater(model, objective, config, Parallel()).update(step_input, step=0, steps=100, warmup=10).loss`.
    """

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
        if not self.parameters:
            raise ValueError("train model must have weights that require gradients, got none. Unfreeze some.")
        self.optimizer = (optimizer or _adamw(config))(self.parameters)
        _check_optimizer(self.optimizer, self.parameters)
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.replayed = self._replay_passes()
        self.average = None if config.ema_decay is None else WeightAverage(self.parameters, config.ema_decay)

    def _replay_passes(self) -> "Replayed | None":
        """Return `_measure` as CUDA graphs, or None if the run cannot use them."""
        on_one_gpu = self.device.type == "cuda" and self.parallel.world_size == 1
        # A CUDA graph cannot capture a pass that waits for the GPU. A user's own objectives and losses may wait.
        if not (on_one_gpu and self.config.compile and self.config.replay):
            return None
        if not isinstance(self.objective, Objective) or type(self.objective.loss) not in LOSSES:
            return None
        if any(module.waits(self.dtype) for module in self.model.modules() if isinstance(module, Experts)):
            return None
        canvas_len = self.objective.canvas_len
        return Replayed(self._measure, self.parameters.values(), lambda part: sizes_of(part.batch, canvas_len))

    def update(self, step_input: StepInput, *, step: int, steps: int | None, warmup: int) -> TrainStep:
        """Update the weights, which had `step` updates before, without waiting for the device.

        The learning rate rises for `warmup` updates, and falls until update `steps`, if that is known.
        """
        totals = self._totals(step_input.parts, step)
        measured = []
        for number, part in enumerate(step_input.parts, start=1):
            self.parallel.before_backward(self.model, last=number == len(step_input.parts))
            measured.append((self.replayed or self._measure)(part, totals))
        grad_norm = self.parallel.clip_grad_norm(self.parameters.values(), self.config.clip)
        factor = learning_rate_factor(step, steps=steps, warmup=warmup, floor=self.config.final_lr)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.replayed is None or not self.replayed.graphs)
        if self.average is not None:
            self.average.update(step)
        return TrainStep(
            step=step + 1,
            lr=self.peaks[0] * factor,
            loss=torch.stack([part.loss for part in measured]).sum(),
            grad_norm=grad_norm,
            sums={name: torch.cat([part.sums[name] for part in measured]) for name in measured[0].sums},
            counts={name: torch.cat([part.counts[name] for part in measured]) for name in measured[0].sums},
            parts=step_input.parts,
            num_tokens=step_input.num_tokens,
        )

    def _measure(self, part: MicroBatch, totals: Mapping[str, Tensor]) -> "Measured":
        """Measure the objective on a micro-batch, and add its gradients to the weights."""
        # No cache of rounded weights: a cache made without gradients would cut the gradients of the next pass.
        autocast = torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        # If adapters are spread over processes, each process has them whole only during a forward.
        alone = self.parallel.world_size == 1
        with rounded_once(self.model, self.dtype) if alone else nullcontext():
            with autocast if self.config.precision == "mixed" else nullcontext():
                terms = self.parallel.forward(
                    self.model, lambda: self.objective(self.model, part.batch, seeds=part.seeds)
                )
            share = self.objective.reduce(terms, totals)
            share.backward()
        sums = {name: value.detach() for name, value in terms.sums.items()}
        return Measured(share.detach(), sums, dict(terms.counts))

    def _totals(self, parts: list[MicroBatch], step: int) -> dict[str, Tensor]:
        """Return the objective's counts over the whole step, and under "process/…" those of this process alone."""
        counts = [self.objective.total_counts(part.batch, part.seeds) for part in parts]
        here = {name: torch.stack([count[name] for count in counts]).sum(0) for name in counts[0]}
        # With several processes, one may get rows without answers, so only a run of one process checks this.
        if "decoder" in here and self.parallel.world_size == 1 and not any(part.batch.has_answer for part in parts):
            raise ValueError(
                f"TrainBatch.length must exceed prompt_len in some row of a step, got no answer in any row of step "
                f"{step}. Check the data."
            )
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
    if any(quantized_weights(model)) and not is_adapted(model):
        raise ValueError(
            "train model must have unquantised weights or adapters, got quantised ones, which cannot be trained. "
            "Call add_lora(model) first."
        )
    if config.precision == "mixed" and model.dtype != torch.float32:
        raise ValueError(
            f"TrainConfig.precision 'mixed' must train float32 weights, got {model.dtype}. "
            f"Load the model with dtype=torch.float32, or choose precision='weights'."
        )


def _adamw(config: TrainConfig) -> OptimizerFactory:
    return lambda named: adamw(named, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)


def _check_optimizer(optimizer: Any, parameters: Mapping[str, Tensor]) -> None:
    """Raise unless the optimizer updates weights of this model, and no others."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"train optimizer must return a torch optimizer, got {show(optimizer)}.")
    own = set(map(id, parameters.values()))
    updated = [id(weight) for group in optimizer.param_groups for weight in group["params"]]
    if not updated or not own.issuperset(updated):
        raise ValueError(
            "train optimizer must update only weights of the model, and at least one. Make it from the named "
            "parameters that it is called with."
        )


@contextmanager
def ready_to_train(model: DiffusionGemma, config: TrainConfig) -> Iterator[None]:
    """Set up the model and torch for the run, and restore both afterwards."""
    layers = list(model.layers)
    recompute, matmul = model.recompute_activations, torch.get_float32_matmul_precision()
    model.recompute_activations = config.recompute_activations
    if config.precision == "mixed":
        torch.set_float32_matmul_precision("high")  # TF32 for the products that autocast leaves in float32
    try:
        with ExitStack() as stack:
            if config.compile:
                stack.enter_context(fusing(_kernels_for(model.device)))
            # For adapters, small functions compile faster than whole layers. They give more kernels, but a CUDA graph
            # launches all of them at once.
            if config.compile and not is_adapted(model):
                # All layers share one code object, and so one limit on recompilations. The code is compiled for each
                # kind of layer, in causal and in bidirectional mode, with and without gradients.
                stack.enter_context(torch._dynamo.config.patch(recompile_limit=64))
                for layer in layers:
                    layer.compile(dynamic=False)
            yield
    finally:
        for layer in layers:
            _undo_compile(layer)
        model.recompute_activations = recompute
        torch.set_float32_matmul_precision(matmul)


def _undo_compile(layer: nn.Module) -> None:
    """Let a layer run eagerly again."""
    # torch has no public function for this. Compiling `forward` instead would not compile its hooks.
    layer._compiled_call_impl = None


def _kernels_for(device: torch.device) -> ModuleType | None:
    """Return the kernels of norms and of the residual stream on a GPU; None elsewhere."""
    if device.type != "cuda":
        return None
    from dgemma_kernels.ops import residual

    return residual


class Measured(NamedTuple):
    """The results of a forward and a backward pass: the loss, and the terms' sums and counts per row (B,)."""

    loss: Tensor
    sums: Mapping[str, Tensor]
    counts: Mapping[str, Tensor]

    def clone(self) -> "Measured":
        sums, counts = ({name: t.clone() for name, t in terms.items()} for terms in (self.sums, self.counts))
        return Measured(self.loss.clone(), sums, counts)


MeasuredPass = Callable[[MicroBatch, Mapping[str, Tensor]], Measured]


class Replayed:
    """A pass that is captured when a shape comes for the third time, and replayed from then on.

    The pass must add its gradients to the parameters and must not wait for the GPU. `sizes` returns all numbers that
    the host reads from a part of the batch, except tensor shapes. Once there are `graphs`, gradients must stay where
    they are: use `zero_grad(set_to_none=False)`.

    Example: `measure = Replayed(measure, model.parameters(), sizes); measured = measure(part, totals)`.
    """

    def __init__(
        self, run: MeasuredPass, parameters: Iterable[nn.Parameter], sizes: Callable[[MicroBatch], object]
    ) -> None:
        self.run, self.parameters, self.sizes = run, list(parameters), sizes
        self.stream = torch.cuda.Stream()
        self.trained: list[nn.Parameter] = []  # those that got a gradient
        self.seen: Counter[object] = Counter()
        self.graphs: dict[object, _Graph] = {}

    def __call__(self, part: MicroBatch, totals: Mapping[str, Tensor]) -> Measured:
        shapes = tuple((tuple(t.shape), t.dtype) for t in _tensors(part, totals))
        key = self.sizes(part), shapes
        if key not in self.graphs:
            if len(self.seen) == _MOST_SHAPES:
                self.seen.clear()
            self.seen[key] += 1
            if self.seen[key] <= _WARMUP_PASSES or len(self.graphs) == _MOST_GRAPHS:
                return self._run_once(part, totals)
            self.graphs[key] = _Graph(self, part, totals)
        return self.graphs[key].replay(part, totals)

    def _run_once(self, part: MicroBatch, totals: Mapping[str, Tensor]) -> Measured:
        """Run on the stream of the captures, because autograd always adds gradients on the first pass's stream."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            measured = self.run(part, totals)
        torch.cuda.current_stream().wait_stream(self.stream)
        self.trained = [parameter for parameter in self.parameters if parameter.grad is not None]
        return measured


class _Graph:
    """A captured pass with its own inputs and results."""

    def __init__(self, owner: Replayed, part: MicroBatch, totals: Mapping[str, Tensor]) -> None:
        self.part = MicroBatch(part.batch.map(torch.clone), part.seeds.clone())
        self.totals = {name: t.clone() for name, t in totals.items()}
        # Until the first graph exists, gradients start as None in each step. A captured pass needs tensors to add to.
        for parameter in owner.trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.graph = torch.cuda.CUDAGraph()
        pool = next((other.graph.pool() for other in owner.graphs.values()), None)
        # The mode allows another thread to page-lock the next batch meanwhile.
        with torch.cuda.graph(self.graph, pool=pool, stream=owner.stream, capture_error_mode="thread_local"):
            self.measured = owner.run(self.part, self.totals)

    def replay(self, part: MicroBatch, totals: Mapping[str, Tensor]) -> Measured:
        for own, new in zip(_tensors(self.part, self.totals), _tensors(part, totals), strict=True):
            own.copy_(new)
        self.graph.replay()
        return self.measured.clone()


def _tensors(part: MicroBatch, totals: Mapping[str, Tensor]) -> Iterator[Tensor]:
    values = (getattr(part.batch, field.name) for field in fields(part.batch))
    return (value for value in (*values, part.seeds, *totals.values()) if isinstance(value, Tensor))
