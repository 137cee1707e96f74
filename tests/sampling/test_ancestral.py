"""Ancestral sampling on toy T0. The expected numbers were computed independently of this library."""

from dataclasses import replace

import pytest
import torch

from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.schedule import OneMinusCosine, PlainCosine
from dgemma.sampling.ancestral import Ancestral
from toy import (
    MASK,
    divergence,
    exact_network,
    fresh_state,
    hybrid_noise,
    mask_noise,
    propagate,
    route_cells,
    total_variation,
    uniform_noise,
)

PROCESSES = [mask_noise(), uniform_noise(), hybrid_noise()]
TOTAL_CORRELATION = 0.709866


def law(noise, steps, *, network="mean", sampler="mean", independent=True):
    """The law of the samples. `network` is what the network predicts, `sampler` what the sampler assumes."""

    def as_mean(prediction, state):
        if sampler == "mean":
            return prediction
        return Prediction(noise.to_mean(prediction.logits, state.canvas, state.noise_level))

    return propagate(
        Ancestral(parametrisation=sampler),
        noise,
        steps=steps,
        denoiser=exact_network(noise, network),
        cells={
            "token": lambda prediction, state: as_mean(prediction, state).logits.softmax(-1).cumsum(-1)[..., :-1],
            "event": lambda prediction, state: route_cells(as_mean(prediction, state), state),
        },
        independent=independent,
        check=steps <= 8,
    ).law


@pytest.mark.parametrize(
    ("noise", "expected"),
    [
        (mask_noise(), {1: 0.4859, 2: 0.2520, 4: 0.1295, 8: 0.0658, 16: 0.0332}),
        (uniform_noise(), {1: 0.4859, 2: 0.3063, 4: 0.1532, 8: 0.0704, 16: 0.0326}),
        pytest.param(mask_noise(), {64: 0.00835}, marks=pytest.mark.slow),
        pytest.param(uniform_noise(), {64: 0.00755}, marks=pytest.mark.slow),
    ],
    ids=["mask", "uniform", "mask-64-steps", "uniform-64-steps"],
)
def test_distances_to_the_text_equal_independent_computations(noise, expected):
    for steps, distance in expected.items():
        digits = 4 if steps < 64 else 5
        assert round(total_variation(law(noise, steps)), digits) == distance, steps


@pytest.mark.parametrize("noise", PROCESSES, ids=lambda n: n.kind)
def test_one_step_loses_exactly_the_total_correlation(noise):
    assert divergence(law(noise, 1)) == pytest.approx(TOTAL_CORRELATION, abs=1e-6)


@pytest.mark.parametrize("gamma", [pytest.param(1.0, marks=pytest.mark.slow), 2.0])
def test_hybrid_noise_becomes_exact_as_steps_grow(gamma):
    """Four times the steps give about a quarter of the distance.

    At gamma 1 they give 0.30 of it, because the share of random tokens grows like the square root of t.
    """
    coarse, fine = (total_variation(law(hybrid_noise(gamma=gamma), steps)) for steps in (16, 64))
    assert fine < coarse / 3
    assert fine < 0.02


@pytest.mark.parametrize("schedule", [OneMinusCosine(), PlainCosine()], ids=str)
def test_any_schedule_leads_to_the_same_text(schedule):
    assert total_variation(law(mask_noise(schedule=schedule), 24)) < 0.04


@pytest.mark.parametrize("noise", PROCESSES, ids=lambda n: n.kind)
def test_a_leave_one_out_network_samples_what_the_mean_network_samples(noise):
    torch.testing.assert_close(law(noise, 4, network="loo", sampler="loo"), law(noise, 4), atol=1e-12, rtol=0)


def test_the_mean_plugged_in_for_leave_one_out_never_becomes_exact():
    """The negative control: Duo's posterior gets the mean, which cross-entropy learns."""
    distances = [total_variation(law(uniform_noise(), steps, network="mean", sampler="loo")) for steps in (16, 64)]
    assert distances == pytest.approx([0.3185, 0.3185], abs=2e-4)


@pytest.mark.parametrize("noise", PROCESSES, ids=lambda n: n.kind)
def test_positions_are_independent_given_the_canvas(noise):
    """The joint enumeration of all uniforms gives the same law. The long runs above rely on this."""
    torch.testing.assert_close(law(noise, 2, independent=False), law(noise, 2), atol=1e-13, rtol=0)


def test_a_revealed_token_is_kept_whatever_the_network_says():
    state = replace(
        fresh_state(torch.tensor([[0, MASK, 2]]), mask_noise(), 1),
        injected={"token": torch.full((1, 3), 0.5).double(), "event": torch.full((1, 3), 0.5).double()},
    )
    logits = torch.full((1, 3, 4), -torch.inf)
    logits[..., 1] = 0.0
    assert Ancestral()(Prediction(logits), state).write.tolist() == [[False, True, False]]


@pytest.mark.parametrize(
    ("noise", "level", "expected"),
    [(hybrid_noise(), 0.0, [[0, 1, 2]]), (hybrid_noise(), 0.5, [[1, 1, 1]]), (mask_noise(), 0.5, [[0, 1, 2]])],
    ids=["at-the-end", "before", "mask"],
)
def test_positions_that_cannot_be_noise_commit_the_canvas(noise, level, expected):
    state = fresh_state(torch.tensor([[0, MASK, 2]]), noise, 4)
    state = replace(state, noise_level=torch.full_like(state.noise_level, level))
    prediction = Prediction(torch.eye(4)[torch.tensor([[1, 1, 1]])])
    assert Ancestral().final(prediction, state).tolist() == expected
