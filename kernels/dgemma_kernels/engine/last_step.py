"""The most recent step: its new state, and its soft embedding, which may not be computed yet."""

import weakref

from torch import Tensor
from torch.utils._pytree import tree_leaves

from dgemma.diffusion.state import DenoiseState, watch
from dgemma.run.knobs import Knobs
from dgemma_kernels.engine.cache import CacheBuffers
from dgemma_kernels.engine.captured import CapturedStep, carried
from dgemma_kernels.engine.prediction import FusedPrediction
from dgemma_kernels.engine.workspace import Workspace


class LoadedState:
    """A state in the static inputs of a captured step. The next step from there copies nothing."""

    def __init__(self, state: DenoiseState, knobs: Knobs, buffers: CacheBuffers, captured: CapturedStep) -> None:
        self._state, self._knobs, self._buffers, self.captured = weakref.ref(state), knobs, buffers, captured
        leaves = tree_leaves(carried(state))
        self._written = watch(*(x for x in leaves if isinstance(x, Tensor)))

    def serves(self, state: DenoiseState, knobs: Knobs, buffers: CacheBuffers) -> bool:
        """Return True if `state` is this state, unmodified, and the knobs and buffers are the same."""
        same = self._state() is state and self._knobs is knobs and self._buffers is buffers
        return same and self.captured.keeps_form and not self._written()


class LastStep:
    """The last step of a denoiser. Callers hold the turn.

    Its soft embedding is computed when the device is idle, or before another graph overwrites the logits.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace  # keeps the weights, because a prediction may outlive the denoiser
        self._unsoftened: tuple[weakref.ref[FusedPrediction], CapturedStep] | None = None
        self._loaded: LoadedState | None = None

    def note(self, prediction: FusedPrediction, captured: CapturedStep, loaded: LoadedState | None) -> None:
        """Note a step after its replay. `loaded`: the next state, if `soften` can copy it into the graph's inputs."""
        prediction.soften = self.soften
        self._unsoftened, self._loaded = (weakref.ref(prediction), captured), loaded

    def soften(self) -> None:
        """Compute the soft embedding of the last step, if it has none and its prediction is still in use."""
        unsoftened, self._unsoftened = self._unsoftened, None
        prediction = None if unsoftened is None else unsoftened[0]()
        if unsoftened is None or prediction is None:
            return
        loaded, self._loaded = self._loaded, None  # stays None if `soften` raises
        prediction.signal = unsoftened[1].soften()
        self._loaded = loaded

    def pop_loaded(self, state: DenoiseState, knobs: Knobs, buffers: CacheBuffers) -> CapturedStep | None:
        """Return the captured step in which `state` is loaded, else None. No state counts as loaded afterwards."""
        loaded, self._loaded = self._loaded, None
        return loaded.captured if loaded is not None and loaded.serves(state, knobs, buffers) else None
