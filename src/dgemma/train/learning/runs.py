"""Groups of recorded runs, with their rewards, and the log-probabilities of their canvases."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import require
from dgemma.diffusion import draws
from dgemma.many.prefixes import pad_left
from dgemma.model.denoiser import Denoiser
from dgemma.run.generate import generate
from dgemma.run.recorded.trajectory import Trajectory
from dgemma.train.learning.rewards import Reward


class Runs(NamedTuple):
    """G runs of each of B prompts. Row b·G + g of the trajectory is run g of prompt b."""

    trajectory: Trajectory
    rewards: Tensor  # (B, G) float64
    forwards: Tensor  # (B, G) float64

    @property
    def blocks(self) -> Tensor:
        """The block of each step, (S,)."""
        return torch.tensor([step.block for step in self.trajectory], device=self.rewards.device)

    @property
    def entropy(self) -> Tensor:
        """The mean entropy of the predictions of each prompt's runs, (B,) nats."""
        per_row = self.trajectory.array("entropy").double().nanmean((0, 2))
        return per_row.view(self.rewards.shape).mean(1).to(self.rewards.device)


def roll_out(
    model: Denoiser,
    prompts: Sequence[Tensor],
    answers: Sequence[Any],
    seeds: Tensor,
    *,
    reward: Reward,
    tokenizer: Tokenizer,
    options: Mapping[str, Any],
) -> Runs:
    """Generate one run per seed (B, G), all in one batch, and reward their texts. The seeds decide all draws."""
    group = seeds.shape[1]
    tokens, mask = pad_left([prompt for prompt in prompts for _ in range(group)])
    out = generate(
        model,
        tokens.to(model.device),
        attention_mask=None if mask is None else mask.to(model.device),
        seed=seeds.flatten().tolist(),
        record=True,
        record_top=0,
        progress=False,
        **options,
    )
    texts = tokenizer.decode_batch(out.new_tokens)
    found = reward(texts, [answer for answer in answers for _ in range(group)])
    rewards = list(found) if isinstance(found, Iterable) else []
    with suppress(TypeError, ValueError):
        rewards = [float(value) for value in rewards]
    fits = len(rewards) == len(texts) and all(isinstance(value, float) and math.isfinite(value) for value in rewards)
    require(fits, "reward", f"return one finite number for each of {len(texts)} texts", found)
    as_groups = torch.tensor(rewards, dtype=torch.float64).view(seeds.shape)
    forwards = out.trajectory.num_forwards.sum(1).double().view(seeds.shape)
    return Runs(out.trajectory, as_groups.to(model.device), forwards.to(model.device))


def choose_steps(num_steps: int, chosen: int | None, seed: Tensor) -> Tensor:
    """Return the weight of each step's gradient, (S,) float64: S / k for k random steps, and 0 for the others.

    Each step is chosen with probability k / S, so the weighted sum is unbiased. None chooses all.
    """
    weights = torch.ones(num_steps, dtype=torch.float64, device=seed.device)
    if chosen is None or chosen >= num_steps:
        return weights
    zero = torch.zeros_like(seed[None])
    order = draws.uniform(seed[None], zero, zero, num_steps, "steps")[0].argsort(stable=True)
    return weights.index_fill(0, order[chosen:], 0.0) * (num_steps / chosen)


def sum_canvases(of_steps: Tensor, blocks: Tensor) -> Tensor:
    """Add up numbers of steps (S, R) by canvas: (blocks, R)."""
    return of_steps.new_zeros(int(blocks.max()) + 1, of_steps.shape[1]).index_add(0, blocks, of_steps)
