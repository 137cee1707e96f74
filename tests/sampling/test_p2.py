"""P2: the number of masks after each step, the effect of eta on log-probabilities, and forbidden tokens."""

from dataclasses import replace

import pytest
import torch

from dgemma.diffusion.noise import MaskNoise
from dgemma.diffusion.prediction import Prediction
from dgemma.sampling.p2 import P2
from toy import fresh_state, update

MASK_ID = 4


def half_way(*, frozen=None):
    """A state in the second of four steps, after which two of four positions must be masked.

    Positions 0 and 1 hold token 0, and positions 2 and 3 are masked.
    """
    state = fresh_state(torch.tensor([[0, 0, MASK_ID, MASK_ID]]), MaskNoise(6, mask_token_id=MASK_ID), 4)
    state = replace(state, open=torch.tensor([[False, False, True, True]]))
    if frozen is not None:
        state = replace(state, frozen=torch.tensor([frozen]))
    return replace(state, step=torch.tensor([1]), next_noise_level=torch.tensor([0.5], dtype=torch.float64))


def logits(probabilities):
    """Position l gives token 0 the probability `probabilities[l]` and the rest to token 1."""
    p = torch.tensor([probabilities])
    return torch.stack([p, 1 - p], dim=-1).log()


def test_the_lowest_scores_are_masked_whether_they_were_committed_or_not():
    # Committed tokens score p: 0.1 and 0.9. Greedy proposals score max(p, 1 - p): 0.8 and 0.6. Positions 0 and 3 are
    # the two lowest.
    decision = P2(greedy=True)(Prediction(logits([0.1, 0.9, 0.8, 0.6])), half_way())
    assert decision.renoise.tolist() == [[True, False, False, False]]
    assert decision.write.tolist() == [[False, False, True, False]]


def test_a_committed_position_is_scored_by_the_token_it_holds_and_not_by_a_new_one():
    # Position 0 now predicts token 1 with 0.9, so its token 0 must score 0.1, not 0.9.
    decision = P2(greedy=True)(Prediction(logits([0.1, 0.9, 0.6, 0.6])), half_way())
    assert decision.renoise[0, 0]


@pytest.mark.parametrize(("eta", "revised"), [(0.0, 0), (1.0, 0), (3.0, 1)])
def test_larger_eta_masks_committed_tokens_sooner(eta, revised):
    # A committed token has log-probability -0.69, and two proposals have -0.92 and -1.08. Times 3, the committed one is
    # the lowest. A factor on p would raise it.
    p = torch.tensor([[[0.5, 0.25, 0.25], [0.98, 0.01, 0.01], [0.4, 0.3, 0.3], [0.34, 0.33, 0.33]]])
    decision = P2(eta=eta, greedy=True)(Prediction(p.log()), half_way())
    assert decision.renoise.sum().item() == revised


@pytest.mark.parametrize("steps", [1, 4, 5, 10])
def test_after_each_step_exactly_the_scheduled_number_is_masked(steps):
    canvas_len = 10
    sampler = P2(eta=2.0)
    state = fresh_state(torch.full((3, canvas_len), MASK_ID), MaskNoise(6, mask_token_id=MASK_ID), steps)
    state = replace(state, seeds=torch.arange(3))
    generator = torch.Generator().manual_seed(0)
    for n in range(steps):
        prediction = Prediction(torch.randn(3, canvas_len, 4, generator=generator))
        state = update(prediction, sampler(prediction, state), sampler, state, None)
        assert state.open.sum(-1).tolist() == [canvas_len * (steps - n - 1) // steps] * 3
        assert torch.equal(state.open, state.canvas == MASK_ID)


def test_frozen_positions_are_neither_counted_nor_masked():
    # Of the three that may change, ⌊3 · 0.5⌋ = 1 is masked, and the frozen position 0 would have been the lowest.
    decision = P2(greedy=True)(Prediction(logits([0.01, 0.9, 0.8, 0.6])), half_way(frozen=[True, False, False, False]))
    assert decision.renoise.tolist() == [[False] * 4]
    assert decision.write.tolist() == [[False, False, True, False]]


@pytest.mark.parametrize("eta", [0.0, 1.0, 2.0])
def test_a_committed_token_that_is_now_forbidden_gives_no_nan_scores(eta):
    prediction = Prediction(logits([0.6, 0.9, 0.8, 0.6])).shaped(allowed=torch.tensor([[[False, True]]]))
    decision = P2(eta=eta)(prediction, half_way())
    assert decision.renoise.sum().item() + (~decision.write[0, 2:]).sum().item() == 2
    assert decision.renoise.any().item() == (eta > 0)
