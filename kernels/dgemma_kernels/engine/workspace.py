"""State that the fused denoiser and its graphs share: the forward, static buffers, and the memory of graphs."""

from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from dgemma.diffusion.prediction import Prediction, SoftCap
from dgemma.model.config import Conventions, ModelConfig
from dgemma_kernels.engine.forward import Forward
from dgemma_kernels.engine.graphs import GraphMemory, Turn
from dgemma_kernels.engine.prediction import FusedPrediction, LogitsBuffer
from dgemma_kernels.formats.float8 import quantize


@dataclass(frozen=True, eq=False, kw_only=True)
class Workspace:
    """Shared state, one per denoiser. Code that writes to its buffers or replays a graph over them holds the `turn`."""

    config: ModelConfig
    conventions: Conventions
    device: torch.device
    dtype: torch.dtype
    forward: Forward
    turn: Turn
    graph_memory: GraphMemory | None  # shared by all graphs; None on a CPU
    # Buffers live as long as a graph that writes to them, so that many shapes do not fill the memory.
    _logits: WeakValueDictionary[tuple[int, int], LogitsBuffer] = field(default_factory=WeakValueDictionary)

    @property
    def softcap(self) -> SoftCap:
        return SoftCap(self.config.final_logit_softcapping)

    def logits_buffer(self, batch_size: int, canvas_len: int) -> LogitsBuffer:
        """Return the buffer (B, C, V) for the head's output. Graphs of this shape share it, because it is large."""
        buffer = self._logits.get((batch_size, canvas_len))
        if buffer is None:
            shape = (batch_size, canvas_len, self.config.vocab_size)
            buffer = LogitsBuffer(torch.empty(shape, dtype=self.dtype, device=self.device), self.turn)
            self._logits[batch_size, canvas_len] = buffer
        return buffer

    def logits_bytes(self) -> int:
        """Return the memory of all buffers for logits. Any thread may call it."""
        buffers = [ref() for ref in self._logits.valuerefs()]  # a copy, because another thread may add one
        return sum(buffer.tensor.nbytes for buffer in buffers if buffer is not None)

    def static_signal(self, num_rows: int, signal: Tensor | None) -> Tensor:
        """Return a static tensor (num_rows, D) with the signal, or with zeros."""
        static = torch.empty(num_rows, self.config.hidden_size, dtype=self.dtype, device=self.device)
        fill(static, signal)
        return static

    def new_hidden(self, batch_size: int, num_tokens: int) -> Tensor:
        """Return an uninitialised hidden state (B, T, D)."""
        return torch.empty(batch_size, num_tokens, self.config.hidden_size, dtype=self.dtype, device=self.device)

    def soft_embedding(self, prediction: FusedPrediction) -> Tensor:
        """Return the mean embedding under the prediction, (B, C, D)."""
        probabilities, float8 = None, self.forward.weights.soft_table is not None
        if self.conventions.self_cond_logits == "rounded":
            probabilities = prediction.soft_probabilities(float8=float8)
        if probabilities is None:
            return self.soft_embedding_of(prediction.logits)
        signal = self.forward.soft_embedding(*probabilities)
        return signal.view(prediction.batch_size, prediction.canvas_len, -1)

    def soft_embedding_of(self, logits: Tensor) -> Tensor:
        """Return the mean embedding under the softmax of logits (B, C, V): (B, C, D)."""
        if self.conventions.self_cond_logits == "rounded":
            logits = logits.to(self.dtype)
        weights = logits.softmax(-1, dtype=torch.float32).to(self.dtype).flatten(0, 1)
        scale = torch.ones(weights.shape[0], device=weights.device)
        if self.forward.weights.soft_table is not None:
            rounded = quantize(weights)
            weights, scale = rounded.values, rounded.scale
        signal = self.forward.soft_embedding(weights, scale)
        return signal.view(*logits.shape[:2], -1)

    def causal_logits(self, hidden: Tensor) -> Tensor:
        """Return next-token logits of hidden states: (n, D) → (n, V) float32."""
        logits = self.forward.head(hidden)
        return Prediction(logits[None], (self.softcap,)).logits[0]


def fill(static: Tensor, signal: Tensor | None) -> None:
    """Write the signal, or zeros, into a static tensor."""
    if signal is None:
        static.zero_()
    else:
        static.copy_(signal.view_as(static))
