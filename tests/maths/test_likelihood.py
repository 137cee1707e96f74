"""`evaluate` with exact networks: the bound is the likelihood, whatever is truncated, under any schedule. The
interval contains the likelihood as often as its confidence says.
"""

from functools import partial

import pytest
import torch

from dgemma.diffusion.schedule import Loop
from dgemma.train import TrainBatch, evaluate
from dgemma.train.estimates import Likelihood, RowSums
from exact_networks import ExactModel, Network, random_joint
from toy import SEQUENCES, hybrid_noise, mask_noise, uniform_noise

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
def test_the_interval_of_one_text_over_noise_levels_holds_the_likelihood(kind):
    """Of 256 estimates for one text, 91 to 95 % hold the truth; the limit is two standard deviations below."""
    joint, noise = random_joint(1), NOISES[kind]()
    text = int(joint.argsort()[13])
    texts = rows_of(SEQUENCES[text].expand(256, 3))
    rows = evaluate(exact_model(noise, joint), texts, noise, num_samples=32, batch_size=256).rows
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
