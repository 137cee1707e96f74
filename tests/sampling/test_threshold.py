"""Threshold and FactorThreshold: the comparison, the position that is always committed, and Fast-dLLM's theorem."""

from dataclasses import replace

import pytest
import torch

from dgemma.diffusion.noise import MaskNoise
from dgemma.diffusion.prediction import Prediction
from dgemma.sampling.threshold import FactorThreshold, Threshold
from toy import fresh_state, mask_noise, propagate, total_variation


def decide(sampler, probs, *, is_open=None):
    """probs: the confidence of each position of one row, a two-token vocabulary."""
    confidence = torch.tensor([probs], dtype=torch.float64)
    logits = torch.stack([confidence, 1 - confidence], dim=-1).log()
    state = fresh_state(torch.zeros(1, len(probs), dtype=torch.int64), MaskNoise(6), 8)
    if is_open is not None:
        state = replace(state, open=torch.tensor([is_open]))
    return sampler(Prediction(logits), state).write[0].tolist()


def test_a_confidence_equal_to_tau_is_accepted():
    # Two equal logits have confidence exactly 1/2.
    assert decide(Threshold(tau=0.5), [0.5, 0.9, 0.5]) == [True, True, True]


def test_the_best_position_is_committed_when_none_passes():
    assert decide(Threshold(tau=0.99), [0.6, 0.8, 0.7]) == [False, True, False]
    assert decide(FactorThreshold(factor=0.01), [0.6, 0.8, 0.7]) == [False, True, False]


def test_settled_positions_are_not_written():
    assert decide(Threshold(tau=0.6), [0.9, 0.8, 0.7], is_open=[False, True, True]) == [False, True, True]
    assert decide(FactorThreshold(), [0.99, 0.98, 0.97], is_open=[False, True, True]) == [False, True, True]
    assert decide(FactorThreshold(), [0.99, 0.98, 0.97], is_open=[False, False, False]) == [False, False, False]


def test_factor_takes_the_largest_prefix_under_the_bound():
    # (n + 1)(1 - c₍ₙ₎) is 0.02, 0.12, 0.40, 1.5 for the four in descending order.
    row = [0.70, 0.99, 0.90, 0.96]
    assert decide(FactorThreshold(factor=1.0), row) == [False, True, True, True]
    assert decide(FactorThreshold(factor=0.3), row) == [False, True, False, True]
    assert decide(FactorThreshold(factor=1.6), row) == [True, True, True, True]


def test_factor_refuses_the_last_position_if_it_fails_the_bound():
    # 3 · (1 - 0.5) is 1.5, so the second and last position fails. Another implementation accepts it.
    assert decide(FactorThreshold(factor=1.0), [0.99, 0.5]) == [True, False]


def test_factor_bound_is_strict():
    # The first position always passes. The second has 3 · (1 - 2/3) = 1, which is not below 1, so it is refused.
    assert decide(FactorThreshold(factor=1.0), [0.75, 2 / 3]) == [True, False]


def joint_argmax_differs(sampler, joint):
    """Rows where the tokens written are not the most probable ones of their joint law. joint: (R, 2, 2, 2)."""
    marginals = torch.stack([joint.sum(dim=[d for d in (1, 2, 3) if d != axis]) for axis in (1, 2, 3)], dim=1)
    state = fresh_state(torch.zeros(len(joint), 3, dtype=torch.int64), MaskNoise(6), 8)
    decision = sampler(Prediction(marginals.log()), state)
    differs = torch.zeros(len(joint), dtype=torch.bool)
    for pattern in decision.write.unique(dim=0):
        rows = (decision.write == pattern).all(-1)
        absent = [d + 1 for d in range(3) if not pattern[d]]
        law = joint[rows].sum(dim=absent) if absent else joint[rows]  # (r, 2, ..., 2) over those written
        best = torch.stack(torch.unravel_index(law.flatten(1).argmax(-1), law.shape[1:]), dim=-1)
        differs[rows] = (best != decision.tokens[rows][:, pattern]).any(-1)
    return differs, decision.write.sum(-1)


def random_joints(num_rows):
    """Joints around a random mode: from nearly certain ones to flat ones."""
    generator = torch.Generator().manual_seed(11)
    noise = -torch.rand(num_rows, 8, generator=generator, dtype=torch.float64).log()
    noise = noise**3
    noise = noise / noise.sum(-1, keepdim=True)
    share = torch.rand(num_rows, 1, generator=generator, dtype=torch.float64)
    mode = torch.nn.functional.one_hot(torch.randint(8, (num_rows,), generator=generator), 8).double()
    return ((1 - share) * mode + share * noise).reshape(-1, 2, 2, 2)


def test_with_factor_one_the_tokens_written_are_the_joint_argmax():
    joint = random_joints(20_000)
    differs, num_written = joint_argmax_differs(FactorThreshold(factor=1.0, greedy=True), joint)
    assert (num_written >= 2).sum() > 5_000  # the claim is empty for one token
    assert not differs.any()


def test_with_a_larger_factor_the_tokens_written_may_differ_from_the_joint_argmax():
    differs, _ = joint_argmax_differs(FactorThreshold(factor=1.5, greedy=True), random_joints(20_000))
    assert differs.any()


@pytest.mark.parametrize("sampler", [Threshold(tau=1.0), FactorThreshold(factor=1e-9)], ids=["tau", "factor"])
def test_a_threshold_that_nothing_reaches_commits_one_token_per_step_exactly(sampler):
    result = propagate(sampler, mask_noise(), steps=3)
    assert result.nfe == pytest.approx(3)
    assert total_variation(result.law) < 1e-12


def test_sub_blocks_wait_their_turn():
    assert decide(Threshold(tau=0.5, block_len=2), [0.6, 0.7, 0.99, 0.99]) == [True, True, False, False]
    assert decide(FactorThreshold(block_len=2), [0.6, 0.99, 0.99, 0.99]) == [False, True, False, False]
