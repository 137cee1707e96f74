"""KLASS: stable and confident positions, what stable means, and the fallback."""

from dataclasses import replace

import pytest
import torch

from dgemma.diffusion.noise import MaskNoise
from dgemma.diffusion.prediction import Prediction
from dgemma.sampling.klass import KLASS
from toy import fresh_state

NOISE = MaskNoise(5, mask_token_id=4)


def run(sampler, predictions, *, steps=100, is_open=None):
    """Return the writes of each step on an unchanged canvas. predictions: a list of probabilities (C, V)."""
    canvas_len = len(predictions[0])
    state = fresh_state(torch.full((1, canvas_len), 4), NOISE, steps)
    state = replace(state, memory=sampler.start(state))
    if is_open is not None:
        state = replace(state, open=torch.tensor([is_open]))
    written = []
    for probs in predictions:
        decision = sampler(Prediction(probabilities(probs).log()), state)
        written.append(decision.write[0].tolist())
        state = replace(state, memory=decision.memory)
    return written


def probabilities(rows):
    p = torch.tensor([rows])
    return torch.cat([p, torch.zeros(1, p.shape[1], 5 - p.shape[2])], dim=-1)


SURE, UNSURE = [0.95, 0.05], [0.6, 0.4]


@pytest.mark.parametrize("history", [1, 2, 3])
def test_nothing_is_stable_before_that_many_divergences_are_known(history):
    written = run(KLASS(history=history), [[SURE, SURE, SURE]] * 6)
    one, every = [True, False, False], [True, True, True]
    assert written == [one] * history + [every] * (6 - history)


def test_confident_positions_that_still_move_wait():
    moving = [[0.95, 0.05], [0.05, 0.95]]  # a divergence of 2.65 nats
    written = run(KLASS(history=1), [[SURE, moving[n % 2]] for n in range(4)])
    assert written[1:] == [[True, False]] * 3


def test_stable_but_uncertain_positions_wait():
    assert run(KLASS(history=1), [[UNSURE, SURE, UNSURE]] * 3)[-1] == [False, True, False]


def test_confidence_must_exceed_tau():
    half = [0.5, 0.5]
    assert run(KLASS(tau=0.5, history=1), [[half, half, SURE]] * 2)[-1] == [False, False, True]


def test_the_divergence_is_of_the_new_prediction_from_the_old_one():
    # KL(new‖old) = 0.90 log(0.90/0.99) + 0.10 log(0.10/0.01) = 0.1445; KL(old‖new) = 0.0713.
    old, new = [0.99, 0.01], [0.90, 0.10]
    quiet = [0.95, 0.05]
    for bound, stable in [(0.1, False), (0.2, True)]:
        sampler = KLASS(tau=0.8, kl_bound=bound, history=1)
        assert run(sampler, [[quiet, old], [quiet, new]])[-1] == [True, stable]


def test_a_token_that_was_impossible_is_an_infinite_change():
    before, after = [1.0, 0.0], [0.999, 0.001]
    assert run(KLASS(history=1), [[SURE, before], [SURE, after]])[-1] == [True, False]


def test_without_a_stable_position_an_even_share_of_the_most_certain_is_committed():
    # The published code's entropy option takes the *least* certain here.
    written = run(KLASS(tau=0.9), [[UNSURE, [0.7, 0.3], [0.8, 0.2], [0.5, 0.5]]], steps=2)
    assert written == [[False, True, True, False]]


def test_settled_positions_are_not_written():
    assert run(KLASS(history=1), [[SURE] * 3] * 2, is_open=[False, True, True])[-1] == [False, True, True]


def test_sub_blocks_wait_their_turn():
    assert run(KLASS(history=1, block_len=2), [[SURE] * 4] * 2)[-1] == [True, True, False, False]
