"""What the fused denoiser captures: a causal forward, a canvas's forward, and a whole denoising step.

A step is `dgemma.step` itself, run once under capture over static tensors, whatever its sampler and stop rule, or its
equal with the published sampler (`published.py`); draws are one launch each there.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dgemma.diffusion.prediction import SoftCap
from dgemma.diffusion.state import DenoiseState
from dgemma.run.knobs import Knobs
from dgemma.run.step import Denoiser
from dgemma.run.step import step as denoising_step
from dgemma_kernels.engine.cache import CacheBuffers
from dgemma_kernels.engine.forward import Forward
from dgemma_kernels.engine.graphs import CaptureError, Replay, as_bytes, copy_all
from dgemma_kernels.engine.prediction import FusedPrediction, Logits
from dgemma_kernels.engine.published import fuse_sampler, is_published, published_step
from dgemma_kernels.ops.draws import kernel as draws

if TYPE_CHECKING:
    from dgemma_kernels.engine.denoiser import FusedDenoiser

STATE_INPUTS = (
    *("canvas", "open", "frozen", "draft", "done", "block", "step", "num_steps", "noise_level", "next_noise_level"),
    *("temperature", "seeds", "rows", "awaited", "allowed", "memory", "stop_memory", "injected"),
)
_UNCHANGED = frozenset({"frozen", "block", "num_steps", "seeds", "rows", "awaited", "allowed", "injected"})  # by a step
_RECORD_TENSORS = (
    *("block", "step", "seeds", "temperature", "noise_level", "canvas", "argmax", "entropy", "confidence"),
    *("accepted", "renoised", "active", "rows", "verdict"),
)


class _DrawingState(DenoiseState):
    """A state whose draws are one launch each; bit for bit those of a `DenoiseState`."""

    draw = staticmethod(draws.uniform)


class CapturedRead:
    """A causal forward of a fixed number of tokens, up to the last hidden state or the logits."""

    def __init__(
        self, engine: "FusedDenoiser", tokens: Tensor, buffers: CacheBuffers, last: bool, head: bool = False
    ) -> None:
        self._tokens = tokens.long().clone()
        static = self._tokens

        def run() -> Tensor:
            hidden = engine._forward.read(static, buffers, last=last)
            return engine._causal_logits(hidden) if head else hidden

        self._replay = Replay(run, engine.device, engine._graph_memory, launches=run)

    def __call__(self, tokens: Tensor) -> Tensor:
        self._tokens.copy_(tokens)
        self._replay.replay()
        return self._replay.result.clone()


class CapturedDenoise:
    """A forward over a canvas, up to the logits."""

    def __init__(self, engine: "FusedDenoiser", canvas: Tensor, signal: Tensor | None, buffers: CacheBuffers) -> None:
        self._canvas = canvas.long().clone()
        self._signal = engine._static_signal(canvas.numel(), signal)
        self._logits = engine._logits_buffer(*canvas.shape)
        forward, static, conditioned_on, logits = engine._forward, self._canvas, self._signal, self._logits

        def run() -> None:
            forward.head(forward.canvas(static, conditioned_on, buffers), out=logits.tensor.flatten(0, 1))

        self._logits.version += 1
        self._replay = Replay(run, engine.device, engine._graph_memory, launches=run)

    def __call__(self, canvas: Tensor, signal: Tensor | None) -> Tensor:
        self._canvas.copy_(canvas)
        fill(self._signal, signal)
        self._logits.version += 1
        self._replay.replay()
        return self._logits.tensor.clone()


@dataclass(frozen=True)
class _Predicts(Denoiser):
    """A denoiser that answers with the static forward, for `dgemma.step` to run under capture."""

    forward: Forward
    postponed: Tensor | None
    signal: Tensor
    buffers: CacheBuffers
    logits: Logits
    softcap: SoftCap

    def denoise(self, canvas: Tensor, cache: Any, self_cond: Any = None, self_cond_mask: Any = None) -> FusedPrediction:
        if self.postponed is None:
            hidden = self.forward.canvas(canvas, self.signal, self.buffers)
        else:
            hidden = self.forward.read_and_canvas(self.postponed, canvas, self.signal, self.buffers)
        self.forward.head(hidden, out=self.logits.tensor.flatten(0, 1))
        return FusedPrediction(self.logits, (self.softcap,))


class CapturedStep:
    """`dgemma.step` over static tensors, and the soft embedding that the next step is conditioned on.

    With `postponed` tokens (B, C) the forward also reads these into the tail of the buffers, in front of the canvas.
    `load` what a step starts from, `replay` it, take its `results`; after `soften` the state that the step led to is
    loaded.
    """

    def __init__(
        self,
        engine: "FusedDenoiser",
        state: DenoiseState,
        knobs: Knobs,
        postponed: Tensor | None,
        signal: Tensor | None,
        buffers: CacheBuffers,
        leaves: list,
        form: Any,
    ) -> None:
        self._knobs, self._softcap = knobs, engine._softcap
        self._postponed = None if postponed is None else postponed.long().clone()
        dense = torch.contiguous_format
        self._inputs = [x.clone(memory_format=dense) if isinstance(x, Tensor) else x for x in leaves]
        device, memory = engine.device, engine._graph_memory
        self._signal = engine._static_signal(state.canvas.numel(), signal)
        self._logits = engine._logits_buffer(*state.canvas.shape)
        predicts = _Predicts(engine._forward, self._postponed, self._signal, buffers, self._logits, self._softcap)
        static = _DrawingState(
            **dict(zip(STATE_INPUTS, tree_unflatten(self._inputs, form), strict=True)), noise=state.noise
        )
        advance: Any = partial(denoising_step, knobs=fuse_sampler(knobs, state.canvas_len))
        published = is_published(static, knobs)
        if published:
            advance = partial(published_step, knobs=knobs)
        kept: list[FusedPrediction] = []

        def run() -> tuple[dict[str, Any], dict[str, Any], tuple[Tensor, ...], Any]:
            after, record = advance(predicts, static, cache=None)
            prediction: Any = record.prediction
            kept[:] = [prediction]
            shaping = prediction._shaping
            sweep = None if shaping is None else (tuple(prediction._sweep), shaping.allowed)
            results = (
                {name: getattr(after, name) for name in STATE_INPUTS if name not in _UNCHANGED},
                {name: getattr(record, name) for name in _RECORD_TENSORS},
                tuple(prediction._statistics),
            )
            return *tree_map(lambda x: x.contiguous() if isinstance(x, Tensor) else x, results), sweep

        def forward() -> Any:
            return predicts.denoise(static.canvas, None)

        # What is written in PyTorch may look something up by a prediction, which `compile_together` does not make.
        all_kernels = published and knobs.top_k is None and knobs.top_p is None
        self._logits.version += 1
        try:
            self._replay = Replay(run, device, memory, launches=run if all_kernels else forward)
        except CaptureError as error:
            said = str(error).partition("\n")[0]
            raise RuntimeError(
                f"This step could not be captured in a CUDA graph ({said}). If {knobs.sampler} or {knobs.stop} waits "
                "for the host, write it as pure tensor code (no .item(), no if on a tensor, no boolean indexing)."
            ) from error
        self._prediction = kept[0]
        loaded = dict(zip(STATE_INPUTS, tree_unflatten(self._inputs, form), strict=True))
        led_to = self._replay.result[0]
        before, form_before = tree_flatten([loaded[name] for name in led_to])
        after, form_after = tree_flatten(list(led_to.values()))
        # Else the next step is another graph.
        self.keeps_form = form_before == form_after and list_shapes(before) == list_shapes(after)
        given = {_memory(x) for x in _tensors(self._inputs)}

        def soften() -> Tensor:
            signal = engine._soft_embedding(self._unread())
            self._signal.copy_(signal.view_as(self._signal))
            if self.keeps_form:
                # An input, or a view of one, that stands for another is read before it is written over.
                new = [x.clone() if _memory(x) in given else x for x in _tensors(after)]
                copy_all(as_bytes(_tensors(before)), as_bytes(new))
            return signal

        self._soft = Replay(soften, device, memory)
        self._soft.replay()  # what it did for capture it did from no step
        results, self._form = tree_flatten(self._replay.result[:3])
        self._origins, self._computed = _origins(results, self._inputs)
        self._computed_bytes = as_bytes(self._computed)

    def load(self, leaves: list, postponed: Tensor | None, signal: Tensor | None) -> None:
        if self._postponed is not None and postponed is not None:
            self._postponed.copy_(postponed)
        copy_all(_tensors(self._inputs), _tensors(leaves))
        fill(self._signal, signal)

    def replay(self) -> None:
        self._logits.version += 1
        self._replay.replay()

    def results(self, state: DenoiseState, leaves: list) -> tuple[dict[str, Any], dict[str, Any], FusedPrediction]:
        """What the step from `state`, whose leaves these are, led to and recorded, in tensors of their own."""
        fresh = [torch.empty_like(source) for source in self._computed]
        copy_all(as_bytes(fresh), self._computed_bytes)
        where = {"computed": fresh.__getitem__, "given": leaves.__getitem__, "constant": lambda value: value}
        results = [where[kind](at) for kind, at in self._origins]
        after, record, statistics = tree_unflatten(results, self._form)
        # Shaped by the state's own tensors: the graph's will hold another temperature.
        prediction = FusedPrediction(self._logits, (self._softcap,)).shaped(
            temperature=state.temperature, allowed=state.allowed, top_k=self._knobs.top_k, top_p=self._knobs.top_p
        )
        return after, record, prediction.after_replay(statistics)

    def soften(self) -> Tensor:
        """The soft embedding (B, C, D) of the last replay, while no other graph has run since."""
        self._soft.replay()
        return self._soft.result.clone()

    def _unread(self) -> FusedPrediction:
        """The captured prediction, its sweep done and nothing else computed."""
        prediction = FusedPrediction(self._logits, self._prediction._transforms)
        if self._prediction._shaping is not None:
            prediction.__dict__.update(_shaping=self._prediction._shaping, _sweep=self._prediction._sweep)
        return prediction


def list_shapes(leaves: list) -> tuple[Any, ...]:
    """What a graph over these leaves is captured for: shapes and dtypes, and what is no tensor itself."""
    return tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)


def fill(static: Tensor, signal: Tensor | None) -> None:
    if signal is None:
        static.zero_()
    else:
        static.copy_(signal.view_as(static))


def _tensors(leaves: list) -> list[Tensor]:
    return [x for x in leaves if isinstance(x, Tensor)]


def _memory(tensor: Tensor) -> int:
    """Where its storage begins: one number for a tensor and all its views."""
    return tensor.untyped_storage().data_ptr()


def _origins(results: list, inputs: list) -> tuple[list[tuple[str, Any]], list[Tensor]]:
    """Where each result comes from: the i-th distinct tensor that a replay computes, input i, or a constant."""
    given = {id(x): at for at, x in enumerate(inputs) if isinstance(x, Tensor)}
    computed: list[Tensor] = []
    origins: list[tuple[str, Any]] = []
    seen: dict[int, int] = {}
    for result in results:
        if not isinstance(result, Tensor):
            origins.append(("constant", result))
        elif id(result) in given:
            origins.append(("given", given[id(result)]))
        else:
            if id(result) not in seen:
                seen[id(result)] = len(computed)
                computed.append(result)
            origins.append(("computed", seen[id(result)]))
    return origins, computed
