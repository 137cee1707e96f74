"""The NELBO of an exact network is the likelihood; for any network it equals the formulas of the papers."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import dgemma
from dgemma.diffusion.noise import HybridNoise, MaskNoise, UniformNoise
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.schedule import Linear, OneMinusCosine, PlainCosine
from dgemma.train import Bound, CrossEntropy, nelbo
from dgemma.train.likelihood import evaluate
from dgemma.train.objective import Objective
from toy import JOINT, LENGTH, SEQUENCES, exact_network, hybrid_noise, likelihood, mask_noise, uniform_noise

NLL = -JOINT.log()  # (27,)
INDEX = {"000": 0, "120": 1 * 9 + 2 * 3}
SCHEDULES = [Linear(), OneMinusCosine(), PlainCosine()]


def quadrature(both_ends):
    """Return times and weights of 40-point Gauss-Legendre in u, with t = u⁴.

    Near t = 0, integrands can grow about as fast as log(1/t) or 1/√t. Near t = 1, they can fall like √(1 - t). In u,
    they are smoother.
    """
    u, w = (torch.tensor(values) for values in np.polynomial.legendre.leggauss(40))
    u, w = (u + 1) / 2, w / 2
    if not both_ends:
        return u**4, w * 4 * u**3
    return torch.cat([u**4 / 2, 1 - u**4 / 2]), torch.cat([w * 2 * u**3] * 2)


def expected_nelbo(noise, network, parametrisation, *, both_ends=False):
    """Return the exact expectation over all canvases, by quadrature over time: (27,), one bound per text."""
    canvases = torch.cartesian_prod(*[torch.arange(noise.vocab_size)] * LENGTH)
    rows = len(SEQUENCES), len(canvases)
    x, z = (t.expand(*rows, LENGTH).flatten(0, 1) for t in (SEQUENCES[:, None], canvases[None]))
    total = torch.zeros(len(SEQUENCES), dtype=torch.float64)
    for t, weight in zip(*quadrature(both_ends), strict=True):
        level = 1 - noise.schedule.alpha(t)
        logits = network.at(level).denoise(canvases).logits
        logits = torch.where(logits.isnan(), 0.0, logits)  # for canvases that cannot occur
        logits = logits.expand(rows[0], -1, -1, -1).flatten(0, 1)
        actual = nelbo.integrand(noise, logits, x, z, level.expand(len(x)), parametrisation=parametrisation)
        probability = likelihood(noise, level.reshape(1))[0][x, z].prod(-1)
        total += weight * (probability * actual.sum(-1)).reshape(rows).sum(-1)
    return total


MASKS = [(mask_noise(schedule=schedule), ("mean",), 1e-12) for schedule in SCHEDULES]
UNIFORM = [(uniform_noise(schedule=schedule), ("mean", "loo"), 1e-10) for schedule in (Linear(), OneMinusCosine())]
HYBRIDS = [
    (hybrid_noise(uniform_share=0.2, gamma=1.0), ("mean", "loo"), 1e-6),
    (hybrid_noise(uniform_share=0.6, gamma=2.0, schedule=OneMinusCosine()), ("loo",), 1e-6),
]


@pytest.mark.parametrize(("noise", "parametrisations", "tolerance"), [*MASKS, *UNIFORM, *HYBRIDS], ids=str)
def test_the_nelbo_of_the_exact_network_is_the_likelihood_of_every_text(noise, parametrisations, tolerance):
    for parametrisation in parametrisations:
        network = exact_network(noise, parametrisation)
        actual = expected_nelbo(noise, network, parametrisation, both_ends=noise.kind == "hybrid")
        torch.testing.assert_close(actual, NLL, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("noise", "values"),
    [(uniform_noise(), (2.939057, 4.930600)), (hybrid_noise(), (2.5726, 4.7872))],
    ids=["uniform", "hybrid"],
)
def test_using_the_mean_as_leave_one_out_costs_more(noise, values):
    actual = expected_nelbo(noise, exact_network(noise, "mean"), "loo", both_ends=noise.kind == "hybrid")
    assert actual[[INDEX["000"], INDEX["120"]]].tolist() == pytest.approx(values, abs=5e-5)


@dataclass(frozen=True)
class Fixed:
    """A network that is consistently wrong: its logits depend only on the token at the position."""

    table: torch.Tensor  # (V, V)

    def at(self, level: Any) -> "Fixed":
        return self

    def denoise(self, canvas):
        return Prediction(self.table[canvas])


def a_wrong_network(noise):
    return Fixed(torch.randn(noise.vocab_size, noise.vocab_size, dtype=torch.float64))


@pytest.mark.parametrize("noise", [mask_noise(), uniform_noise(), hybrid_noise()], ids=lambda n: n.kind)
def test_no_network_is_below_the_entropy(noise):
    actual = expected_nelbo(noise, a_wrong_network(noise), "loo", both_ends=True)
    assert (JOINT * actual).sum().item() > 2.424411  # the text's entropy


def random_case(vocab_size, mask=None):
    """Return logits, clean and noisy tokens in all combinations."""
    logits = 2 * torch.randn(3, 40, vocab_size, dtype=torch.float64)
    x, z = torch.randint(vocab_size, (2, 3, 40))
    z = torch.where(torch.rand(3, 40) < 0.4, x, z)
    if mask is not None:
        x = torch.where(x == mask, (x + 1) % vocab_size, x)
        z = torch.where(torch.rand(3, 40) < 0.3, mask, z)
    return logits, x, z, torch.tensor([0.03, 0.5, 0.98], dtype=torch.float64)


def test_uniform_integrand_is_the_formula_of_duo():
    """The formula of arXiv:2506.10892: x̄ = Kαx + 1 - α, i = z."""
    vocab = 11
    logits, x, z, level = random_case(vocab)
    alpha = (1 - level)[:, None, None]
    true = vocab * alpha * torch.nn.functional.one_hot(x, vocab).double() + 1 - alpha
    model = vocab * alpha * logits.softmax(-1) + 1 - alpha
    true_i, model_i = (side.gather(-1, z[..., None]) for side in (true, model))
    brackets = (
        vocab / model_i
        - vocab / true_i
        + (true / true_i * (model_i * true / (model * true_i)).log()).sum(-1, keepdim=True)
    )
    slope = math.pi / 2 * torch.sin(math.pi / 2 * PlainCosine().time(alpha))  # -α' of cos(πt/2)
    expected = (slope / (vocab * alpha) * brackets)[..., 0]
    noise = UniformNoise(vocab, schedule=PlainCosine())
    actual = nelbo.integrand(noise, logits, x, z, level, parametrisation="loo")
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)


def test_hybrid_integrand_is_the_formula_of_gidd():
    """The formula of arXiv:2503.04482: w·[KL(q ‖ q_θ) + r - log r - 1], with its three weights."""
    vocab, mask, gamma, share = 9, 2, 1.0, 0.2
    num_tokens = vocab - 1
    logits, x, z, level = random_case(vocab, mask)
    t = level[:, None, None]
    bulge = 2**gamma * share / (1 - share) * (t * (1 - t)) ** (gamma / 2)
    slope = 2**gamma * share / (1 - share) * gamma / 2 * (t * (1 - t)) ** (gamma / 2 - 1) * (1 - 2 * t)  # c'
    at_mask = torch.arange(vocab) == mask
    noise_part = torch.where(at_mask, t, bulge / num_tokens)
    probs = logits.masked_fill(at_mask, -torch.inf).softmax(-1)
    true, model = (
        ((1 - t) * side + noise_part) / (1 + bulge) for side in (torch.nn.functional.one_hot(x, vocab), probs)
    )
    ratio = true.gather(-1, z[..., None]) / model.gather(-1, z[..., None])
    bracket = ((true * (true / model).log()).sum(-1, keepdim=True) + ratio - ratio.log() - 1)[..., 0]
    t, bulge, slope = t[..., 0], bulge[..., 0], slope[..., 0]
    weight = torch.where(
        z == mask,
        1 / (t * (1 - t)),
        torch.where(
            z == x,
            (bulge + (1 - t) * slope) / (num_tokens * (1 - t) * (1 - t + bulge / num_tokens)),
            (bulge + (1 - t) * slope) / ((1 - t) * bulge),
        ),
    )
    noise = HybridNoise(vocab, mask_token_id=mask, uniform_share=share, gamma=gamma)
    actual = nelbo.integrand(noise, logits, x, z, level, parametrisation="loo")
    torch.testing.assert_close(actual, weight * bracket, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("parametrisation", ["mean", "loo"])
@pytest.mark.parametrize("kind", ["mask", "uniform", "hybrid"])
def test_float32_agrees_with_float64_at_the_published_vocabulary(kind, parametrisation):
    """Levels from 1e-6 to 1 - 1e-6, confident and vague predictions, clean and replaced tokens.

    Events are weighted by their probability: a clean token at level 1 - 1e-6 is rare and costs thousands of nats.
    """
    vocab, mask = 262_144, 4
    noise = {
        "mask": MaskNoise(vocab, mask_token_id=mask),
        "uniform": UniformNoise(vocab),
        "hybrid": HybridNoise(vocab, mask_token_id=mask),
    }[kind]
    level = torch.tensor([1e-6, 1e-3, 0.5, 1 - 1e-6], dtype=torch.float64)
    logits = torch.randn(4, 3, vocab) * 4  # float32 numbers, so that both precisions get the same
    x = torch.full((4, 3), 77)
    z = torch.tensor([77, mask, 1234]).expand(
        4, 3
    )  # clean, the mask (an ordinary token under uniform noise), another token
    logits[:, 0, 77] += 25
    single = nelbo.integrand(noise, logits, x, z, level, parametrisation=parametrisation)
    double = nelbo.integrand(noise, logits.double(), x, z, level, parametrisation=parametrisation)
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    assert double.isfinite().all()
    clean = noise.clean_share(level)
    probability = torch.stack([clean, 1 - clean, 1 - clean], dim=-1)  # (4, 3)
    torch.testing.assert_close(single.double() * probability, double * probability, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("noise", [mask_noise(), uniform_noise(), hybrid_noise()], ids=lambda n: n.kind)
@pytest.mark.parametrize("level", [0.0, 1e-4, 0.5, 1.0])
def test_gradients_are_finite_up_to_levels_0_and_1(noise, level):
    logits = torch.randn(4, 2, noise.vocab_size, requires_grad=True)
    x = torch.tensor([[0, 1], [2, 0], [1, 1], [0, 0]])
    z = noise.corrupt(x, torch.full((4,), level), *torch.rand(2, 4, 2))
    actual = nelbo.integrand(noise, logits, x, z, torch.full((4,), level))
    actual.sum().backward()
    assert actual.isfinite().all()
    assert logits.grad.isfinite().all()


def test_a_certain_and_correct_network_costs_nothing():
    """One-hot logits with -inf elsewhere must not give 0·inf."""
    x = torch.tensor([[0, 1, 2]])
    for noise in (mask_noise(), uniform_noise(), hybrid_noise()):
        onehot = torch.nn.functional.one_hot(x, noise.vocab_size).double().log()
        for z in torch.cartesian_prod(*[torch.arange(noise.vocab_size)] * 3):
            actual = nelbo.integrand(noise, onehot, x, z[None], torch.tensor([0.4]), parametrisation="loo")
            assert actual.abs().max() < 1e-12


def test_levels_may_be_given_per_row_or_per_position():
    noise, (logits, x, z, level) = UniformNoise(11), random_case(11)
    by_row = nelbo.integrand(noise, logits, x, z, level)
    by_position = nelbo.integrand(noise, logits, x, z, level[:, None].expand(3, 40).contiguous())
    assert torch.equal(by_row, by_position)


@dataclass(frozen=True)
class HalfMasked(HybridNoise):
    """The process of docs/extending.md. The hybrid's formula would charge 0.43 nats for a token that costs 0.69."""

    def clean_share(self, noise_level: torch.Tensor) -> torch.Tensor:
        return 1 - noise_level

    def mask_share(self, noise_level: torch.Tensor) -> torch.Tensor:
        return torch.full_like(noise_level, 0.5)


def test_a_custom_noise_has_no_bound():
    noise, x, level = HalfMasked(4, mask_token_id=3), torch.zeros(1, 2, dtype=torch.int64), torch.tensor([0.5])
    model = dgemma.DiffusionGemma(dgemma.presets.tiny().replace(vocab_size=4))
    for call in (
        lambda: nelbo.integrand(noise, torch.zeros(1, 2, 4), x, x, level),
        lambda: nelbo.reconstruction(noise, torch.zeros(1, 2, 4), x, x, level),
        lambda: evaluate(model, x, noise),
        lambda: Objective(noise=noise, canvas_len=4, loss=Bound()),
    ):
        with pytest.raises(ValueError, match=r"must be MaskNoise, UniformNoise or HybridNoise itself.* got HalfMasked"):
            call()
    assert Objective(noise=noise, canvas_len=4).loss == CrossEntropy()
