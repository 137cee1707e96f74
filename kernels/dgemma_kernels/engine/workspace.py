"""State that the fused denoiser and its graphs share: the forward, and the graphs with their memory."""

from typing import Any

import torch
from torch import Tensor

from dgemma.diffusion.prediction import Prediction, SoftCap
from dgemma.model.diffusion import DiffusionGemma
from dgemma_kernels.engine.forward import Forward
from dgemma_kernels.engine.graphs import GraphMemory, Graphs, use_here
from dgemma_kernels.engine.prediction import FusedPrediction, SoftEmbedding
from dgemma_kernels.engine.vision import FusedTower
from dgemma_kernels.formats.float8 import quantize
from dgemma_kernels.ops.vocabulary.kernel import SoftProbabilities


class Workspace:
    """Shared state, one per denoiser. Code that replays a graph holds the `turn`."""

    def __init__(self, model: DiffusionGemma, forward: Forward) -> None:
        self.config, self.conventions, self.forward = model.config, model.conventions, forward
        self.device, self.dtype = model.device, model.dtype
        self.memory = GraphMemory(model.device, forward.sides)
        self.vision = None if model.vision is None else FusedTower(model.vision, self.memory)
        self.turn = self.memory.turn
        self.graphs = Graphs()  # of forwards over the arena, by what they compute

    @property
    def softcap(self) -> SoftCap:
        return SoftCap(self.config.final_logit_softcapping)

    def new_hidden(self, batch_size: int, num_tokens: int) -> Tensor:
        """Return an uninitialised hidden state (B, T, D)."""
        return torch.empty(batch_size, num_tokens, self.config.hidden_size, dtype=self.dtype, device=self.device)

    def soft_embedding(self, self_cond: Prediction | SoftEmbedding | Tensor | None, shape: torch.Size) -> Tensor:
        """Return the mean embedding under a prediction of canvases (B, C), or the softmax of logits: (B, C, D).

        It is zero if `self_cond` is None.
        """
        if self_cond is None:
            return self.new_hidden(*shape).zero_()
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
        return self.forward.soft_embedding(*probabilities).view(*shape, -1)

    def causal_logits(self, hidden: Tensor) -> Tensor:
        """Return next-token logits of hidden states: (n, D) → (n, V) float32."""
        logits = self.forward.head(hidden)
        return Prediction(logits[None], (self.softcap,)).logits[0]
