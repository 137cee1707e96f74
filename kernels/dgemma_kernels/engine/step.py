"""A denoising step in three CUDA graphs over static tensors.

The first is the forward over a canvas, up to the logits. It is the same for all samplers. The second runs the library's
own `predict`, `decide` and `settle` on these logits. For the published sampler, one launch (`published.py`) decides and
settles. Each draw is one launch, unless the state has its own `draw`. The third graph computes the soft embedding for
the next step, and copies the new state to the inputs of the first two.
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
from dgemma.run.step import decide, predict, settle, shape_prediction
from dgemma_kernels.engine import published
from dgemma_kernels.engine.cache import CacheBuffers, FusedCache
from dgemma_kernels.engine.graphs import Captured, CaptureError, Graphs, Replay, copy_all, side_stream, use_here
from dgemma_kernels.engine.prediction import FusedPrediction, Logits, VocabularySweep
from dgemma_kernels.engine.workspace import Workspace
from dgemma_kernels.ops.automaton.tables import with_tables
from dgemma_kernels.ops.draws import kernel as draws

_NO_CACHE: Any = None  # the forward has read it


class CanvasPlace(NamedTuple):
    """The static tensors of canvases of one shape. Those of all shapes share memory, because logits are large."""

    canvas: Tensor  # (B, C)
    signal: Tensor  # (B, C, D), its soft embedding
    logits: Tensor  # (B, C, V)

    def load(self, canvas: Tensor, signal: Tensor) -> None:
        self.canvas.copy_(canvas)
        self.signal.copy_(signal)


class Stepper:
    """Takes the steps of a denoiser. It owns the static canvases and their graphs. Callers hold the turn.

    After a step its soft embedding is pending: `finish` computes it when the device is idle, or before another graph
    overwrites the logits.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace  # keeps the weights, because a prediction may outlive the denoiser
        # Of what follows a forward. They are kept apart, because many samplers must not drop the graphs of forwards.
        self.graphs = Graphs()
        where: dict[str, Any] = {"device": workspace.device, "dtype": workspace.dtype}
        self._statics = [  # tokens, soft embeddings and logits of the positions of a canvas
            torch.zeros(0, dtype=torch.int64, device=workspace.device),
            torch.zeros(0, workspace.config.hidden_size, **where),
            torch.zeros(0, workspace.config.vocab_size, **where),
        ]
        self._logits: Callable[[], Logits | None] = lambda: None  # of the last forward
        self._last: CapturedStep | None = None
        self._pending: Callable[[], FusedPrediction | None] = lambda: None  # the last prediction, without its signal

    def take_step(self, state: DenoiseState, cache: FusedCache, knobs: Knobs) -> tuple[DenoiseState, StepRecord]:
        """Take a step, after `finish`. Nothing is copied if the last step produced this state: its inputs hold it."""
        captured, self._last = self._last, None  # stays None if this step raises
        if captured is not None and not captured.holds(state, knobs):
            captured = None
        signal, shape = None, state.canvas.shape
        if captured is None:  # before `place`, which may drop the logits of `self_cond`
            signal = self._workspace.soft_embedding(state.self_cond, shape)
        place = self.place(shape)
        if signal is not None:
            place.load(state.canvas, signal)
        logits = self._run_forward(place, cache)
        if captured is None:
            leaves, form = tree_flatten(_carried(state))
            key = (knobs, type(state), str(form), _list_shapes(leaves))
            make = partial(_StaticStep, self._workspace, place, state, knobs)
            captured = self.graphs.remembered(key, lambda: CapturedStep(make()))
            captured.load(leaves)
        after, record, prediction = captured.replay(state, logits)
        shown: Any = prediction.unconditioned
        shown.soften = self.finish
        self._last, self._pending = captured, weakref.ref(shown)
        before = replace(state, self_cond=None)
        return after, StepRecord(**record, prediction=prediction, before=before, state=after, cache=cache, knobs=knobs)

    def launch(self, state: DenoiseState, knobs: Knobs) -> None:
        """Launch the kernels of a step's second and third graph."""
        step = _StaticStep(self._workspace, self.place(state.canvas.shape), state, knobs)
        step.soften(step.find_changes(step.run()) or [])

    def denoise(self, canvas: Tensor, signal: Tensor, cache: FusedCache) -> FusedPrediction:
        """Predict a canvas (B, C) with a soft embedding (B, C, D), after `finish`."""
        self._last = None  # its inputs are overwritten
        place = self.place(canvas.shape)
        place.load(canvas, signal)
        logits = self._run_forward(place, cache).read().clone()
        # Rows that go on alone get the soft embedding that a step would compute, bit for bit.
        embed = partial(_embed, weakref.ref(self._workspace))  # a kept prediction does not keep the weights
        return FusedPrediction(Logits(logits, embed=embed), (self._workspace.softcap,))

    def place(self, shape: torch.Size) -> CanvasPlace:
        """Return the static tensors of canvases (B, C). If they are too small, the graphs over canvases are dropped."""
        num_positions, forwards = shape.numel(), self._workspace.graphs
        if num_positions > len(self._statics[0]):
            self._give_up()
            self.graphs.clear()
            for key in [key for key in forwards if key[0] == "canvas"]:
                del forwards[key]
            use_here(*self._statics)
            self._statics = [old[:0].clone() for old in self._statics]  # frees the old memory first
            self._statics = [empty.new_zeros(num_positions, *empty.shape[1:]) for empty in self._statics]
        canvas, signal, logits = (x[:num_positions].unflatten(0, shape) for x in self._statics)
        return CanvasPlace(canvas, signal, logits)

    def renew(self, place: CanvasPlace) -> Logits:
        """Return the logits that the next forward over a canvas writes. They overwrite the current ones."""
        new = Logits(place.logits, self._workspace.turn)
        self._give_up()
        self._logits = weakref.ref(new)
        return new

    def _give_up(self) -> None:
        if (current := self._logits()) is not None:
            current.give_up()

    def _run_forward(self, place: CanvasPlace, cache: FusedCache) -> Logits:
        """Run the canvas that is loaded, and before it the postponed tokens of the cache, up to the logits."""
        with cache.for_canvas(place.canvas.shape[1]) as (buffers, postponed):
            logits, tokens = self.renew(place), [] if postponed is None else [postponed.long()]
            self.capture(place, buffers, tokens)(tokens)
        return logits

    def capture(self, place: CanvasPlace, buffers: CacheBuffers, postponed: list[Tensor]) -> Captured:
        """Return the graph of a forward over the canvas of a place, up to the logits. It reads postponed tokens first.

        `postponed` is one tensor (B, C) or none.
        """
        workspace, forward = self._workspace, self._workspace.forward

        def run(*tokens: Tensor) -> None:
            if tokens:
                hidden = forward.read_and_canvas(tokens[0], place.canvas, place.signal, buffers)
            else:
                hidden = forward.canvas(place.canvas, place.signal, buffers)
            forward.head(hidden, out=place.logits.flatten(0, 1))

        make = partial(Captured, run, postponed, workspace.memory, forward.rehearsal)
        return workspace.graphs.remembered(("canvas", place.canvas.shape, *(x.shape for x in postponed)), make)

    def finish(self) -> None:
        """Compute the soft embedding of the last step, if it has none and its prediction is still in use."""
        prediction, self._pending = self._pending(), lambda: None
        if prediction is not None and self._last is not None:
            captured, self._last = self._last, None  # stays None if `soften` raises
            prediction.signal = captured.soften()
            self._last = captured


def _embed(workspace: "weakref.ref[Workspace]", prediction: FusedPrediction) -> Tensor | None:
    """Return the soft embedding (B, C, D) of a prediction; None if its denoiser is gone."""
    owner = workspace()
    if owner is None:
        return None
    with owner.turn:
        return owner.soft_embedding(prediction, prediction.shape[:2])


class CapturedStep:
    """The second and third graph of a step, and their inputs: a state.

    `load` copies a state to the inputs, and `replay` takes the step from there, on the logits of the forward. `soften`
    then computes the soft embedding, and copies the new state to the inputs, also to those of the forward.
    """

    def __init__(self, step: "_StaticStep") -> None:
        knobs, workspace = step.knobs, step.workspace
        self._knobs, self._softcap, self._inputs = knobs, workspace.softcap, step.inputs
        try:
            self.graph = Replay(step.run, workspace.memory)
        except CaptureError as error:
            raise CaptureError(
                f"{error} If {knobs.sampler} or {knobs.stop} makes the host wait, write it as pure tensor code "
                "(no .item(), no if on a tensor, no boolean indexing)."
            ) from error
        outcome: _Outcome = self.graph.result
        changes = step.find_changes(outcome)
        self._can_hold = changes is not None
        self._held: tuple[Callable[[], Any], Callable[[], bool]] | None = None
        self.soft_graph = Replay(lambda: step.soften(changes or []), workspace.memory).mark_stale()
        # A result may also be an input, or not a tensor.
        self._results, self._form = tree_flatten((outcome.after, outcome.record, outcome.statistics))
        self._input_at = {id(x): at for at, x in enumerate(self._inputs) if isinstance(x, Tensor)}
        self._computed = {id(x): x for x in _tensors(self._results) if id(x) not in self._input_at}
        self._computed_bytes = _as_bytes([*self._computed.values()])

    def holds(self, state: DenoiseState, knobs: Knobs) -> bool:
        """Return True if `soften` has loaded this state, unmodified since, and the knobs are the same."""
        if self._held is None or self._knobs is not knobs:
            return False
        loaded, was_written = self._held
        return loaded() is state and not was_written()

    def load(self, leaves: list) -> None:
        """Copy a state to the inputs: the leaves of `_carried(state)`."""
        copy_all(_tensors(self._inputs), _tensors(leaves))

    def replay(self, state: DenoiseState, logits: Logits) -> tuple[DenoiseState, dict[str, Any], FusedPrediction]:
        """Take the step from the loaded `state`. Return the next state, the record's tensors and the prediction.

        All are new tensors, but for the logits.
        """
        self._held = None
        self.graph.replay()
        fields_after, record, statistics = self._copy_results(tree_leaves(_carried(state)))
        # Uses the state's own tensors, because the next step overwrites those of the graph.
        shaped: Any = shape_prediction(FusedPrediction(logits, (self._softcap,)), state, self._knobs)
        prediction = shaped.with_statistics(statistics)
        # The graph's language has an automaton with tables; the state's has none.
        fields_after |= {"language": state.language, "self_cond": prediction.unconditioned}
        after = replace(state, **fields_after)
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
    """The functions that are captured, over clones of a state's tensors: `run`, and then `soften`."""

    def __init__(self, workspace: Workspace, place: CanvasPlace, state: DenoiseState, knobs: Knobs) -> None:
        self.workspace, self.knobs, self._place = workspace, knobs, place
        self._logits = Logits(place.logits, workspace.turn)
        leaves, self._form = tree_flatten(_carried(state) | {"canvas": place.canvas})
        is_cloned = [isinstance(x, Tensor) and x is not place.canvas for x in leaves]
        dense = torch.contiguous_format
        self.inputs = [x.clone(memory_format=dense) if c else x for x, c in zip(leaves, is_cloned, strict=True)]
        self._state = _drawing(state)(**tree_unflatten(self.inputs, self._form))

    def run(self) -> _Outcome:
        """Take the step on the logits of the forward, with the kernel of the published sampler if `is_published`."""
        state, knobs = self._state, self.knobs
        ready = _ReadyDenoiser(FusedPrediction(self._logits, (self.workspace.softcap,)))
        if published.is_published(state, knobs):
            with side_stream(state.device, self.workspace.forward.sides) as join:
                early = published.prepare(state, knobs)
            prediction: Any = predict(ready, state, cache=_NO_CACHE, knobs=knobs)
            _ = prediction.entropy  # the sweep over the vocabulary runs next to `prepare`
            join()
            settled = published.decide_and_settle(state, prediction, early, knobs)
        else:
            prediction = predict(ready, state, cache=_NO_CACHE, knobs=knobs)
            settled = settle(state, prediction, decide(prediction, state, knobs), knobs)
        self._prediction = prediction
        record = {name: getattr(settled, name) for name in ("accepted", "renoised", "active", "verdict")}
        results = (_carried(settled.state), record, tuple(prediction.statistics))
        after, fields_of_record, statistics = tree_map(
            lambda x: x.contiguous() if isinstance(x, Tensor) else x, results
        )
        return _Outcome(after, fields_of_record, statistics, prediction.unconditioned.sweep)

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
        swept = self._prediction.unconditioned.only_swept(self._logits)
        signal = self.workspace.soft_embedding(swept, self._state.canvas.shape)
        self._place.signal.copy_(signal)
        # A new value may share memory with an input, which the copies below overwrite. So it is cloned first.
        input_memory = {_memory(x) for x in _tensors(self.inputs)}
        new_values = [new.clone() if _memory(new) in input_memory else new for _, new in changes]
        copy_all(_as_bytes([old for old, _ in changes]), _as_bytes(new_values))
        return signal


@dataclass(frozen=True)
class _ReadyDenoiser(Denoiser):
    """A denoiser whose forward has run, with the prediction of its logits."""

    prediction: FusedPrediction

    def denoise(self, canvas: Tensor, cache: Any, self_cond: Any = None, self_cond_mask: Any = None) -> FusedPrediction:
        return self.prediction


def _carried(state: DenoiseState) -> dict[str, Any]:
    """Return the fields that a captured step reads and writes: all but self_cond, which it has as a soft embedding.

    An automaton has its tables, which cannot be built during capture.
    """
    for f in fields(state):
        if not f.init and any(isinstance(leaf, Tensor) for leaf in tree_leaves(getattr(state, f.name))):
            raise ValueError(
                f"{type(state).__name__}.{f.name} is a tensor in a field with init=False. "
                "A captured step cannot compute it again. Make it a property."
            )
    carried = {f.name: getattr(state, f.name) for f in fields(state) if f.init and f.name != "self_cond"}
    if state.language is not None:
        carried["language"] = state.language._replace(automaton=with_tables(state.language.automaton))
    return carried


def _drawing(state: DenoiseState) -> type[DenoiseState]:
    """Return a subclass of the state's class in which each draw is one launch.

    If the state's class has its own draws, the result is that class.
    """
    kind = type(state)
    if not published.draws_by_seed(state):
        return kind
    return type(f"Drawing{kind.__name__}", (kind,), {"draw": staticmethod(draws.uniform)})


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
