"""CUDA graphs of the denoiser: a causal forward, an autoregressive token, a canvas's forward, and a denoising step.

A captured step runs the library's own `predict`, `decide` and `settle` once over static tensors. With the published
sampler one launch (`published.py`) replaces the last two. Each draw is one launch, unless the state has its own `draw`.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dgemma.diffusion.state import DenoiseState
from dgemma.model.causal import CausalRule, CausalState
from dgemma.model.denoiser import Denoiser
from dgemma.run.knobs import Knobs
from dgemma.run.step import Settled, decide, predict, record_step, settle, shape
from dgemma_kernels.engine import published
from dgemma_kernels.engine.cache import CacheBuffers
from dgemma_kernels.engine.graphs import CaptureError, Replay, as_bytes, copy_all, side_stream
from dgemma_kernels.engine.prediction import FusedPrediction, Logits, VocabularySweep
from dgemma_kernels.engine.workspace import Workspace, fill
from dgemma_kernels.ops.draws import kernel as draws
from dgemma_kernels.ops.token import settle_token

_NO_CACHE: Any = None  # a static denoiser reads its buffers


def carried(state: DenoiseState) -> dict[str, Any]:
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


class CapturedRead:
    """A causal forward of a fixed number of tokens, up to the last hidden state or the logits."""

    def __init__(
        self, workspace: Workspace, tokens: Tensor, buffers: CacheBuffers, last: bool, head: bool = False
    ) -> None:
        self._tokens, self._last = tokens.long().clone(), last
        static = self._tokens

        def run() -> Tensor:
            hidden = workspace.forward.read(static, buffers, last=last)
            return workspace.causal_logits(hidden) if head else hidden

        # The first chunk of each size is read without a graph, so kernels are compiled before the capture.
        launches = run if head else None
        self.graph = Replay(run, workspace.device, workspace.graph_memory, launches)

    def __call__(self, tokens: Tensor) -> Tensor:
        self._tokens.copy_(tokens)
        if not self._last:  # only the buffers matter
            self.graph.rewrite()
            return self.graph.result
        self.graph.replay()
        return self.graph.result.clone()


@dataclass(frozen=True, kw_only=True)
class _PackedState(CausalState):
    """A state whose tensors are views of one packed tensor, so that one launch copies them."""

    packed: Tensor  # (5, B) int64: token, number, done, broken, seeds
    views: dict[str, Tensor]  # views of `packed` by field; a field that differs from its view was replaced


def _unpack(packed: Tensor) -> _PackedState:
    token, number, _, _, seeds = packed
    done, broken = packed[2:4].view(torch.bool)[:, ::8]  # the first byte of each number
    views = {"token": token[:, None], "number": number, "done": done, "broken": broken, "seeds": seeds}
    return _PackedState(**views, packed=packed, views=views)


def _pack(state: CausalState) -> Tensor:
    if isinstance(state, _PackedState) and all(getattr(state, name) is view for name, view in state.views.items()):
        return state.packed
    columns = (state.token[:, 0], state.number, state.done, state.broken, state.seeds)
    return torch.stack([column.long() for column in columns])


class CapturedCausalStep:
    """One autoregressive token over static tensors: forward, head, draw and stop test."""

    def __init__(self, workspace: Workspace, state: CausalState, rule: CausalRule, buffers: CacheBuffers) -> None:
        self._packed = _pack(state).clone()
        static, forward = _unpack(self._packed), workspace.forward
        no_block = torch.zeros_like(static.seeds)
        stops = torch.tensor(rule.eos_token_ids, dtype=torch.int64, device=no_block.device)
        self._constants = no_block, stops  # keeps them: the graph reads their memory, but holds no reference

        def predict() -> FusedPrediction:
            logits = forward.head(forward.read(static.token, buffers, last=True))
            return FusedPrediction(Logits(logits.unflatten(0, static.token.shape)), (workspace.softcap,))

        def run() -> Tensor:
            with side_stream(no_block.device) as join:
                uniform = draws.uniform(static.seeds, no_block, static.number, 1, "token")
            prediction = predict()
            join()
            drawn, entropy = rule.draw(prediction, uniform)
            return settle_token(drawn, entropy, self._packed, stops, rule.pad_token_id)

        launches = run if rule.top_k in (None, 1) and rule.top_p is None else predict  # see `StaticStep.launch`
        self.graph = Replay(run, workspace.device, workspace.graph_memory, launches)

    def __call__(self, state: CausalState) -> CausalState:
        self._packed.copy_(_pack(state))
        self.graph.replay()
        return _unpack(self.graph.result.clone())


class CapturedDenoise:
    """A forward over a canvas, up to the logits."""

    def __init__(self, workspace: Workspace, canvas: Tensor, signal: Tensor | None, buffers: CacheBuffers) -> None:
        self._canvas = canvas.long().clone()
        self._signal = workspace.static_signal(canvas.numel(), signal)
        self._logits = workspace.logits_buffer(*canvas.shape)
        forward, static, conditioned_on, logits = workspace.forward, self._canvas, self._signal, self._logits

        def run() -> None:
            forward.head(forward.canvas(static, conditioned_on, buffers), out=logits.tensor.flatten(0, 1))

        self._logits.renew()
        self.graph = Replay(run, workspace.device, workspace.graph_memory, launches=run)

    def __call__(self, canvas: Tensor, signal: Tensor | None) -> Tensor:
        self._canvas.copy_(canvas)
        fill(self._signal, signal)
        self._logits.renew()
        self.graph.replay()
        return self._logits.tensor.clone()


@dataclass(frozen=True)
class _StaticDenoiser(Denoiser):
    """A denoiser over static tensors, for capturing a step."""

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


class _StepOutcome(NamedTuple):
    """The results of a step over static tensors."""

    after: dict[str, Any]  # fields of the next state
    record: dict[str, Tensor]
    statistics: tuple[Tensor, ...]
    sweep: VocabularySweep | None  # for `soften`; the graph returns it, so that its memory is not reused


class StaticStep:
    """A denoising step over static tensors, for two graphs: `run`, and then `soften`.

    With `postponed` tokens (B, C) the forward also reads these into the tail of the buffers, before the canvas.
    """

    def __init__(
        self,
        workspace: Workspace,
        state: DenoiseState,
        knobs: Knobs,
        postponed: Tensor | None,
        signal: Tensor | None,
        buffers: CacheBuffers,
    ) -> None:
        self.workspace, self.knobs = workspace, knobs
        leaves, self._form = tree_flatten(carried(state))
        dense = torch.contiguous_format
        self.inputs = [x.clone(memory_format=dense) if isinstance(x, Tensor) else x for x in leaves]
        self.postponed = None if postponed is None else postponed.long().clone()
        self.signal = workspace.static_signal(state.canvas.numel(), signal)
        self.logits = workspace.logits_buffer(*state.canvas.shape)
        self._state = _drawing(state)(**tree_unflatten(self.inputs, self._form))
        self._read_logits = Logits(self.logits.tensor, workspace.turn)  # only graphs read it
        self._denoiser = _StaticDenoiser(workspace, self.postponed, self.signal, buffers, self._read_logits)

    def run(self) -> _StepOutcome:
        """Take the step."""
        prediction, settled = _predict_and_settle(self._denoiser, self._state, self.knobs)
        record = record_step(self._state, prediction, settled, cache=_NO_CACHE, knobs=self.knobs)
        self._prediction = prediction
        results = (carried(settled.state), _tensor_fields(record), tuple(prediction.statistics))
        after, fields_of_record, statistics = tree_map(
            lambda x: x.contiguous() if isinstance(x, Tensor) else x, results
        )
        return _StepOutcome(after, fields_of_record, statistics, prediction.sweep)

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

    def find_changes(self, outcome: _StepOutcome) -> list[tuple[Tensor, Tensor]] | None:
        """Return the inputs that the step changes, with their next values.

        Return None if a shape changes, or if a value that is not a tensor changes: the next step needs another graph.
        """
        after, form = tree_flatten(outcome.after)
        if form != self._form or list_shapes(after) != list_shapes(self.inputs):
            return None
        pairs = zip(self.inputs, after, strict=True)
        return [(old, new) for old, new in pairs if isinstance(new, Tensor) and new is not old]

    def soften(self, changes: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the soft embedding of the last `run`. Load it and the changes as the inputs of the next step."""
        signal = self.workspace.soft_embedding(self._prediction.only_swept(self._read_logits))
        self.signal.copy_(signal.view_as(self.signal))
        # A new value may share memory with an input, which the copies below overwrite. So it is cloned first.
        input_memory = {_memory(x) for x in _tensors(self.inputs)}
        new_values = [new.clone() if _memory(new) in input_memory else new for _, new in changes]
        copy_all(as_bytes([old for old, _ in changes]), as_bytes(new_values))
        return signal


class CapturedStep:
    """CUDA graphs of a denoising step, and of the soft embedding for the next step.

    `load` copies in the state that the step starts from, `replay` runs the step, and `results` has its output. `soften`
    then computes the soft embedding, and loads the state that the step has produced.
    """

    def __init__(self, step: StaticStep) -> None:
        workspace, knobs = step.workspace, step.knobs
        self._knobs, self._softcap = knobs, workspace.softcap
        self._inputs, self._postponed, self._signal, self._logits = (
            step.inputs,
            step.postponed,
            step.signal,
            step.logits,
        )
        self._logits.renew()
        try:
            self.graph = Replay(step.run, workspace.device, workspace.graph_memory, launches=step.launch)
        except CaptureError as error:
            raise CaptureError(
                f"{error} If {knobs.sampler} or {knobs.stop} makes the host wait, write it as pure tensor code "
                "(no .item(), no if on a tensor, no boolean indexing)."
            ) from error
        outcome: _StepOutcome = self.graph.result
        changes = step.find_changes(outcome)
        self.keeps_form = changes is not None
        self.soft_graph = Replay(lambda: step.soften(changes or []), workspace.device, workspace.graph_memory)
        # Without a GPU, the first replay does nothing, because the constructor has run the function. So it is used up
        # here.
        self.soft_graph.replay()
        self._results = _Results((outcome.after, outcome.record, outcome.statistics), self._inputs)

    def load(self, leaves: list, postponed: Tensor | None, signal: Tensor | None) -> None:
        if self._postponed is not None and postponed is not None:
            self._postponed.copy_(postponed)
        copy_all(_tensors(self._inputs), _tensors(leaves))
        fill(self._signal, signal)

    def replay(self) -> Logits:
        """Take the step, and return the logits of its prediction."""
        logits = self._logits.renew()
        self.graph.replay()
        return logits

    def results(
        self, state: DenoiseState, leaves: list, logits: Logits
    ) -> tuple[dict[str, Any], dict[str, Any], FusedPrediction]:
        """Return the fields of the next state and of the record, in new tensors, and the prediction (logits shared).

        `state` is the state before the step, and `leaves` are those of `carried(state)`.
        """
        after, record, statistics = self._results.copy(leaves)
        # Uses the state's own tensors, because the next step overwrites those of the graph.
        prediction: Any = shape(FusedPrediction(logits, (self._softcap,)), state, self._knobs)
        return after, record, prediction.with_statistics(statistics)

    def soften(self) -> Tensor:
        """Return the soft embedding (B, C, D) of the last replay, and load the state that it has produced.

        No other graph may have run since the replay.
        """
        self.soft_graph.replay()
        return self.soft_graph.result.clone()


class _Results:
    """The results of a graph, a pytree, to be copied to new tensors after each replay.

    A result may also be one of the graph's inputs, or not a tensor.
    """

    def __init__(self, results: Any, inputs: list) -> None:
        self._leaves, self._form = tree_flatten(results)
        self._input_at = {id(x): at for at, x in enumerate(inputs) if isinstance(x, Tensor)}
        self._computed = {id(x): x for x in _tensors(self._leaves) if id(x) not in self._input_at}
        self._computed_bytes = as_bytes([*self._computed.values()])

    def copy(self, leaves: list) -> Any:
        """Return the results of the last replay, whose inputs had the values `leaves`. One launch copies all."""
        new = {key: torch.empty_like(tensor) for key, tensor in self._computed.items()}
        copy_all(as_bytes([*new.values()]), self._computed_bytes)
        new |= {key: leaves[at] for key, at in self._input_at.items()}
        return tree_unflatten([new[id(x)] if isinstance(x, Tensor) else x for x in self._leaves], self._form)


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
    knobs = published.fuse_sampler(knobs, state.canvas_len)
    prediction = predict(denoiser, state, cache=_NO_CACHE, knobs=knobs)
    return prediction, settle(state, prediction, decide(prediction, state, knobs), knobs)


def _tensor_fields(record: Any) -> dict[str, Tensor]:
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def list_shapes(leaves: list) -> tuple[Any, ...]:
    """Return the key of a graph over these leaves: shapes and dtypes of tensors, and all other values."""
    return tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)


def _tensors(leaves: list) -> list[Tensor]:
    return [x for x in leaves if isinstance(x, Tensor)]


def _memory(tensor: Tensor) -> int:
    """Return the address of the storage: the same for a tensor and all its views."""
    return tensor.untyped_storage().data_ptr()
