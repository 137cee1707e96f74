"""The toy itself: its text, its exact propagation, and errors for wrong cells."""

from dataclasses import dataclass

import pytest
import torch

from dgemma.diffusion.decision import Decision
from dgemma.sampling.base import Sampler
from toy import JOINT, LENGTH, SEQUENCES, mask_noise, propagate


@dataclass(frozen=True, kw_only=True)
class Coin(Sampler):
    """Reveal each masked position with probability .3."""

    def __call__(self, prediction, state):
        tokens = prediction.sample(state.uniform("token"))
        return Decision(
            tokens=tokens, write=state.open & (state.uniform("event") < 0.3), renoise=torch.zeros_like(state.open)
        )


def boundary(value):
    return {"event": lambda prediction, state: torch.full((state.batch_size, LENGTH, 1), value, dtype=torch.float64)}


def test_the_text_has_its_published_entropy_and_total_correlation():
    entropy = -(JOINT * JOINT.log()).sum().item()
    marginals = [torch.zeros(3).double().index_add(0, SEQUENCES[:, i], JOINT) for i in range(LENGTH)]
    assert entropy == pytest.approx(2.424411, abs=1e-6)
    assert sum(-(p * p.log()).sum().item() for p in marginals) - entropy == pytest.approx(0.709866, abs=1e-6)


def test_one_step_of_the_coin_sampler_reveals_each_position_independently():
    states = propagate(Coin(), mask_noise(), steps=1, cells=boundary(0.3)).states
    number = (~states.state.open).sum(-1)
    law = torch.zeros(4).double().index_add(0, number, states.weight)
    assert law.tolist() == pytest.approx([0.343, 0.441, 0.189, 0.027], abs=1e-12)


@pytest.mark.parametrize("wrong", [0.2, 0.5])
def test_a_wrong_boundary_raises(wrong):
    with pytest.raises(AssertionError, match="A cell holds two decisions"):
        propagate(Coin(), mask_noise(), steps=1, cells=boundary(wrong))
