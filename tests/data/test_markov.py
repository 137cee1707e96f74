"""Likelihood, entropy, samples and posterior of the example's Markov chain agree with enumeration and counting."""

import itertools
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dgemma

example = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "examples" / "12_markov_chain.py")))
MarkovChain, MarkovSource, gap_by_level = example.MarkovChain, example.MarkovSource, example.gap_by_level
SMALL = MarkovChain.random(num_states=4, num_successors=3, seed=2)


def test_likelihoods_of_all_texts_add_up_to_one_and_average_to_the_entropy():
    texts = torch.tensor(list(itertools.product(range(4), repeat=5)))
    nll = SMALL.nll(texts)
    assert (-nll).exp().sum().item() == pytest.approx(1.0, abs=1e-12)
    possible = nll.isfinite()
    assert ((-nll).exp() * nll)[possible].sum().item() == pytest.approx(SMALL.entropy(5), abs=1e-12)


def test_the_default_chain_is_the_published_check():
    """254 states, 30 tokens. The paper reports about 1.73 nats per token, for a chain drawn like this one."""
    chain = MarkovChain.random()
    assert (chain.num_states, int((chain.move > 0).sum())) == (254, 254 * 7)
    assert chain.entropy(30) / 30 == pytest.approx(1.73, abs=0.03)


def test_texts_follow_the_chain():
    """40,000 bigrams of a small chain: each count within five standard deviations of its expectation."""
    tokens = MarkovSource(chain=SMALL, bos=4, length=11, seed=3)(0, range(4000)).tokens[:, 1:]
    counts = torch.zeros(4, 4, dtype=torch.float64)
    counts.index_put_((tokens[:, :-1].flatten(), tokens[:, 1:].flatten()), torch.ones(()).double(), accumulate=True)
    expected = counts.sum(1, keepdim=True) * SMALL.move
    assert ((counts - expected).abs() <= 5 * (expected * (1 - SMALL.move)).sqrt() + 1e-9).all()
    first = tokens[:, 0].bincount(minlength=4).double()
    assert ((first - 1000).abs() < 5 * (4000 * 0.25 * 0.75) ** 0.5).all()


def _uniform(z, x, level):
    """Return q(z | x) over the chain's four states and two more tokens."""
    return (1 - level) * (z == x) + level / 6


def _mask(z, x, level):
    return (1 - level) * (z == x) + level * (z == 5)


@pytest.mark.parametrize(
    ("noise", "q"), [(dgemma.UniformNoise(6), _uniform), (dgemma.MaskNoise(6, mask_token_id=5), _mask)]
)
def test_leave_one_out_is_bayes_rule_over_all_texts(noise, q):
    """Sum the joint probability of each text and the other noised tokens, by the text's token at the position."""
    texts = torch.tensor(list(itertools.product(range(4), repeat=4)))
    p_text = (-SMALL.nll(texts)).exp()
    clean, levels = texts[p_text > 0][::7], (0.05, 0.6)
    u = torch.rand(2, *clean.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = torch.cat([noise.corrupt(clean, torch.full((len(clean),), level), *u) for level in levels])
    level = torch.tensor(levels, dtype=torch.float64).repeat_interleave(len(clean))
    found = SMALL.leave_one_out(z, noise, level)
    assert found.dtype == torch.float64
    for row, canvas in enumerate(z):
        seen = q(canvas, texts, level[row])  # (texts, 4)
        for position in range(4):
            others = [p for p in range(4) if p != position]
            weight = p_text * seen[:, others].prod(1)
            expected = torch.stack([weight[texts[:, position] == state].sum() for state in range(4)]) / weight.sum()
            torch.testing.assert_close(found[row, position, :4], expected, atol=1e-13, rtol=0)
    assert not found[..., 4:].any()


class Exact:
    """The exact network of `SMALL`; `flat` is the share by which its logits are scaled down."""

    device, takes_noise_level = torch.device("cpu"), True

    def __init__(self, noise, flat=0.0):
        self.noise, self.flat = noise, flat

    def new_cache(self, batch_size):
        return None

    def denoise(self, canvas, cache, *, noise_level):
        logits = SMALL.leave_one_out(canvas[:, 1:], self.noise, noise_level).log().clamp(min=-1e4) * (1 - self.flat)
        return dgemma.Prediction(torch.cat([logits[:, :1], logits], dim=1))


@pytest.mark.parametrize("noise", [dgemma.UniformNoise(6), dgemma.MaskNoise(6, mask_token_id=4)])
def test_the_exact_network_has_no_gap_at_any_level(noise):
    tokens = MarkovSource(chain=SMALL, bos=5, length=8)(0, range(64)).tokens
    found = gap_by_level(Exact(noise), tokens, noise, SMALL, parametrisation="loo")
    torch.testing.assert_close(found.nats, torch.zeros(10).double(), atol=1e-12, rtol=0)
    assert gap_by_level(Exact(noise, flat=0.6), tokens, noise, SMALL, parametrisation="loo").nats.sum() > 0.01
