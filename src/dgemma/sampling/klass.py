"""KLASS, KL-adaptive stability sampling (Kim et al., arXiv:2511.05664)."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dgemma.prediction import Prediction
from dgemma.sampling.base import Decision, Sampler
from dgemma.sampling.ranking import best, even_share, take_turn
from dgemma.state import DenoiseState


class Recent(NamedTuple):
    """The last log-probabilities, (B, C, V) float32, and the last divergences, (B, history, C) float32."""

    log_probs: Tensor
    divergences: Tensor


@dataclass(frozen=True, kw_only=True)
class KLASS(Sampler):
    """Commit open positions that are confident (c > `tau`) and whose last `history` KL(pₙ‖pₙ₋₁) are all < `kl_bound`.

    If a row has none, the most confident positions are committed, an even share of what is open. Remembers one
    (B, C, V) prediction. block_len decides sub-blocks from left to right; greedy writes the argmax (published).

    Example: `KLASS(tau=0.9, kl_bound=0.01, greedy=True)`.
    """

    tau: float = 0.9
    kl_bound: float = 0.01
    history: int = 2
    block_len: int | None = None
    greedy: bool = False
    valid_for: ClassVar[frozenset[str]] = frozenset({"mask"})

    def __post_init__(self) -> None:
        if not 0 <= self.tau <= 1:
            raise ValueError(f"KLASS.tau must be a probability, got {self.tau}. Use 0.9, as published.")
        if not self.kl_bound > 0:
            raise ValueError(f"KLASS.kl_bound must be > 0 nats, got {self.kl_bound}. Use 0.01, as published.")
        if self.history < 1:
            raise ValueError(f"KLASS.history must be >= 1, got {self.history}. Use Threshold to ignore stability.")
        if self.block_len is not None and self.block_len < 1:
            raise ValueError(f"KLASS.block_len must be >= 1, got {self.block_len}. Use None for the whole canvas.")

    def start(self, state: DenoiseState) -> Recent:
        # log 0 everywhere makes the first divergence infinite: nothing is stable until `history` real ones are known.
        shape = (*state.canvas.shape, state.noise.vocab_size)
        log_probs = torch.full(shape, -torch.inf, device=state.device)
        return Recent(log_probs, log_probs.new_full((shape[0], self.history, shape[1]), torch.inf))

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        recent: Recent = state.memory
        log_probs = prediction.logits.float().log_softmax(-1)
        probs = log_probs.exp()
        terms = (probs * (log_probs - recent.log_probs)).masked_fill(probs == 0, 0.0)  # 0 · log 0 is 0
        divergence = terms.sum(-1)  # (B, C)
        divergences = torch.cat([recent.divergences[:, 1:], divergence[:, None]], dim=1)

        turn = take_turn(state, self.block_len)
        among = state.open & turn.span
        ready = among & (prediction.confidence > self.tau) & (divergences < self.kl_bound).all(1)
        fallback = best(prediction.confidence, among, even_share(turn, state))
        write = torch.where(ready.any(-1, keepdim=True), ready, fallback)
        tokens = prediction.argmax if self.greedy else prediction.sample(state.uniform("token"))
        memory = Recent(log_probs, divergences)
        return Decision(tokens=tokens, write=write, renoise=torch.zeros_like(write), memory=memory)
