"""The exact likelihood of texts under samplers: equal to the law of what samplers commit, by enumeration."""

import itertools
import math

import pytest
import torch

import dgemma
from dgemma.sampling import (
    KLASS,
    Ancestral,
    Confidence,
    EntropyBound,
    FactorThreshold,
    Fork,
    SoftEntropyBound,
    Threshold,
)
from dgemma.train import TrainBatch, evaluate
from exact_networks import ExactModel, Network
from learning_toy import NOISE, NUM_TOKENS, OPTIONS, small_model
from toy import JOINT, SEQUENCES, mask_noise, propagate

SAMPLERS = [
    Threshold(tau=0.7),
    Threshold(tau=0.6, greedy=True),
    FactorThreshold(factor=1.0),
    EntropyBound(bound=0.4),
    Confidence(),
    Confidence(order="margin", quota="cosine"),
    Confidence(block_len=2),
    KLASS(tau=0.5, kl_bound=1.0),
    Fork(tau=0.7),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_likelihood_is_the_law_of_what_the_sampler_commits(sampler, steps):
    """`propagate` enumerates all draws of the real sampler, on the exact network of a Markov text."""
    noise = mask_noise()
    model = ExactModel(Network(JOINT, noise, 4))
    tokens = torch.cat((torch.zeros(27, 1, dtype=torch.int64), SEQUENCES), dim=1)
    likelihood = evaluate(model, tokens, noise, num_samples=1, sampler=sampler, steps=steps, progress=False)
    law = (-likelihood.rows.by_sampler).exp()
    assert float(law.sum()) == pytest.approx(1.0, abs=1e-9)
    torch.testing.assert_close(law, propagate(sampler, noise, steps=steps).law, atol=1e-9, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [Threshold(tau=0.7), EntropyBound(bound=0.4), Fork(tau=0.5)], ids=repr)
def test_the_probabilities_of_all_texts_of_two_canvases_add_up_to_one(sampler):
    """A network that sees its prompt and its own last prediction, and prompts of different lengths."""
    model = small_model()
    with torch.no_grad():
        model.norm.weight.mul_(3)
    texts = torch.tensor(list(itertools.product(range(NUM_TOKENS), repeat=4)))
    for prompt in ([0], [2, 1, 1]):
        tokens = torch.cat((torch.tensor(prompt).expand(81, -1), texts), dim=1)
        length = torch.full((81,), tokens.shape[1])
        batch = TrainBatch(tokens=tokens, prompt_len=torch.full_like(length, len(prompt)), length=length)
        likelihood = evaluate(model, batch, NOISE, num_samples=1, sampler=sampler, progress=False)
        law = (-likelihood.rows.by_sampler).exp()
        assert float(law.sum()) == pytest.approx(1.0, abs=1e-9)
    options = {**OPTIONS, "sampler": sampler, "temperature": 1.0, "max_new_tokens": 4}
    out = dgemma.generate(model, torch.tensor([prompt] * 1000), **options, progress=False)
    counts = torch.bincount((out.new_tokens * torch.tensor([27, 9, 3, 1])).sum(1), minlength=81)
    statistic = ((counts - 1000 * law).square() / (1000 * law)).sum()
    assert float(statistic) < 80 + 5 * math.sqrt(160)  # chi-squared with 80 degrees of freedom


def test_frozen_tokens_cost_nothing_and_are_seen():
    noise = mask_noise()
    model = ExactModel(Network(JOINT, noise, 4))
    model.takes_position_levels = True  # a clean token has probability 0 at level 1
    tokens = torch.cat((torch.zeros(27, 1, dtype=torch.int64), SEQUENCES), dim=1)
    length = torch.full((27,), 4)
    frozen = torch.tensor([False, False, True, False]).expand(27, -1)
    batch = TrainBatch(tokens=tokens, prompt_len=torch.ones_like(length), length=length, frozen=frozen)
    likelihood = evaluate(model, batch, noise, num_samples=1, sampler=Confidence(), progress=False)
    condition = torch.stack([JOINT[SEQUENCES[:, 1] == middle].sum() for middle in range(3)])[SEQUENCES[:, 1]]
    torch.testing.assert_close((-likelihood.rows.by_sampler).exp(), JOINT / condition, atol=1e-9, rtol=0)


def test_samplers_with_random_positions_and_other_noise_are_refused():
    model, tokens = small_model(), torch.zeros(1, 3, dtype=torch.int64)
    for sampler in (Ancestral(), Confidence(order="random"), Confidence(order_temperature=1.0), SoftEntropyBound()):
        with pytest.raises(ValueError, match="fixed order"):
            evaluate(model, tokens, NOISE, sampler=sampler, progress=False)
    with pytest.raises(ValueError, match="MaskNoise"):
        evaluate(model, tokens, dgemma.UniformNoise(NUM_TOKENS + 1), sampler=Threshold(), progress=False)
    without = evaluate(model, tokens, NOISE, num_samples=1, progress=False)
    assert without.by_sampler is None
    assert "by the sampler" not in str(without)
    with_sampler = evaluate(model, tokens, NOISE, num_samples=1, sampler=Threshold(), progress=False)
    assert with_sampler.summary()["by_sampler"] > 0
    assert "by the sampler" in str(with_sampler)
