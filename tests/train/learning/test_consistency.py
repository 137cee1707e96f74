"""Consistency: z_s has the exact law of the bridge, and the exact posterior is the fixed point, by enumeration."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dgemma.train import LoRA, Objective, TrainBatch, TrainConfig, add_lora, train
from dgemma.train.learning import Consistency
from exact_networks import ExactModel, Network
from learning_toy import small_model
from toy import JOINT, SEQUENCES, hybrid_noise, likelihood, mask_noise, uniform_noise

NOISES = {"mask": mask_noise(), "uniform": uniform_noise()}


def drawn(noise, x, z, level, seeds):
    """The canvases and noisy canvases of texts (R, 3) after a prompt of one token, with chosen noisy tokens."""
    tokens = F.pad(x, (1, 0))
    length = torch.full((len(x),), 4)
    batch = TrainBatch(tokens=tokens, prompt_len=torch.ones_like(length), length=length)
    objective = Objective(noise=noise, canvas_len=3, fill_token=0, causal_weight=0.0, self_cond_prob=0.0)
    canvases, noisy = objective.draw(batch, seeds)
    return canvases, noisy._replace(z=z[:, None], level=torch.full_like(noisy.level, level))


def onward(noise, level, next_level):
    """q(z_t | z_s) of one position (z_s, z_t), from the definition: a token is kept, or noise replaces it."""
    keep = (1 - level) / (1 - next_level)
    size = 3 if noise.kind == "uniform" else 4
    fresh = torch.full((size,), 1 / 3, dtype=torch.float64) if noise.kind == "uniform" else torch.eye(4)[3].double()
    table = keep * torch.eye(size).double() + (1 - keep) * fresh
    if noise.kind == "mask":
        table[3] = fresh
    return table


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("level", [pytest.param(1.0, marks=pytest.mark.slow), 0.7])
def test_the_exact_posterior_is_the_fixed_point(kind, level):
    """All triples (x, z_s, z_t) with their probabilities: the gradient in the logits of every canvas z_t is zero."""
    noise, share = NOISES[kind], 0.5
    num = torch.arange(3 if kind == "uniform" else 4)
    canvases_of = torch.cartesian_prod(num, num, num)
    from_x = likelihood(noise, torch.tensor([share * level], dtype=torch.float64))[0]  # (x, z_s)
    onwards = onward(noise, level, share * level)  # (z_s, z_t)
    torch.testing.assert_close(from_x @ onwards, likelihood(noise, torch.tensor([level], dtype=torch.float64))[0])
    triples = torch.cartesian_prod(*(torch.arange(n) for n in (27, len(canvases_of), len(canvases_of))))
    x, earlier, z = SEQUENCES[triples[:, 0]], canvases_of[triples[:, 1]], canvases_of[triples[:, 2]]
    prob = JOINT[triples[:, 0]] * (from_x[x, earlier] * onwards[earlier, z]).prod(1)
    x, earlier, z, code, prob = (part[prob > 0] for part in (x, earlier, z, triples[:, 2], prob))
    assert float(prob.sum()) == pytest.approx(1.0, abs=1e-12)

    teacher = ExactModel(Network(JOINT, noise, len(num)))
    bias = torch.zeros(len(canvases_of), 3, len(num), dtype=torch.float64, requires_grad=True)
    levels = torch.full((len(z), 3), level, dtype=torch.float64)
    posterior = Network(JOINT, noise, len(num), level=levels).probabilities(z)
    logits = posterior.clamp(min=1e-300).log() + bias[code]
    hidden = F.pad(logits, (0, teacher.config.hidden_size - len(num)))[:, None]
    canvases, noisy = drawn(noise, x, earlier, share * level, torch.arange(len(x)))
    costs = Consistency(teacher=teacher, share=share).costs(teacher, canvases, noisy, hidden)[:, 0]
    loss = (prob[:, None] * costs).sum()
    (gradient,) = torch.autograd.grad(loss, [bias])
    assert float(gradient.abs().max()) < 1e-12
    # The mean divergence is the information that the step gives about each token.
    entropy = -(posterior * posterior.clamp(min=1e-300).log()).sum((1, 2))
    seen = Network(JOINT, noise, len(num), level=share * levels).probabilities(earlier)
    left = -(seen * seen.clamp(min=1e-300).log()).sum((1, 2))
    assert float(loss.detach()) == pytest.approx(float((prob * (entropy - left)).sum()), abs=1e-10)


@pytest.mark.parametrize("noise", [mask_noise(), uniform_noise(), hybrid_noise()], ids=lambda noise: noise.kind)
def test_the_step_back_has_the_law_of_the_bridge(noise):
    """q(z_s | z_t, x) ∝ q(z_s | x) q(z_t | z_s); with hybrid noise z_s given x alone, averaged over z_t."""
    num, level, share = 20_000, 0.8, 0.5
    x = torch.tensor([[0, 1, 2]]).expand(num, -1)
    tables = [likelihood(noise, torch.tensor([t], dtype=torch.float64))[0] for t in (level, share * level)]
    generator = torch.Generator().manual_seed(0)
    z = torch.stack([torch.multinomial(tables[0][v], num, True, generator=generator) for v in range(3)], dim=1)
    canvases, noisy = drawn(noise, x, z, level, torch.arange(num))
    earlier = Consistency(share=share).step_back(canvases, noisy)
    assert float(earlier.level.mean()) == pytest.approx(share * level)
    size = tables[0].shape[1]
    for v in range(3):
        found = torch.bincount(earlier.z[:, 0, v], minlength=size) / num
        torch.testing.assert_close(found.double(), tables[1][v], atol=0.02, rtol=0)  # 5 standard errors
    if noise.kind != "hybrid":
        pairs = torch.bincount(earlier.z[:, 0, 0] * size + z[:, 0], minlength=size * size).view(size, size) / num
        expected = tables[1][0][:, None] * onward(noise, level, share * level)
        torch.testing.assert_close(pairs.double(), expected, atol=0.02, rtol=0)


def texts(step: int, rows: range) -> TrainBatch:
    tokens = torch.tensor([[0, row % 3, row % 3, (row + step) % 3, row % 2] for row in rows])
    length = torch.full((len(rows),), 5)
    return TrainBatch(tokens=tokens, prompt_len=torch.ones_like(length), length=length)


def objective(**changes: Any) -> Objective:
    return Objective(noise=mask_noise(), canvas_len=2, fill_token=0, canvases="all", loss=Consistency(**changes))


@pytest.mark.slow
@pytest.mark.parametrize("with_adapters", [False, True])
def test_a_model_learns_what_its_teacher_predicts_with_less_noise(tmp_path, with_adapters):
    model = small_model()
    teacher = None if with_adapters else copy.deepcopy(model)
    if with_adapters:
        add_lora(model, LoRA(rank=2))
    before = copy.deepcopy(model)
    config = TrainConfig(steps=12, batch_size=8, lr=5e-3, warmup=0, precision="weights", progress=False)
    train(model, objective(teacher=teacher), texts, config, out=tmp_path)
    seeds = torch.arange(64)
    losses = [
        float(objective(teacher=teacher)(each, texts(0, range(64)), seeds=seeds).sums["decoder"].detach().sum())
        for each in (before, model)
    ]
    assert losses[1] < losses[0]


def test_without_a_step_back_it_is_the_cross_entropy_and_without_a_teacher_it_says_so():
    model, seeds = small_model(), torch.arange(4)
    loss = objective(teacher=model, share=0.0)(model, texts(0, range(4)), seeds=seeds).sums["decoder"]
    plain = Objective(noise=mask_noise(), canvas_len=2, fill_token=0, canvases="all")
    torch.testing.assert_close(loss, plain(model, texts(0, range(4)), seeds=seeds).sums["decoder"])
    with pytest.raises(ValueError, match=r"Consistency.teacher must be a model if .*copy.deepcopy"):
        objective()(model, texts(0, range(4)), seeds=seeds)
