"""A minimal objective and data source for tests of the training loop: predict the next token of a count."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

import dgemma
from dgemma.diffusion import draws
from dgemma.train import TrainBatch

VOCAB = 32


def model(dtype: torch.dtype = torch.float32) -> dgemma.DiffusionGemma:
    """A model with a few thousand weights, the same at every call."""
    config = dgemma.presets.tiny().replace(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        layer_types=("sliding_attention", "full_attention"),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        global_head_dim=8,
        num_experts=4,
        moe_intermediate_size=8,
        canvas_length=8,
        initializer_range=0.2,
    )
    network = dgemma.DiffusionGemma(config, device="meta").to_empty(device="cpu")
    network.reset_parameters(torch.Generator().manual_seed(1))
    return network.to(dtype)


def counting(step: int, rows: range) -> TrainBatch:
    """Rows that count upwards. The start depends on row and step, and rows differ in length."""
    start = torch.tensor([(7 * row + 3 * step) % VOCAB for row in rows])
    tokens = (start[:, None] + torch.arange(10)) % VOCAB
    length = torch.tensor([4 + (row + step) % 7 for row in rows])
    return TrainBatch(tokens=tokens, prompt_len=torch.zeros_like(length), length=length)


@dataclass(frozen=True)
class NextToken:
    """Mean cross-entropy of the next token over the batch. Input tokens are replaced with probability `corrupt`."""

    corrupt: float = 0.1

    def __call__(self, model: dgemma.DiffusionGemma, batch: TrainBatch, *, seeds: Tensor) -> SimpleNamespace:
        zero = torch.zeros_like(seeds)
        u = draws.uniform(seeds, zero, zero, batch.tokens.shape[1], "corrupt")
        read = torch.where(u < self.corrupt, draws.integers(u / self.corrupt, VOCAB), batch.tokens)
        logits = model.causal_logits(read)[:, :-1]
        each = F.cross_entropy(logits.transpose(1, 2).float(), batch.tokens[:, 1:], reduction="none")
        real = torch.arange(1, batch.tokens.shape[1]) < batch.length[:, None]
        return SimpleNamespace(sums={"causal": (each * real).sum(1)}, counts={"causal": real.sum(1)})

    def total_counts(self, batch: TrainBatch, seeds: Tensor) -> dict[str, Tensor]:
        return {"causal": (batch.length - 1).sum()}

    def reduce(self, terms: SimpleNamespace, totals: dict[str, Tensor]) -> Tensor:
        return terms.sums["causal"].sum() / totals["causal"]
