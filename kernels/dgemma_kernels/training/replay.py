"""Passes of a training step as CUDA graphs: one call per pass, so the GPU does not wait for launches.

Reference: `Updater.measure`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields
from functools import partial

import torch
from torch import Tensor, nn

from dgemma.doors import plain
from dgemma.model.experts import Experts
from dgemma.train.batch import MicroBatch
from dgemma.train.canvases import CanvasSizes, sizes_of
from dgemma.train.losses import LOSSES
from dgemma.train.objective import Objective
from dgemma.train.update import Measured, Updater
from dgemma_kernels.training.adapted_linear import rounded_once
from dgemma_kernels.training.experts import waits

_WARMUP_PASSES = 2  # passes before a shape is captured; they compile functions and choose kernels
_MOST_GRAPHS = 8  # graphs; further shapes run as usual
_MOST_SHAPES = 1000  # shapes to count; rows of arbitrary lengths rarely repeat one

MeasuredPass = Callable[[MicroBatch, Mapping[str, Tensor]], Measured]


def measure(updater: Updater, part: MicroBatch, totals: Mapping[str, Tensor]) -> Measured:
    """Measure the objective on a micro-batch, with adapters that are rounded once."""
    # If adapters are spread over processes, each process has them whole only during a forward.
    alone = updater.parallel.world_size == 1
    with rounded_once(updater.model, updater.dtype) if alone else nullcontext():
        return plain(Updater.measure)(updater, part, totals)


class Replays:
    """`measure`, replayed if CUDA graphs can capture it. Graphs of one run are kept: those of the last one measured.

    Example: `with replaced({Updater.measure: Replays()}): train(...)`.
    """

    updater: Updater | None = None
    replayed: "Replayed | None" = None

    def __call__(self, updater: Updater, part: MicroBatch, totals: Mapping[str, Tensor]) -> Measured:
        if self.updater is not updater:
            self.updater, self.replayed = updater, _replay(updater)
        if self.replayed is None or part.batch.images is not None:  # to place images, the host waits for the GPU
            return measure(updater, part, totals)
        return self.replayed(part, totals)


def _replay(updater: Updater) -> "Replayed | None":
    """Return the passes of a run as CUDA graphs, or None if they cannot be captured."""
    objective, on_one_gpu = updater.objective, updater.device.type == "cuda" and updater.parallel.world_size == 1
    # A CUDA graph cannot capture a pass that waits for the GPU. A user's own objectives and losses may wait.
    if not on_one_gpu or not isinstance(objective, Objective) or type(objective.loss) not in LOSSES:
        return None
    if any(waits(module, updater.dtype) for module in updater.model.modules() if isinstance(module, Experts)):
        return None
    return Replayed(partial(measure, updater), updater.parameters.values(), partial(_sizes, objective))


def _sizes(objective: Objective, part: MicroBatch) -> CanvasSizes:
    """Return the sizes that a pass depends on. With one canvas per row, the number of canvases does not matter."""
    sizes = sizes_of(part.batch, objective.canvas_len)
    return sizes._replace(num_canvases=1, num_open=1) if objective.canvases == "one" else sizes


class Replayed:
    """A pass that is captured when a shape comes for the third time, and replayed from then on.

    The pass must add its gradients to the parameters and must not wait for the GPU. `sizes` returns all numbers that
    the host reads from a part of the batch, except tensor shapes. Graphs add to gradients of their own, which become
    those of the parameters.

    Example: `measure = Replayed(measure, model.parameters(), sizes); measured = measure(part, totals)`.
    """

    def __init__(
        self, run: MeasuredPass, parameters: Iterable[nn.Parameter], sizes: Callable[[MicroBatch], object]
    ) -> None:
        self.run, self.parameters, self.sizes = run, list(parameters), sizes
        self.stream = torch.cuda.Stream()
        self.trained: list[nn.Parameter] = []  # those that got a gradient
        self.gradients: dict[nn.Parameter, Tensor] = {}  # that all graphs add to
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
        self.place_gradients()
        return self.graphs[key].replay(part, totals)

    def _run_once(self, part: MicroBatch, totals: Mapping[str, Tensor]) -> Measured:
        """Run on the stream of the captures, because autograd always adds gradients on the first pass's stream."""
        if self.graphs:
            self.place_gradients()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            measured = self.run(part, totals)
        torch.cuda.current_stream().wait_stream(self.stream)
        self.trained = [weight for weight in self.parameters if weight.grad is not None]
        return measured

    def place_gradients(self) -> None:
        """Let each trained parameter have the gradient that graphs add to, with the value of its present one."""
        empty = []
        for weight in self.trained:
            own = self.gradients.get(weight)
            if own is None:
                own = self.gradients[weight] = torch.zeros_like(weight) if weight.grad is None else weight.grad
            elif weight.grad is None:
                empty.append(own)
            elif weight.grad is not own:
                own.copy_(weight.grad)
            weight.grad = own
        if empty:
            torch._foreach_zero_(empty)


class _Graph:
    """A captured pass with its own inputs and results."""

    def __init__(self, owner: Replayed, part: MicroBatch, totals: Mapping[str, Tensor]) -> None:
        self.part = part.map(torch.clone)
        self.totals = {name: t.clone() for name, t in totals.items()}
        owner.place_gradients()  # a captured pass needs tensors to add to
        self.graph = torch.cuda.CUDAGraph()
        pool = next((other.graph.pool() for other in owner.graphs.values()), None)
        # The mode allows another thread to page-lock the next batch meanwhile.
        with torch.cuda.graph(self.graph, pool=pool, stream=owner.stream, capture_error_mode="thread_local"):
            self.measured = owner.run(self.part, self.totals)

    def replay(self, part: MicroBatch, totals: Mapping[str, Tensor]) -> Measured:
        for own, new in zip(_tensors(self.part, self.totals), _tensors(part, totals), strict=True):
            own.copy_(new)
        self.graph.replay()
        return _clone(self.measured)


def _clone(measured: Measured) -> Measured:
    sums, counts = ({name: t.clone() for name, t in terms.items()} for terms in (measured.sums, measured.counts))
    return Measured(measured.loss.clone(), sums, counts)


def _tensors(part: MicroBatch, totals: Mapping[str, Tensor]) -> Iterator[Tensor]:
    values = (getattr(part.batch, field.name) for field in fields(part.batch))
    return (value for value in (*values, part.seeds, *totals.values()) if isinstance(value, Tensor))
