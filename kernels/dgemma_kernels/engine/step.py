"""A denoising step in two CUDA graphs over static tensors.

The first graph runs the library's own `predict`, `decide` and `settle`. With the published sampler, one launch
(`published.py`) replaces the last two. Each draw is one launch, unless the state has its own `draw`. The second graph
computes the soft embedding for the next step, and copies the new state to the inputs of the first.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dgemma.diffusion.state import DenoiseState, watch
from dgemma.model.denoiser import Denoiser
from dgemma.run.knobs import Knobs
from dgemma.run.records import StepRecord
from dgemma.run.step import Settled, decide, predict, record_step, settle, shape_prediction
from dgemma_kernels.engine import published
from dgemma_kernels.engine.cache import CacheBuffers, FusedCache
from dgemma_kernels.engine.graphs import CaptureError, Replay, copy_all, remembered, side_stream
from dgemma_kernels.engine.prediction import FusedPrediction, Logits, VocabularySweep
from dgemma_kernels.engine.workspace import Workspace
from dgemma_kernels.ops.draws import kernel as draws

_NO_CACHE: Any = None  # a static denoiser reads its buffers


class Stepper:
    """Takes the steps of a denoiser, and owns what is pending after a step. Callers hold the turn.

    Pending is the soft embedding of the last step. `finish` computes it when the device is idle, or before another
    graph overwrites the logits.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace  # keeps the weights, because a prediction may outlive the denoiser
        self._last: CapturedStep | None = None
        self._pending: Callable[[], FusedPrediction | None] = lambda: None  # the last prediction, without its signal

    def take_step(self, state: DenoiseState, cache: FusedCache, knobs: Knobs) -> tuple[DenoiseState, StepRecord]:
        """Take a step, after `finish`. Nothing is copied if the last step produced this state: its inputs hold it."""
        postponed = cache.postponed
        buffers = cache.make_room(cache.num_postponed + state.canvas_len)
        cache.trim()
        captured, self._last = self._last, None  # stays None if this step raises
        if captured is None or postponed is not None or not captured.holds(state, knobs, buffers):
            leaves, form = tree_flatten(_carried(state))
            signal = self._workspace.soft_embedding(state.self_cond, state.canvas)
            key = ("step", knobs, type(state), str(form), _list_shapes(leaves), cache.num_postponed)
            make = partial(_StaticStep, self._workspace, state, knobs, postponed, signal, buffers)
            captured = remembered(buffers.graphs, key, lambda: CapturedStep(make()))
            captured.load(leaves, postponed, signal)
        after, record, prediction = captured.replay(state)
        if postponed is not None:
            cache.take_postponed()
            cache.extend(postponed.shape[1], None)
        prediction.soften = self.finish
        self._last, self._pending = captured, weakref.ref(prediction)
        before = replace(state, self_cond=None)
        return after, StepRecord(**record, prediction=prediction, before=before, state=after, cache=cache, knobs=knobs)

    def finish(self) -> None:
        """Compute the soft embedding of the last step, if it has none and its prediction is still in use."""
        prediction, self._pending = self._pending(), lambda: None
        if prediction is not None and self._last is not None:
            captured, self._last = self._last, None  # stays None if `soften` raises
            prediction.signal = captured.soften()
            self._last = captured


class CapturedStep:
    """The two graphs of a step, and their inputs: a state, its soft embedding and postponed tokens (B, C), if any.

    `load` copies a state to the inputs, and `replay` takes the step from there. `soften` then computes the soft
    embedding, and copies the new state to the inputs.
    """

    def __init__(self, step: "_StaticStep") -> None:
        knobs, workspace = step.knobs, step.workspace
        self._knobs, self._softcap = knobs, workspace.softcap
        self._buffers = weakref.ref(step.buffers)  # weak, because the buffers own their graphs
        self._inputs, self._postponed, self._signal = step.inputs, step.postponed, step.signal
        self._logits = step.logits
        self._logits.renew()
        try:
            self.graph = Replay(step.run, workspace.memory, launches=step.launch)
        except CaptureError as error:
            raise CaptureError(
                f"{error} If {knobs.sampler} or {knobs.stop} makes the host wait, write it as pure tensor code "
                "(no .item(), no if on a tensor, no boolean indexing)."
            ) from error
        outcome: _Outcome = self.graph.result
        changes = step.find_changes(outcome)
        # The graph of a step with postponed tokens serves no other step.
        self._can_hold = changes is not None and step.postponed is None
        self._held: tuple[Callable[[], Any], Callable[[], bool]] | None = None
        self.soft_graph = Replay(lambda: step.soften(changes or []), workspace.memory)
        # Without a GPU, the first replay does nothing, because the constructor has run the function. So it is used up
        # here.
        self.soft_graph.replay()
        # A result may also be an input, or not a tensor.
        self._results, self._form = tree_flatten((outcome.after, outcome.record, outcome.statistics))
        self._input_at = {id(x): at for at, x in enumerate(self._inputs) if isinstance(x, Tensor)}
        self._computed = {id(x): x for x in _tensors(self._results) if id(x) not in self._input_at}
        self._computed_bytes = _as_bytes([*self._computed.values()])

    def holds(self, state: DenoiseState, knobs: Knobs, buffers: CacheBuffers) -> bool:
        """Return True if `soften` has loaded this state, unmodified since, and the knobs and buffers are the same."""
        if self._held is None or self._knobs is not knobs or self._buffers() is not buffers:
            return False
        loaded, was_written = self._held
        return loaded() is state and not was_written()

    def load(self, leaves: list, postponed: Tensor | None, signal: Tensor) -> None:
        """Copy a state to the inputs: the leaves of `_carried(state)`, and its soft embedding."""
        if self._postponed is not None and postponed is not None:
            self._postponed.copy_(postponed)
        copy_all(_tensors(self._inputs), _tensors(leaves))
        self._signal.copy_(signal)

    def replay(self, state: DenoiseState) -> tuple[DenoiseState, dict[str, Tensor], FusedPrediction]:
        """Take the step from the loaded `state`. Return the next state, the record's tensors and the prediction.

        All are new tensors, but for the logits.
        """
        self._held = None
        logits = self._logits.renew()
        self.graph.replay()
        fields_after, record, statistics = self._copy_results(tree_leaves(_carried(state)))
        # Uses the state's own tensors, because the next step overwrites those of the graph.
        shaped: Any = shape_prediction(FusedPrediction(logits, (self._softcap,)), state, self._knobs)
        prediction = shaped.with_statistics(statistics)
        after = replace(state, **fields_after, self_cond=prediction)
        if self._can_hold:
            self._held = weakref.ref(after), watch(*_tensors(tree_leaves(_carried(after))))
        return after, record, prediction

    def soften(self) -> Tensor:
        """Return the soft embedding (B, C, D) of the last replay, and load the state that it has produced.

        No other graph may have run since the replay.
        """
        self.soft_graph.replay()
        return self.soft_graph.result.clone()

    def _copy_results(self, leaves: list) -> Any:
        """Return the results of the last replay, whose inputs had the values `leaves`. One launch copies all."""
        new = {key: torch.empty_like(tensor) for key, tensor in self._computed.items()}
        copy_all(_as_bytes([*new.values()]), self._computed_bytes)
        new |= {key: leaves[at] for key, at in self._input_at.items()}
        return tree_unflatten([new[id(x)] if isinstance(x, Tensor) else x for x in self._results], self._form)


class _Outcome(NamedTuple):
    """The results of a step over static tensors."""

    after: dict[str, Any]  # fields of the next state
    record: dict[str, Tensor]
    statistics: tuple[Tensor, ...]
    sweep: VocabularySweep | None  # for `soften`; the graph returns it, so that its memory is not reused


class _StaticStep:
    """The functions that are captured, over clones of the arguments: `run`, and then `soften`."""

    def __init__(
        self,
        workspace: Workspace,
        state: DenoiseState,
        knobs: Knobs,
        postponed: Tensor | None,
        signal: Tensor,
        buffers: CacheBuffers,
    ) -> None:
        self.workspace, self.knobs, self.buffers = workspace, knobs, buffers
        leaves, self._form = tree_flatten(_carried(state))
        dense = torch.contiguous_format
        self.inputs = [x.clone(memory_format=dense) if isinstance(x, Tensor) else x for x in leaves]
        self.postponed = None if postponed is None else postponed.long().clone()
        self.signal = signal.clone()
        self.logits = workspace.logits.of_canvas(state.canvas)
        self._state = _drawing(state)(**tree_unflatten(self.inputs, self._form))
        self._denoiser = _StaticDenoiser(workspace, self.postponed, self.signal, buffers, self.logits.static)

    def run(self) -> _Outcome:
        """Take the step."""
        prediction, settled = _predict_and_settle(self._denoiser, self._state, self.knobs)
        record = record_step(self._state, prediction, settled, cache=_NO_CACHE, knobs=self.knobs)
        self._prediction = prediction
        results = (_carried(settled.state), _tensor_fields(record), tuple(prediction.statistics))
        after, fields_of_record, statistics = tree_map(
            lambda x: x.contiguous() if isinstance(x, Tensor) else x, results
        )
        return _Outcome(after, fields_of_record, statistics, prediction.sweep)

    def launch(self) -> None:
        """Run the part of the step that `compile_together` can run.

        A sampler in PyTorch, or a constraint, may index by the prediction, which `compile_together` does not compute.
        For such steps, run only the forward.
        """
        knobs, state = self.knobs, self._state
        all_kernels = published.is_published(state, knobs) and knobs.top_k is None and knobs.top_p is None
        if all_kernels and state.language is None:
            self.run()
        else:
            self._denoiser.denoise(state.canvas, _NO_CACHE)

    def find_changes(self, outcome: _Outcome) -> list[tuple[Tensor, Tensor]] | None:
        """Return the inputs that the step changes, with their next values.

        Return None if a shape changes, or if a value that is not a tensor changes: the next step needs another graph.
        """
        after, form = tree_flatten(outcome.after)
        if form != self._form or _list_shapes(after) != _list_shapes(self.inputs):
            return None
        pairs = zip(self.inputs, after, strict=True)
        return [(old, new) for old, new in pairs if isinstance(new, Tensor) and new is not old]

    def soften(self, changes: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the soft embedding of the last `run`. Load it and the changes as the inputs of the next step."""
        signal = self.workspace.soft_embedding(self._prediction.only_swept(self.logits.static), self._state.canvas)
        self.signal.copy_(signal)
        # A new value may share memory with an input, which the copies below overwrite. So it is cloned first.
        input_memory = {_memory(x) for x in _tensors(self.inputs)}
        new_values = [new.clone() if _memory(new) in input_memory else new for _, new in changes]
        copy_all(_as_bytes([old for old, _ in changes]), _as_bytes(new_values))
        return signal


class CapturedDenoise:
    """A forward over a canvas, up to the logits."""

    def __init__(self, workspace: Workspace, canvas: Tensor, signal: Tensor, buffers: CacheBuffers) -> None:
        self._canvas = canvas.long().clone()
        self._signal = signal.clone()
        self._logits = workspace.logits.of_canvas(canvas)
        forward, static, conditioned_on, logits = workspace.forward, self._canvas, self._signal, self._logits

        def run() -> None:
            forward.head(forward.canvas(static, conditioned_on, buffers), out=logits.tensor.flatten(0, 1))

        self._logits.renew()
        self.graph = Replay(run, workspace.memory, launches=run)

    def __call__(self, canvas: Tensor, signal: Tensor) -> Tensor:
        self._canvas.copy_(canvas)
        self._signal.copy_(signal)
        self._logits.renew()
        self.graph.replay()
        return self._logits.tensor.clone()


@dataclass(frozen=True)
class _StaticDenoiser(Denoiser):
    """A denoiser over static tensors, for capturing a step.

    With `postponed` tokens the forward also reads these into the tail of the buffers, before the canvas.
    """

    workspace: Workspace
    postponed: Tensor | None
    signal: Tensor
    buffers: CacheBuffers
    logits: Logits

    def denoise(self, canvas: Tensor, cache: Any, self_cond: Any = None, self_cond_mask: Any = None) -> FusedPrediction:
        forward = self.workspace.forward
        if self.postponed is None:
            hidden = forward.canvas(canvas, self.signal, self.buffers)
        else:
            hidden = forward.read_and_canvas(self.postponed, canvas, self.signal, self.buffers)
        forward.head(hidden, out=self.logits.read().flatten(0, 1))
        return FusedPrediction(self.logits, (self.workspace.softcap,))


def _predict_and_settle(
    denoiser: _StaticDenoiser, state: DenoiseState, knobs: Knobs
) -> tuple[FusedPrediction, Settled]:
    """Take a step up to its record, with the kernel of the published sampler if `is_published`."""
    prediction: Any
    if published.is_published(state, knobs):
        with side_stream(state.device) as join:
            early = published.prepare(state, knobs)
        prediction = predict(denoiser, state, cache=_NO_CACHE, knobs=knobs)
        join()
        return prediction, published.decide_and_settle(state, prediction, early, knobs)
    prediction = predict(denoiser, state, cache=_NO_CACHE, knobs=knobs)
    return prediction, settle(state, prediction, decide(prediction, state, knobs), knobs)


def _carried(state: DenoiseState) -> dict[str, Any]:
    """Return the fields that a captured step reads and writes: all but self_cond, which it has as a soft embedding."""
    for f in fields(state):
        if not f.init and any(isinstance(leaf, Tensor) for leaf in tree_leaves(getattr(state, f.name))):
            raise ValueError(
                f"{type(state).__name__}.{f.name} is a tensor in a field with init=False. "
                "A captured step cannot compute it again. Make it a property."
            )
    return {f.name: getattr(state, f.name) for f in fields(state) if f.init and f.name != "self_cond"}


def _drawing(state: DenoiseState) -> type[DenoiseState]:
    """Return a subclass of the state's class in which each draw is one launch.

    If the state's class has its own draws, the result is that class.
    """
    kind = type(state)
    if not published.draws_by_seed(state):
        return kind
    return type(f"Drawing{kind.__name__}", (kind,), {"draw": staticmethod(draws.uniform)})


def _tensor_fields(record: Any) -> dict[str, Tensor]:
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _list_shapes(leaves: list) -> tuple[Any, ...]:
    """Return the key of a graph over these leaves: shapes and dtypes of tensors, and all other values."""
    return tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)


def _tensors(leaves: list) -> list[Tensor]:
    return [x for x in leaves if isinstance(x, Tensor)]


def _memory(tensor: Tensor) -> int:
    """Return the address of the storage: the same for a tensor and all its views."""
    return tensor.untyped_storage().data_ptr()


def _as_bytes(tensors: list[Tensor]) -> list[Tensor]:
    """View contiguous tensors as bytes, (n,) uint8 each, so that all have one dtype."""
    return [tensor.view(-1).view(torch.uint8) for tensor in tensors]
