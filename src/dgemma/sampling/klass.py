"""KLASS, KL-adaptive stability sampling (Kim et al., arXiv:2511.05664)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from dgemma.checks import Checked, Count, Probability, above
from dgemma.sampling.base import Decision, DenoiseState, FixedOrder, Prediction
from dgemma.sampling.ranking import best, choose_sub_block, even_share, propose


class Recent(NamedTuple):
    """The last log-probabilities, (B, C, V) float32, and the last divergences, (B, history, C) float32."""

    log_probs: Tensor
    divergences: Tensor


@dataclass(frozen=True, kw_only=True)
class KLASS(FixedOrder, Checked):
    """Commit open positions that are confident (c > `tau`) and whose last `history` KL(pₙ‖pₙ₋₁) are all < `kl_bound`.

    A row without such positions commits an even share of its open positions, the most confident first. The memory holds
    one (B, C, V) prediction. With block_len, sub-blocks are decided from left to right. greedy writes the argmax, as in
    the paper.

    Example: `KLASS(tau=0.9, kl_bound=0.01, greedy=True)`.
    """

    tau: Probability = 0.9
    kl_bound: Annotated[float, above(0)] = 0.01  # nats
    history: Count = 2
    block_len: Count | None = None
    greedy: bool = False
    valid_for: ClassVar[frozenset[str]] = frozenset({"mask"})

    def start(self, state: DenoiseState) -> Recent:
        # log 0 makes the first divergence infinite, so nothing is stable before `history` real divergences exist.
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

        sub_block = choose_sub_block(state, self.block_len)
        among = state.open & sub_block.span
        ready = among & (prediction.confidence > self.tau) & (divergences < self.kl_bound).all(1)
        fallback = best(prediction.confidence, among, even_share(sub_block, state))
        write = torch.where(ready.any(-1, keepdim=True), ready, fallback)
        tokens = propose(prediction, state, greedy=self.greedy)
        memory = Recent(log_probs, divergences)
        return Decision(tokens=tokens, write=write, renoise=torch.zeros_like(write), memory=memory)
