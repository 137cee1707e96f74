"""State that the fused denoiser and its graphs share: the forward, static buffers, and the memory of graphs."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgemma.diffusion.prediction import Prediction, SoftCap
from dgemma.model.diffusion import DiffusionGemma
from dgemma_kernels.engine.forward import Forward
from dgemma_kernels.engine.graphs import GraphMemory, Graphs, use_here
from dgemma_kernels.engine.prediction import FusedPrediction, Logits, SoftEmbedding
from dgemma_kernels.engine.vision import FusedTower
from dgemma_kernels.formats.float8 import quantize
from dgemma_kernels.ops.vocabulary.kernel import SoftProbabilities


class CanvasPlace(NamedTuple):
    """The static tensors of canvases of one shape. Those of all shapes share memory, because logits are large."""

    canvas: Tensor  # (B, C)
    signal: Tensor  # (B, C, D), its soft embedding
    logits: Logits  # (B, C, V); captured code reads and writes them


class Workspace:
    """Shared state, one per denoiser. Code that writes to its buffers or replays a graph over them holds the `turn`."""

    def __init__(self, model: DiffusionGemma, forward: Forward) -> None:
        self.config, self.conventions, self.forward = model.config, model.conventions, forward
        self.device, self.dtype = model.device, model.dtype
        self.memory = GraphMemory(model.device, forward.sides)
        self.vision = None if model.vision is None else FusedTower(model.vision, self.memory)
        self.turn = self.memory.turn
        # Graphs by what they compute: forwards over the arena, and what follows a forward over a canvas. The second
        # are kept apart, because every sampler needs its own, and many samplers must not drop forwards.
        self.graphs, self.steps = Graphs(), Graphs()
        where: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        self._statics = [  # tokens, soft embeddings and logits of the positions of a canvas
            torch.zeros(0, dtype=torch.int64, device=self.device),
            torch.zeros(0, model.config.hidden_size, **where),
            torch.zeros(0, model.config.vocab_size, **where),
        ]
        self._current: Callable[[], Logits | None] = lambda: None  # the logits of the last forward

    @property
    def softcap(self) -> SoftCap:
        return SoftCap(self.config.final_logit_softcapping)

    def place(self, shape: torch.Size) -> CanvasPlace:
        """Return the static tensors of canvases (B, C). If they are too small, the graphs over canvases are dropped."""
        num_positions = shape.numel()
        if num_positions > len(self._statics[0]):
            self._give_up()
            self.steps.clear()
            for key in [key for key in self.graphs if key[0] == "canvas"]:
                del self.graphs[key]
            use_here(*self._statics)
            self._statics = [old[:0].clone() for old in self._statics]  # frees the old memory first
            self._statics = [empty.new_zeros(num_positions, *empty.shape[1:]) for empty in self._statics]
        canvas, signal, logits = (x[:num_positions].unflatten(0, shape) for x in self._statics)
        return CanvasPlace(canvas, signal, Logits(logits, self.turn))

    def renew(self, shape: torch.Size) -> Logits:
        """Return the logits that the next forward over a canvas (B, C) writes. They overwrite the current ones."""
        new = self.place(shape).logits
        self._give_up()
        self._current = weakref.ref(new)
        return new

    def _give_up(self) -> None:
        current = self._current()
        if current is not None:
            current.give_up()

    def new_hidden(self, batch_size: int, num_tokens: int) -> Tensor:
        """Return an uninitialised hidden state (B, T, D)."""
        return torch.empty(batch_size, num_tokens, self.config.hidden_size, dtype=self.dtype, device=self.device)

    def soft_embedding(self, self_cond: Prediction | SoftEmbedding | Tensor | None, canvas: Tensor) -> Tensor:
        """Return the mean embedding under a prediction of canvas (B, C), or under the softmax of logits: (B, C, D).

        It is zero if `self_cond` is None.
        """
        if self_cond is None:
            return self.new_hidden(*canvas.shape).zero_()
        if isinstance(self_cond, SoftEmbedding | FusedPrediction) and self_cond.signal is not None:
            use_here(self_cond.signal)
            return self_cond.signal.to(self.device, self.dtype)
        probabilities, float8 = None, self.forward.weights.soft_table is not None
        is_rounded = self.conventions.self_cond_logits == "rounded"
        if isinstance(self_cond, FusedPrediction) and is_rounded:
            probabilities = self_cond.soft_probabilities(float8=float8)
        if probabilities is None:
            logits: Any = self_cond.logits if isinstance(self_cond, Prediction) else self_cond
            logits = logits.to(self.dtype) if is_rounded else logits
            weights = logits.softmax(-1, dtype=torch.float32).to(self.dtype).flatten(0, 1)
            one = torch.ones(weights.shape[0], device=weights.device)
            probabilities = SoftProbabilities(*quantize(weights).tensors() if float8 else (weights, one))
        return self.forward.soft_embedding(*probabilities).view(*canvas.shape, -1)

    def causal_logits(self, hidden: Tensor) -> Tensor:
        """Return next-token logits of hidden states: (n, D) → (n, V) float32."""
        logits = self.forward.head(hidden)
        return Prediction(logits[None], (self.softcap,)).logits[0]
