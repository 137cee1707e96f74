from dataclasses import replace

import pytest
import torch

from dgemma.diffusion.prediction import Prediction
from dgemma.sampling.first_hitting import FirstHitting
from toy import MASK, SEQUENCES, fresh_state, mask_noise, propagate, total_variation


def any_open(prediction, state):
    """Boundaries of a uniform choice among the open positions."""
    return (torch.arange(1, state.canvas_len) / state.open.sum(-1, keepdim=True)).clamp(max=1).double()


CELLS = {"position": any_open, "clock": lambda prediction, state: torch.zeros(state.batch_size, 0).double()}


def row(values):
    return torch.tensor(values, dtype=torch.float64)


def test_one_token_per_step_reproduces_the_text_exactly():
    result = propagate(FirstHitting(), mask_noise(), steps=5, cells=CELLS)
    assert total_variation(result.law) < 1e-14
    assert result.nfe == pytest.approx(3)


def test_with_fewer_steps_than_masks_the_remaining_masks_become_the_argmax():
    """One step fills one position. The other two get the most probable token of an all-mask canvas."""
    result = propagate(FirstHitting(), mask_noise(), steps=1, cells=CELLS)
    assert result.law.sum().item() == pytest.approx(1)
    marginal_modes = {0: 0, 1: 0, 2: 0}  # every position alone is most likely a 0
    possible = [
        [x if j == position else marginal_modes[j] for j in range(3)] for position in range(3) for x in range(3)
    ]
    reached = SEQUENCES[result.law > 0].tolist()
    assert sorted(reached) == sorted({tuple(p): p for p in possible}.values())


@pytest.mark.parametrize("num_masks", [1, 2, 3])
def test_clock_is_the_largest_of_as_many_uniform_levels_as_masks(num_masks):
    """Masks are revealed at independent uniform levels; the next is their maximum, below x with probability x^m."""
    x = row([0.1, 0.5, 0.9])
    canvas = torch.tensor([[MASK] * num_masks + [0] * (3 - num_masks)] * 3)
    state = replace(fresh_state(canvas, mask_noise(), 3), open=canvas == MASK, memory=torch.ones(3).double())
    state = replace(state, injected={"clock": x**num_masks, "position": row([0.5] * 3), "token": torch.zeros(3, 3)})
    decision = FirstHitting()(Prediction(torch.zeros(3, 3, 4)), state)
    torch.testing.assert_close(decision.memory, x, atol=1e-14, rtol=0)


def test_the_clock_does_not_change_if_nothing_is_masked():
    state = fresh_state(torch.tensor([[0, 1, 2]]), mask_noise(), 3)
    state = replace(state, open=torch.zeros(1, 3, dtype=torch.bool), memory=row([0.2]))
    decision = FirstHitting()(Prediction(torch.zeros(1, 3, 4)), state)
    assert not decision.write.any()
    assert decision.memory.item() == 0.2
