"""`evaluate` with exact networks: the bound is the likelihood, whatever is truncated, under any schedule. The
interval contains the likelihood as often as its confidence says.
"""

import math
from functools import partial

import pytest
import torch

from dgemma.diffusion import nelbo
from dgemma.diffusion.schedule import Loop
from dgemma.intervals import half_width
from dgemma.train import TrainBatch, evaluate
from dgemma.train.estimates import Likelihood, RowSums
from exact_networks import ExactModel, Network, random_joint
from toy import SEQUENCES, hybrid_noise, likelihood, mask_noise, uniform_noise

NOISES = {"mask": mask_noise, "uniform": uniform_noise, "hybrid": hybrid_noise}
LOOPING = partial(mask_noise, schedule=Loop(plateau=0.7, start=0.6, stop=0.3))


def exact_model(noise, joint):
    return ExactModel(Network(joint, noise, noise.vocab_size))


def rows_of(texts):
    """Texts (B, 3) after one token of context: (B, 4)."""
    return torch.nn.functional.pad(texts, (1, 0))


@pytest.mark.parametrize("make_noise", [*NOISES.values(), LOOPING], ids=[*NOISES, "loop"])
def test_the_bound_of_an_exact_network_is_the_likelihood(make_noise):
    """Many rows have the same text, of middling probability. Their mean lies within four standard errors.

    A standard error is 0.03 to 0.04 nats.
    """
    joint, noise = random_joint(1), make_noise()
    text = int(joint.argsort()[13])
    found = evaluate(exact_model(noise, joint), rows_of(SEQUENCES[text].expand(512, 3)), noise, batch_size=512)
    error = found.rows.nats.std().item() / 512**0.5
    assert error < 0.05
    assert abs(found.rows.nats.mean().item() + joint[text].log().item()) < 4 * error


@pytest.mark.parametrize("kind", NOISES)
def test_the_fill_of_a_truncated_text_tells_nothing(kind):
    """The truth is p(a, b), the sum over the third token.

    A network that saw the fill in the third place could infer something about a and b from it.
    """
    joint, noise = random_joint(2, sharpness=6.0).reshape(3, 3, 3), NOISES[kind]()
    fill = 2
    gain = (joint[..., fill] / joint[..., fill].sum()).log() - joint.sum(-1).log()  # what the fill tells about a, b
    first, second = divmod(int(gain.argmax()), 3)
    tokens = torch.tensor([[0, first, second, fill]]).expand(512, 4)
    batch = TrainBatch(
        tokens=tokens,
        prompt_len=torch.ones(512, dtype=torch.int64),
        length=torch.full((512,), 3),
        truncated=torch.ones(512, dtype=torch.bool),
    )
    found = evaluate(exact_model(noise, joint.flatten()), batch, noise, batch_size=512, fill_token=fill)
    exact = -joint.sum(-1)[first, second].log().item()
    error = found.rows.nats.std().item() / 512**0.5
    assert gain.max() > 0.4
    assert abs(found.rows.nats.mean().item() - exact) < 4 * error
    assert found.num_tokens == 2 * 512


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("levels", ["stratified", "independent"])
def test_the_interval_of_one_text_over_noise_levels_holds_the_likelihood(kind, levels):
    """Of 256 estimates for one text, 91 to 95 % hold the truth; the limit is two standard deviations below."""
    joint, noise = random_joint(1), NOISES[kind]()
    text = int(joint.argsort()[13])
    texts = rows_of(SEQUENCES[text].expand(256, 3))
    rows = evaluate(exact_model(noise, joint), texts, noise, num_samples=32, levels=levels, batch_size=256).rows
    truth, covered, widths = -joint[text].log().item() / 3, 0, 0.0
    for row in range(256):
        alone = RowSums(**{name: values[row : row + 1] for name, values in vars(rows).items()})
        nelbo = Likelihood(rows=alone, num_samples=32, confidence=0.95, num_bytes=None).nelbo
        covered += abs(nelbo.value - truth) < nelbo.error
        widths += nelbo.error
    assert covered / 256 > 0.87
    assert widths / 256 < 0.4


LOOPS = [Loop(plateau=plateau / 100, start=0.6, stop=0.3) for plateau in range(1, 100)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_loop_stands_still_exactly_while_it_rests(dtype):
    times = torch.linspace(0.301, 0.6, 50, dtype=dtype)
    for loop in LOOPS:
        assert (loop.derivative(times) == 0).all(), loop
        level = 1 - loop.alpha(times)
        assert (loop.derivative(loop.time(1 - level)) == 0).all(), loop
        ramps = torch.tensor([0.1, 0.29, 0.61, 0.9], dtype=dtype)
        assert (loop.derivative(loop.time(1 - (1 - loop.alpha(ramps)))) < 0).all(), loop
        torch.testing.assert_close(loop.time(loop.alpha(ramps)), ramps, atol=1e-5, rtol=0)


@pytest.mark.parametrize("plateau", [0.1, 0.47, 0.7])
@pytest.mark.parametrize("kind", ["mask", "uniform"])
def test_the_bound_over_the_times_of_a_loop_is_the_likelihood(kind, plateau):
    """The integral over each ramp and the plateau, by Gauss-Legendre, summed over all canvases, is -log p(x)."""
    joint = random_joint(3)
    noise = NOISES[kind](schedule=Loop(plateau=plateau, start=0.6, stop=0.3))
    points, weights = gauss_legendre(32)
    text = SEQUENCES[int(joint.argmax())]
    total = 0.0
    for low, high in ((0.0, 0.3), (0.3, 0.6), (0.6, 1.0)):
        # Points are denser towards the clean end of a ramp, where the integrand of uniform noise is steep.
        times, scale = low + (high - low) * points**4, (high - low) * 4 * points**3 * weights
        total += integrate(noise, joint, text, times, scale)
    assert total == pytest.approx(-joint.max().log().item(), abs=1e-6)


def gauss_legendre(count):
    """Nodes and weights on (0, 1), from the Jacobi matrix (Golub and Welsch)."""
    n = torch.arange(1, count, dtype=torch.float64)
    beta = n / (4 * n**2 - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(beta, 1) + torch.diag(beta, -1))
    return (1 + nodes) / 2, vectors[0] ** 2


def integrate(noise, joint, text, times, scale):
    """∫ dt E_z integrand over all canvases z, for points `times` with weights `scale`."""
    level = 1 - noise.schedule.alpha(times)  # (n,)
    table = likelihood(noise, level)  # (n, x, z)
    num_tokens = table.shape[-1]
    canvases = torch.cartesian_prod(*[torch.arange(num_tokens)] * 3)  # (m, 3)
    per_position = table[:, text[None].expand(len(canvases), -1), canvases]  # (n, m, 3)
    weight = per_position.prod(-1)  # (n, m)
    network = Network(joint, noise, noise.vocab_size, parametrisation="loo")
    total = 0.0
    for index in range(len(times)):
        here = level[index].expand(len(canvases))
        logits = network.at(here).denoise(canvases).logits
        cost = nelbo.integrand(noise, logits, text.expand(len(canvases), -1), canvases, here, parametrisation="loo")
        total += (scale[index] * weight[index] * torch.where(weight[index] > 0, cost.sum(-1), 0.0)).sum().item()
    return total


@pytest.mark.slow
@pytest.mark.parametrize("kind", NOISES)
def test_a_95_percent_interval_holds_the_truth_in_94_of_100_or_more(kind):
    """Texts are drawn from the joint, so its entropy is the truth. The limit allows four standard deviations."""
    joint, noise = random_joint(0), NOISES[kind]()
    entropy = -(joint * joint.log()).sum().item()
    index = torch.multinomial(joint, 8192, replacement=True)
    rows = evaluate(exact_model(noise, joint), rows_of(SEQUENCES[index]), noise, batch_size=4096).rows
    for num_texts in (16, 64, 256):
        nats = rows.nats.reshape(-1, num_texts)
        center = nats.mean(-1)
        half = half_width(0.95, num_texts - 1) * nats.std(-1) / math.sqrt(num_texts)
        coverage = ((center - entropy).abs() < half).double().mean().item()
        assert coverage > 0.94 - 4 * math.sqrt(0.94 * 0.06 / len(nats)), (num_texts, coverage)
