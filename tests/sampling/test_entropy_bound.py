"""EntropyBound: golden numbers on the toy, mechanics against transformers, and the pitfalls of the rule."""

import math
from dataclasses import replace

import pytest
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
)

from dgemma.diffusion.noise import MaskNoise, UniformNoise
from dgemma.diffusion.prediction import Prediction
from dgemma.sampling.entropy_bound import EntropyBound
from toy import divergence, fresh_state, mask_noise, propagate, total_variation, update

ORDERS = ["entropy", "confidence", "margin"]


def decide(sampler, logits, *, is_open=None, noise=None):
    state = fresh_state(torch.zeros(logits.shape[:2], dtype=torch.int64), noise or UniformNoise(logits.shape[-1]), 4)
    if is_open is not None:
        state = replace(state, open=is_open)
    return sampler(Prediction(logits), state)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("bound", "nfe", "kl"), [(0.0, 3, 0.0), (0.1, 3, 0.0), (0.5, 3, 0.0), (1.0, 2, 0.2195), (math.inf, 1, 0.709866)]
)
def test_forwards_and_divergence_of_each_bound_equal_values_computed_by_hand(bound, order, nfe, kl):
    result = propagate(EntropyBound(bound=bound, order=order), mask_noise(), steps=3)
    assert result.nfe == pytest.approx(nfe, abs=1e-12)
    assert divergence(result.law) == pytest.approx(kl, abs=5e-5)
    assert divergence(result.law) <= (bound * result.nfe if bound else 1e-12)
    if kl == 0:
        assert total_variation(result.law) < 1e-12


@pytest.mark.parametrize("bound", [1e-9, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("sharpness", [0.1, 3.0, 12.0], ids=["flat", "mixed", "sharp"])
def test_accepts_the_mask_transformers_accepts(bound, sharpness):
    batch, canvas_len, vocab = 8, 48, 60
    logits = torch.randn(batch, canvas_len, vocab, generator=torch.Generator().manual_seed(3)) * sharpness
    reference = EntropyBoundSampler(EntropyBoundSamplerConfig(entropy_bound=bound), canvas_len, vocab, 48)
    canvas = torch.zeros(batch, canvas_len, dtype=torch.int64)
    proposal = torch.ones_like(canvas)
    accepted = reference.accept_canvas(canvas, proposal, logits, 48)

    decision = decide(EntropyBound(bound=bound), logits)
    assert torch.equal(decision.write, reference.accepted_token_mask)
    assert torch.equal(torch.where(decision.write, proposal, canvas), accepted)
    assert torch.equal(decision.renoise, ~reference.accepted_token_mask)


def test_in_other_orders_the_largest_entropy_so_far_is_subtracted_and_not_the_newest():
    # Margins 0.25 and 0.10, entropies 1.0397 and 0.6881: by margin the less certain distribution comes first.
    # Σh - max h over the two positions is 0.6881. Subtracting the newest entropy instead would give 1.0397.
    logits = torch.tensor([[[0.50, 0.25, 0.25], [0.55, 0.45, 0.0]]]).log()
    assert decide(EntropyBound(bound=0.7, order="margin"), logits).write.tolist() == [[True, True]]
    assert decide(EntropyBound(bound=0.65, order="margin"), logits).write.tolist() == [[True, False]]


def test_closed_positions_are_not_accepted_and_do_not_count_towards_the_bound():
    logits = torch.zeros(1, 3, 4)  # three flat positions, log 4 = 1.386 nats each
    is_open = torch.tensor([[True, False, True]])
    assert decide(EntropyBound(bound=1.4), logits, is_open=is_open).write.tolist() == [[True, False, True]]
    assert decide(EntropyBound(bound=1.3), logits, is_open=is_open).write.tolist() == [[True, False, False]]


def test_entropy_is_taken_at_the_sampling_temperature():
    logits = torch.tensor([[[2.0, 0.0], [2.0, 0.0]]])
    state = fresh_state(torch.zeros(1, 2, dtype=torch.int64), UniformNoise(2), 4)
    hot, cold = (EntropyBound(bound=0.1)(Prediction(logits).shaped(temperature=t), state).write for t in (1.0, 0.5))
    assert hot.sum() == 1  # h = 0.365
    assert cold.sum() == 2  # h = 0.090


def test_greedy_writes_the_argmax():
    logits = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))
    decision = decide(EntropyBound(bound=9.0, greedy=True), logits, noise=MaskNoise(6))
    assert torch.equal(decision.tokens, logits.argmax(-1))


def committed(sampler, noise):
    """Take a step that accepts position 0 only. Return the canvas after it, and the tokens that would be committed."""
    logits = torch.tensor([[[9.0, 0.0, 0.0, 0.0, 0.0], [0.2, 0.1, 0.0, 0.3, 0.0]]])
    state = fresh_state(torch.tensor([[3, 4]]), noise, 4)
    after = update(Prediction(logits), sampler(Prediction(logits), state), sampler, state)
    return after.canvas[0].tolist(), after.draft[0].tolist()


def test_google_commits_the_canvas_where_transformers_commits_the_argmax():
    # Position 1 was refused and is uniform noise again. Only Google's convention commits it.
    canvas, draft = committed(EntropyBound(bound=0.0, commit="canvas"), UniformNoise(5))
    assert draft == canvas
    canvas, draft = committed(EntropyBound(bound=0.0), UniformNoise(5))
    assert canvas[1] != 3
    assert draft == [0, 3]


def test_a_mask_is_not_committed_with_the_canvas():
    canvas, draft = committed(EntropyBound(bound=0.0, commit="canvas"), MaskNoise(5, mask_token_id=4))
    assert canvas == [0, 4]
    assert draft == [0, 3]
