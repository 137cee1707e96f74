"""BlockRefinement: the quota, the threshold beyond it, commits that persist on uniform noise, and edits."""

from dataclasses import replace

import torch

from dgemma.diffusion.noise import UniformNoise
from dgemma.diffusion.prediction import Prediction
from dgemma.sampling.refinement import BlockRefinement
from toy import fresh_state, update

VOCAB = 50


def start(canvas_len, steps, *, seed=0):
    canvas = torch.randint(VOCAB, (1, canvas_len), generator=torch.Generator().manual_seed(seed))
    return fresh_state(canvas, UniformNoise(VOCAB), steps)


def test_the_quota_is_what_diffusers_publishes_for_256_tokens_and_48_steps():
    sampler, state = BlockRefinement(tau=1.0), start(256, 48)
    committed = []
    for _ in range(48):
        prediction = Prediction(torch.zeros(1, 256, VOCAB))
        state = update(prediction, sampler(prediction, state), sampler, state, None)
        committed.append(256 - int(state.open.sum()))
    assert committed[:3] == [6, 11, 16]
    assert committed[-1] == 256


def test_confident_positions_commit_beyond_the_quota_and_later_steps_commit_fewer():
    sampler, state = BlockRefinement(tau=0.5), start(256, 48)
    logits = torch.zeros(1, 256, VOCAB)
    logits[0, 100:120, 7] = 1e3
    prediction = Prediction(logits)
    decision = sampler(prediction, state)
    assert decision.write[0].nonzero()[:, 0].tolist() == list(range(100, 120))
    state = update(prediction, decision, sampler, state, None)
    assert sampler(Prediction(torch.zeros(1, 256, VOCAB)), state).write.sum() == 0  # 20 > ⌈2 · 256 / 48⌉


def test_a_confidence_equal_to_tau_does_not_commit():
    # All positions have confidence 1, which does not exceed tau = 1. The quota commits one of eight.
    logits = torch.full((1, 8, VOCAB), -torch.inf)
    logits[..., 3] = 0.0
    assert BlockRefinement(tau=1.0)(Prediction(logits), start(8, 8)).write.sum() == 1


def test_the_most_confident_positions_fill_the_quota():
    logits = torch.zeros(1, 4, VOCAB)
    logits[0, :, 3] = torch.tensor([1.0, 4.0, 3.0, 2.0])
    assert BlockRefinement(tau=1.0)(Prediction(logits), start(4, 2)).write.tolist() == [[False, True, True, False]]


def test_committed_tokens_stay_and_the_rest_returns_to_noise():
    sampler, state = BlockRefinement(tau=1.0), start(32, 4)
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        prediction = Prediction(torch.randn(1, 32, VOCAB, generator=generator))
        before = state
        decision = sampler(prediction, state)
        assert torch.equal(decision.renoise, state.open & ~decision.write)
        state = update(prediction, decision, sampler, state, None)
        assert torch.equal(state.canvas[~before.open], before.canvas[~before.open])
    assert not state.open.any()
    assert torch.equal(state.draft, state.canvas)


def test_frozen_positions_do_not_count_towards_the_quota():
    frozen = torch.tensor([[True] * 6 + [False] * 2])
    state = replace(start(8, 2), frozen=frozen, open=~frozen)
    assert BlockRefinement(tau=1.0)(Prediction(torch.zeros(1, 8, VOCAB)), state).write.sum() == 1


def test_edits_replace_committed_tokens_by_a_different_confident_argmax():
    state = replace(start(4, 8), canvas=torch.tensor([[0, 1, 2, 3]]), open=torch.zeros(1, 4, dtype=torch.bool))
    state = replace(state, frozen=torch.tensor([[False, False, False, True]]))
    logits = torch.zeros(1, 4, VOCAB)
    logits[0, 0, 9], logits[0, 1, 1], logits[0, 3, 9] = 20.0, 20.0, 20.0  # another token, the same, another but frozen
    decision = BlockRefinement(tau_edit=0.5)(Prediction(logits), state)
    assert decision.write.tolist() == [[True, False, False, False]]
    assert decision.tokens[0, 0] == 9
    assert not BlockRefinement()(Prediction(logits), state).write.any()


def test_an_edit_is_the_argmax_even_where_proposals_are_sampled():
    state = replace(start(1, 8), canvas=torch.tensor([[0]]), open=torch.zeros(1, 1, dtype=torch.bool))
    state = replace(state, injected={"token": torch.full((1, 1), 0.999, dtype=torch.float64)})  # draws token 2
    decision = BlockRefinement(tau_edit=0.5)(Prediction(torch.tensor([[[0.05, 0.75, 0.2]]]).log()), state)
    assert decision.write.item()
    assert decision.tokens.item() == 1
