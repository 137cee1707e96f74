"""CUDA graphs of training passes with repeated shapes: one call per pass, so the GPU does not wait for launches."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dgemma.train.batch import MicroBatch

_WARMUP = 2  # passes before a shape is captured; they compile functions and choose kernels
_MOST = 8  # graphs; further shapes run as usual
_MOST_SEEN = 1000  # shapes to count; rows of arbitrary lengths rarely repeat one


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
            if len(self.seen) == _MOST_SEEN:
                self.seen.clear()
            self.seen[key] += 1
            if self.seen[key] <= _WARMUP or len(self.graphs) == _MOST:
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
