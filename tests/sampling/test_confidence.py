"""Confidence: exact at one token per step for every order, the published quotas, sub-blocks and order noise."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from dgemma.diffusion.decision import Decision
from dgemma.diffusion.noise import MaskNoise
from dgemma.diffusion.prediction import Prediction
from dgemma.sampling.base import Sampler
from dgemma.sampling.confidence import Confidence
from dgemma.sampling.ranking import best, choose_sub_block
from toy import fresh_state, mask_noise, permutations, propagate, total_variation, update

ORDER_CELLS = {"order": lambda prediction, state: permutations(state)}
MASK_ID = 4


@dataclass(frozen=True)
class SampledConfidence(Sampler):
    """The negative control: rank positions by the probability of the *sampled* token."""

    valid_for: ClassVar[frozenset[str]] = frozenset({"mask"})

    def __call__(self, prediction, state):
        tokens = prediction.sample(state.uniform("token"))
        write = best(prediction.log_prob(tokens), state.open, 1)
        return Decision(tokens=tokens, write=write, renoise=torch.zeros_like(write))


def counts(sampler, *, canvas_len, steps, frozen=None):
    """Return the number of positions that each step commits, and these positions in order."""
    canvas = torch.full((1, canvas_len), MASK_ID)
    state = fresh_state(canvas, MaskNoise(6, mask_token_id=MASK_ID), steps)
    if frozen is not None:
        state = replace(state, frozen=frozen, open=~frozen)
    state = replace(state, memory=sampler.start(state))
    logits = torch.randn(1, canvas_len, 6, generator=torch.Generator().manual_seed(5))
    logits[..., MASK_ID] = -torch.inf
    committed, positions = [], []
    for _ in range(steps):
        prediction = Prediction(logits)
        decision = sampler(prediction, state)
        committed.append(int(decision.write.sum()))
        positions.append(decision.write[0].nonzero()[:, 0].tolist())
        state = update(prediction, decision, sampler, state, None)
    return committed, positions


@pytest.mark.parametrize("block_len", [None, 1, 2], ids=["whole", "left-to-right", "ragged-blocks"])
@pytest.mark.parametrize("order", ["confidence", "log_confidence", "margin", "entropy", "random"])
def test_one_token_per_step_reproduces_the_joint_distribution(order, block_len):
    result = propagate(Confidence(order=order, block_len=block_len), mask_noise(), steps=3, cells=ORDER_CELLS)
    assert total_variation(result.law) < 1e-12


def test_choosing_by_the_sampled_token_is_biased_even_at_one_token_per_step():
    law = propagate(SampledConfidence(), mask_noise(), steps=3).law
    assert total_variation(law) == pytest.approx(0.40812, abs=5e-6)
    assert -torch.xlogy(law, law).sum().item() == pytest.approx(1.32, abs=5e-3)  # the text's own entropy is 2.42


def test_all_at_once_is_the_product_of_the_marginals():
    assert total_variation(propagate(Confidence(), mask_noise(), steps=1).law) == pytest.approx(0.4859, abs=5e-5)


def test_fixed_quota_gives_the_larger_shares_first_as_llada_does():
    assert counts(Confidence(), canvas_len=10, steps=4)[0] == [3, 3, 2, 2]
    assert counts(Confidence(), canvas_len=3, steps=5)[0] == [1, 1, 1, 0, 0]


def test_cosine_quota_leaves_as_many_masks_as_maskgit():
    # ⌊16 cos(π/2 · n/8)⌋ for n = 1..8 is 15, 14, 13, 11, 8, 6, 3, 0.
    assert counts(Confidence(quota="cosine"), canvas_len=16, steps=8)[0] == [1, 1, 1, 2, 3, 2, 3, 3]
    # ⌊8 cos(π/3)⌋ is 4, whichever way cos rounds.
    assert counts(Confidence(quota="cosine"), canvas_len=8, steps=3)[0] == [2, 2, 4]


def test_cosine_quota_commits_at_least_one_position_per_step():
    # ⌊4 cos(π/2 · n/12)⌋ stays at 3 for n = 1..5, but no step is wasted.
    assert counts(Confidence(quota="cosine"), canvas_len=4, steps=12)[0][:4] == [1, 1, 1, 1]


def test_quotas_count_unfrozen_positions():
    frozen = torch.tensor([[True] * 4 + [False] * 8])
    for quota in ("fixed", "cosine"):
        committed, positions = counts(Confidence(quota=quota), canvas_len=12, steps=4, frozen=frozen)
        assert sum(committed) == 8
        assert min(min(p) for p in positions) >= 4
    assert committed == [1, 2, 2, 3]  # ⌊8 cos(π/2 · n/4)⌋ is 7, 5, 3, 0


@pytest.mark.parametrize("quota", ["fixed", "cosine"])
def test_sub_blocks_are_finished_from_left_to_right_and_share_the_steps_evenly(quota):
    committed, positions = counts(Confidence(block_len=4, quota=quota), canvas_len=12, steps=6)
    for block in range(3):
        mine = sorted(positions[2 * block] + positions[2 * block + 1])
        assert mine == [4 * block + i for i in range(4)]
    # cos(π/4) = 0.707 leaves 2 of 4.
    assert committed == [2] * 6


def test_fewer_steps_than_sub_blocks_still_fill_the_canvas_in_order():
    _, positions = counts(Confidence(block_len=2), canvas_len=10, steps=2)
    assert sorted(positions[0]) == [0, 1, 2, 3]  # two of five sub-blocks are due after the first of two steps
    assert sorted(positions[1]) == [4, 5, 6, 7, 8, 9]
    assert counts(Confidence(block_len=2), canvas_len=5, steps=1)[0] == [5]  # one position in the last sub-block


def test_a_ragged_last_sub_block_is_filled():
    committed, positions = counts(Confidence(block_len=4), canvas_len=6, steps=3)
    assert committed == [2, 2, 2]
    assert sorted(positions[0] + positions[1]) == [0, 1, 2, 3]
    assert positions[2] == [4, 5]


def test_a_frozen_sub_block_is_skipped():
    frozen = torch.tensor([[True, True, False, False]])
    state = fresh_state(torch.zeros(1, 4, dtype=torch.int64), MaskNoise(6), 4)
    sub_block = choose_sub_block(replace(state, frozen=frozen, open=~frozen), 2)
    assert sub_block.span.tolist() == [[False, False, True, True]]
    assert sub_block.end_step.tolist() == [4]


def test_annealed_order_noise_fades_with_the_steps_left():
    # MaskGIT's noise at step n of N has strength 4.5 (1 - (n+1)/N). Position 0 draws a Gumbel of 6.907, and position 1
    # draws -1.933, which is 8.84 less. The log-confidence of position 0 is 0.645 less than that of position 1. Noise
    # adds 4.5 · 8.84 (1 - (n+1)/64) to it: 1.865 at n = 60, and 0.622 at n = 62.
    u = torch.tensor([[0.999, 0.001]], dtype=torch.float64)
    logits = torch.tensor([[[0.0, 0.0], [3.0, 0.0]]])
    state = fresh_state(torch.zeros(1, 2, dtype=torch.int64), MaskNoise(6), 64)
    state = replace(state, injected={"order": u, "token": u})
    sampler = Confidence(order="log_confidence", order_temperature=4.5, anneal=True)
    for step, winner in [(0, 0), (60, 0), (62, 1)]:
        write = sampler(Prediction(logits), replace(state, step=torch.tensor([step]))).write
        assert write.tolist() == [[winner == 0, winner == 1]]


def test_a_uniform_of_zero_cannot_lose_an_open_position():
    u = torch.zeros(1, 3, dtype=torch.float64)
    state = fresh_state(torch.zeros(1, 3, dtype=torch.int64), MaskNoise(6), 1)
    state = replace(state, injected={"order": u, "token": u}, open=torch.tensor([[False, False, True]]))
    write = Confidence(order_temperature=1.0)(Prediction(torch.zeros(1, 3, 4)), state).write
    assert write.tolist() == [[False, False, True]]


def test_best_returns_all_candidates_if_count_is_larger():
    among = torch.tensor([[True, False, True]])
    assert best(torch.tensor([[0.1, 0.9, 0.5]]), among, 7).tolist() == among.tolist()
    assert best(torch.tensor([[0.1, 0.9, 0.5]]), among, torch.tensor([-2])).tolist() == [[False] * 3]
    assert best(torch.zeros(1, 3), among, 1).tolist() == [[True, False, False]]  # leftmost on ties
    assert best(torch.tensor([[-math.inf, 0.0, -math.inf]]), among, 1).tolist() == [[True, False, False]]
