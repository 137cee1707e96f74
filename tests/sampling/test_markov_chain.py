"""A long text with a known law: a Markov chain, whose exact network is the forward-backward algorithm.

The toy's three positions are enumerated. Here there are sixteen positions, and frequencies of samples are compared.
Bigrams show dependencies between positions. Positions that are decided in the same step lose them.
"""

import pytest
import torch
from torch import Tensor

import dgemma
from dgemma import Knobs, Prediction

START = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
MOVE = torch.tensor([[0.8, 0.15, 0.05], [0.1, 0.7, 0.2], [0.25, 0.05, 0.7]], dtype=torch.float64)
LENGTH, ROWS = 16, 1500
MASK = 3


class ForwardBackward(dgemma.Denoiser):
    """p(x at l | canvas) for every position at once, exactly. Under uniform noise it needs the noise level."""

    def __init__(self) -> None:
        self.level: Tensor | None = None  # (B,)

    def denoise(self, canvas: Tensor, cache: None, self_cond: object = None) -> Prediction:
        shown = torch.nn.functional.one_hot(canvas, 4)[..., :3].double()
        if self.level is None:
            # (B, L, 3): the probability of the token on the canvas, given each clean token
            seen = torch.where((canvas == MASK)[..., None], 1.0, shown)
        else:
            seen = (1 - self.level)[:, None, None] * shown + self.level[:, None, None] / 3
        forward, backward = [START * seen[:, 0]], [torch.ones_like(seen[:, 0])]
        for position in range(1, LENGTH):
            forward.append(_normalised(forward[-1] @ MOVE) * seen[:, position])
            backward.append(_normalised((backward[-1] * seen[:, LENGTH - position]) @ MOVE.T))
        law = _normalised(torch.stack(forward, 1) * torch.stack(backward[::-1], 1))
        padding = torch.zeros(*law.shape[:2], 1 if self.level is None else 0)
        return Prediction(torch.cat((law, padding), -1).log())


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def bigram_distance(noise: dgemma.Noise, sampler: dgemma.Sampler, steps: int) -> float:
    """Total variation between the bigrams drawn and the chain's own, averaged over positions."""
    network = ForwardBackward()
    knobs = Knobs(sampler=sampler, temperature=dgemma.ConstantTemperature(1.0))
    state = dgemma.start_state(knobs, noise, seeds=torch.arange(ROWS), canvas_len=LENGTH, num_steps=steps)
    for _ in range(steps):
        network.level = state.noise_level if noise.kind == "uniform" else None
        state, _ = dgemma.step(network, state, cache=None, knobs=knobs)
    found = torch.zeros(LENGTH - 1, 9, dtype=torch.float64)
    pairs = state.draft[:, :-1] * 3 + state.draft[:, 1:]
    found.scatter_add_(1, pairs.T, torch.full((LENGTH - 1, ROWS), 1 / ROWS, dtype=torch.float64))
    marginal, distances = START, []
    for position in range(LENGTH - 1):
        distances.append((found[position] - (marginal[:, None] * MOVE).flatten()).abs().sum() / 2)
        marginal = marginal @ MOVE
    return float(torch.stack(distances).mean())


# With 1,500 rows, sampling error alone gives a distance of at most about sqrt(9 / 1500) / 2 = 0.039.
CHANCE = 0.035


@pytest.mark.parametrize(
    "noise", [dgemma.MaskNoise(4, mask_token_id=MASK), dgemma.UniformNoise(3)], ids=["mask", "uniform"]
)
def test_ancestral_bigrams_approach_the_chain_as_steps_grow(noise):
    one, four, many = (bigram_distance(noise, dgemma.Ancestral(), steps) for steps in (1, 4, 24))
    assert one > four + CHANCE
    assert four > many
    assert many < CHANCE


def test_one_position_per_step_samples_the_chain_and_all_at_once_does_not():
    noise = dgemma.MaskNoise(4, mask_token_id=MASK)
    assert bigram_distance(noise, dgemma.EntropyBound(bound=0.0), LENGTH) < CHANCE
    assert bigram_distance(noise, dgemma.EntropyBound(bound=9e9), LENGTH) > 5 * CHANCE
