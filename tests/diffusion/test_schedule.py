import math

import pytest
import torch

from dgemma.diffusion.schedule import ClippedLinear, InverseSmoothstep, Linear, Loop, OneMinusCosine, PlainCosine

COMPLETE = [Linear(), OneMinusCosine(), PlainCosine(), InverseSmoothstep(), Loop()]
EVERY = [*COMPLETE, ClippedLinear(low=0.3, high=0.8)]


def times(n=41):
    return torch.linspace(0, 1, n, dtype=torch.float64)


@pytest.mark.parametrize("schedule", COMPLETE, ids=str)
def test_text_is_clean_at_time_zero_and_noise_at_time_one(schedule):
    torch.testing.assert_close(schedule.alpha(times(2)), torch.tensor([1.0, 0.0]).double(), atol=1e-15, rtol=0)


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_derivative_is_that_of_alpha(schedule):
    t = times(40)[1:-1].requires_grad_()  # 39 intervals: no point falls on a corner of the loop
    (expected,) = torch.autograd.grad(schedule.alpha(t).sum(), t)
    torch.testing.assert_close(schedule.derivative(t), expected, atol=1e-12, rtol=1e-12)
    assert (schedule.derivative(t) <= 0).all()


@pytest.mark.parametrize("schedule", [s for s in EVERY if not isinstance(s, Loop)], ids=str)
def test_time_inverts_alpha(schedule):
    torch.testing.assert_close(schedule.time(schedule.alpha(times())), times(), atol=1e-7, rtol=0)  # acos at its ends


def test_the_time_of_an_alpha_out_of_range_is_the_nearest_end():
    schedule = ClippedLinear(low=0.3, high=0.8)
    assert schedule.time(torch.tensor([1.0, 0.0], dtype=torch.float64)).tolist() == [0.0, 1.0]


def test_inverse_smoothstep_draws_levels_from_beta_2_2():
    """Mean 1/2, variance 1/20, fourth moment 1/7. The midpoints of a fine grid stand for uniform times."""
    level = 1 - InverseSmoothstep().alpha((torch.arange(20000).double() + 0.5) / 20000)
    moments = [level.mean().item(), level.var().item(), (level**4).mean().item()]
    assert moments == pytest.approx([1 / 2, 1 / 20, 1 / 7], abs=1e-4)


@pytest.mark.parametrize(
    ("schedule", "published"),
    [(Linear(), lambda t: 1 / t), (OneMinusCosine(), lambda t: math.pi / 2 * math.tan(math.pi / 2 * (1 - t)))],
    ids=["linear", "one-minus-cosine"],
)
def test_loss_weight_is_the_published_one(schedule, published):
    """-α'/(1 - α), the weight of the masked loss, as MD4 (arXiv:2406.04329) lists it."""
    t = torch.tensor([0.1, 0.35, 0.8], dtype=torch.float64)
    weight = -schedule.derivative(t) / (1 - schedule.alpha(t))
    assert weight.tolist() == pytest.approx([published(x) for x in t.tolist()], rel=1e-12)


def test_loop_stays_at_its_plateau_and_time_returns_its_start():
    t = torch.tensor([0.775, 0.55, 0.3, 0.0501, 0.05, 0.025], dtype=torch.float64)
    assert Loop().alpha(t).tolist() == pytest.approx([0.45, 0.9, 0.9, 0.9, 0.9, 0.95], abs=1e-12)
    assert Loop().time(torch.tensor([0.45, 0.9, 0.95], dtype=torch.float64)).tolist() == pytest.approx(
        [0.775, 0.55, 0.025], abs=1e-12
    )
