"""TokenEditing: filling, editing, and the cap for a canvas that alternates forever."""

from dataclasses import replace

import pytest
import torch

from dgemma.diffusion.noise import MaskNoise
from dgemma.diffusion.prediction import Prediction
from dgemma.sampling.editing import TokenEditing
from dgemma.sampling.stopping import Unchanged
from toy import fresh_state, update

MASK_ID = 4
NOISE = MaskNoise(5, mask_token_id=MASK_ID)


def state_of(canvas, *, frozen=None, steps=64, sampler=None):
    canvas = torch.tensor([canvas])
    state = fresh_state(canvas, NOISE, steps)
    state = replace(state, open=canvas == MASK_ID)
    if frozen is not None:
        state = replace(state, frozen=torch.tensor([frozen]))
    return replace(state, memory=(sampler or TokenEditing()).start(state))


def favouring(tokens, confidences):
    """A prediction whose argmax and confidence are given, the rest spread evenly."""
    p = torch.tensor(
        [[[(1 - c) / 4 if v != t else c for v in range(5)] for t, c in zip(tokens, confidences, strict=True)]]
    )
    return Prediction(p.log())


def test_masks_above_their_threshold_and_tokens_above_theirs_are_written():
    decision = TokenEditing(tau_mask=0.7, tau_edit=0.5)(
        favouring([1, 1, 1, 1, 1], [0.8, 0.65, 0.6, 0.45, 0.9]), state_of([MASK_ID, MASK_ID, 0, 0, 1])
    )
    #                                  filled  unsure  edited unsure as it is
    assert decision.write.tolist() == [[True, False, True, False, False]]
    assert decision.tokens.tolist() == [[1, 1, 1, 1, 1]]
    assert not decision.renoise.any()


def test_the_best_mask_is_filled_when_none_is_above():
    decision = TokenEditing()(favouring([1, 2, 3], [0.3, 0.4, 0.35]), state_of([MASK_ID] * 3))
    assert decision.write.tolist() == [[False, True, False]]


def test_thresholds_are_strict():
    # Confidence 1/2 exactly: two equal logits, the rest excluded.
    prediction = Prediction(torch.tensor([0.0, 0.0, -torch.inf, -torch.inf, -torch.inf]).expand(1, 3, 5))
    decision = TokenEditing(tau_mask=0.5, tau_edit=0.5)(prediction, state_of([MASK_ID, MASK_ID, 1]))
    assert decision.write.tolist() == [
        [True, False, False]
    ]  # the best mask is always written; none exceeds the threshold


def test_frozen_tokens_are_not_edited():
    decision = TokenEditing()(favouring([1, 1], [0.9, 0.9]), state_of([0, 0], frozen=[True, False]))
    assert decision.write.tolist() == [[False, True]]


@pytest.mark.parametrize("cap", [0, 1, 16])
def test_a_network_that_alternates_between_two_tokens_is_stopped(cap):
    sampler, stop = TokenEditing(max_edit_steps=cap), Unchanged()
    state = state_of([MASK_ID, MASK_ID], sampler=sampler)
    state = replace(state, stop_memory=stop.start(state))
    changes = 0
    for n in range(40):
        prediction = favouring([n % 2, n % 2], [0.9, 0.9])  # always the other token than the one written last
        before = state.canvas
        state = update(prediction, sampler(prediction, state), sampler, state, stop)
        changes += int((state.canvas != before).any())
        if state.done.all():
            break
    assert changes == 1 + cap  # one step fills both masks, and `cap` more steps edit
    assert state.done.all()
    assert n == 1 + cap  # one more step changes nothing and ends the canvas


def test_edits_made_while_masks_remain_do_not_count_towards_the_cap():
    sampler = TokenEditing(max_edit_steps=1)
    state = state_of([0, MASK_ID, MASK_ID, MASK_ID], sampler=sampler)
    for n in range(3):  # each step fills one mask and edits position 0
        prediction = favouring([1 - n % 2, 2, 2, 2], [0.9, 0.3, 0.3, 0.3])
        decision = sampler(prediction, state)
        assert decision.write[0, 0]
        state = update(prediction, decision, sampler, state, None)
    assert not state.open.any()
    assert sampler(favouring([0, 2, 2, 2], [0.9] * 4), state).write[0, 0]
