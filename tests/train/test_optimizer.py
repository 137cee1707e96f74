"""Warm-up, cosine, decay and the average of weights agree with torch and with sums by hand."""

import pytest
import torch
from torch import nn

from dgemma.train.optimizer import WeightAverage, adamw, learning_rate_factor, other_weights


def test_warm_up_rises_in_equal_steps_to_the_peak_and_the_cosine_ends_at_the_floor():
    factors = [learning_rate_factor(step, steps=21, warmup=4, floor=0.1) for step in range(21)]
    assert factors[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert factors[12] == pytest.approx(0.55)  # half-way from the peak, at 4, to the end, at 20
    assert factors[20] == pytest.approx(0.1)


def test_the_cosine_equals_torchs():
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=2.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30, eta_min=0.2)
    for step in range(31):
        ours = 2.0 * learning_rate_factor(step, steps=31, warmup=0, floor=0.1)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6)
        optimizer.step()
        schedule.step()


def test_matrices_decay_and_scales_do_not():
    named = {
        name: nn.Parameter(torch.ones(shape)) for name, shape in {"w": (2, 3), "experts": (2, 3, 4), "s": (5,)}.items()
    }
    optimizer = adamw(named, lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # Without a gradient only decay moves a weight: 1 - lr · weight_decay.
    assert {name: p.flatten()[0].item() for name, p in named.items()} == pytest.approx(
        {"w": 0.95, "experts": 0.95, "s": 1}
    )


def test_the_average_forgets_its_random_start_quickly():
    weight = nn.Parameter(torch.tensor([8.0]))
    average = WeightAverage({"w": weight}, decay=0.25)
    with torch.no_grad():
        weight.fill_(1.0)
    average.update(0)  # 0.1 · 8 + 0.9 · 1
    assert average.weights["w"].item() == pytest.approx(1.7)
    average.update(100)  # now the full decay: 0.25 · 1.7 + 0.75 · 1
    assert average.weights["w"].item() == pytest.approx(1.175)


def test_an_average_of_bfloat16_weights_is_in_float32():
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    average = WeightAverage({"w": weight}, decay=0.999)
    with torch.no_grad():
        weight.fill_(2.0)
    average.update(10**6)
    assert average.weights["w"].item() == pytest.approx(1.001, rel=1e-6)  # in bfloat16 it would still be 1


def test_swapping_in_the_average_restores_the_weights_afterwards():
    weight = nn.Parameter(torch.tensor([4.0]))
    average = WeightAverage({"w": weight}, decay=0.5)
    with torch.no_grad():
        weight.fill_(6.0)
    with other_weights(average.parameters, average.weights):
        assert weight.item() == 4.0
    assert weight.item() == 6.0
