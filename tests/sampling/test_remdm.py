from dataclasses import replace

import pytest
import torch

from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.schedule import Loop
from dgemma.sampling.ancestral import Ancestral
from dgemma.sampling.remdm import ReMDM
from toy import MASK, fresh_state, initial, mask_noise, propagate, route_cells, total_variation

STEPS = [(0.9, 0.6), (0.5, 0.45), (0.2, 0.0), (0.1, 0.1)]  # noise level before and after


def cells(sampler):
    def event(prediction, state):
        reveal, remask = sampler.rates(state)
        return torch.where(state.open, reveal, remask)[..., None]

    return {"event": event}


def run(sampler, steps, noise=None, independent=True, **kwargs):
    noise = noise if noise is not None else mask_noise()
    return propagate(
        sampler, noise, steps=steps, cells=cells(sampler), independent=independent, check=steps <= 8, **kwargs
    )


def state_at(before, after, canvas=((0, MASK, 2),)):
    canvas = torch.tensor(canvas)
    rows = len(canvas)
    return replace(
        fresh_state(canvas, mask_noise(), 1),
        open=canvas == MASK,
        noise_level=torch.full((rows,), before, dtype=torch.float64),
        next_noise_level=torch.full((rows,), after, dtype=torch.float64),
    )


@pytest.mark.parametrize(
    ("steps", "distance"), [(8, 0.0754), (64, 0.0274), pytest.param(256, 0.0137, marks=pytest.mark.slow)]
)
def test_distances_with_the_cap_equal_independent_computations(steps, distance):
    assert round(total_variation(run(ReMDM(strategy="cap", eta=0.2), steps).law), 4) == distance


@pytest.mark.parametrize("levels", STEPS, ids=str)
@pytest.mark.parametrize("eta", [0.0, 0.05, 0.4, 1.0])
@pytest.mark.parametrize("strategy", ["cap", "rescale", "loop"])
def test_every_step_keeps_the_distribution_of_its_level(strategy, eta, levels):
    """A position is unmasked with probability α before the step, and must be unmasked with the next α after it."""
    reveal, remask = ReMDM(strategy=strategy, eta=eta).rates(state_at(*levels))
    before, after = levels
    torch.testing.assert_close(
        before * reveal + (1 - before) * (1 - remask),
        torch.full((1, 3), 1 - after, dtype=torch.float64),
        atol=1e-14,
        rtol=0,
    )
    for rate in (reveal, remask):
        assert rate.min() > -1e-14
        assert rate.max() < 1 + 1e-14


def test_without_remasking_it_is_ancestral_sampling():
    ancestral = propagate(Ancestral(), mask_noise(), steps=4, cells={"event": route_cells}, independent=True)
    torch.testing.assert_close(run(ReMDM(eta=0.0), 4).law, ancestral.law, atol=1e-14, rtol=0)


def test_positions_are_independent_given_the_canvas():
    sampler = ReMDM(eta=0.3)
    torch.testing.assert_close(run(sampler, 3, independent=False).law, run(sampler, 3).law, atol=1e-14, rtol=0)


@pytest.mark.parametrize(("strategy", "expected"), [("cap", 0.4), ("rescale", 0.75 * 0.4)])
def test_sigma_is_at_most_sigma_max(strategy, expected):
    """σ_max = (1 - α_s)/α_t = .2/.5, below eta."""
    _, remask = ReMDM(strategy=strategy, eta=0.75).rates(state_at(0.5, 0.2))
    assert remask[0].tolist() == pytest.approx([expected] * 3)


def test_loop_keeps_the_share_of_masks_on_the_plateau_of_its_schedule():
    """20 steps: at step 9 the schedule reaches the plateau, .1 of the tokens masked, and stays there until step 19."""
    noise = mask_noise(schedule=Loop())
    sampler = ReMDM(strategy="loop", eta=0.05)
    for steps in (9, 14, 19):
        states = run(sampler, steps, noise, start=initial(noise, sampler, 20)).states
        masked = (states.weight[:, None] * states.state.open).sum(0)
        torch.testing.assert_close(masked, torch.full((3,), 0.1, dtype=torch.float64), atol=1e-12, rtol=0)


def test_loop_remasks_only_on_the_plateau_of_its_schedule():
    sampler = ReMDM(strategy="loop", eta=0.05)
    assert sampler.rates(state_at(0.1, 0.1))[1].tolist() == [[0.05] * 3]
    assert sampler.rates(state_at(0.5, 0.4))[1].tolist() == [[0.0] * 3]


def test_loop_without_its_schedule_is_refused():
    with pytest.raises(ValueError, match=r'ReMDM.strategy "loop" must run on a Loop schedule'):
        ReMDM(strategy="loop").start(fresh_state(torch.full((1, 3), MASK), mask_noise(), 4))


def test_conf_prefers_to_remask_tokens_that_were_improbable_when_revealed():
    """The rates are a softmax of minus these probabilities: e^-.9 : e^-.2. Masks and frozen positions have rate 0."""
    state = state_at(0.5, 0.4, canvas=[[0, MASK, 2, 1]])
    state = replace(
        state, memory=torch.tensor([[0.9, 1.0, 0.2, 0.1]]).double(), frozen=torch.tensor([[False, False, False, True]])
    )
    _, remask = ReMDM(strategy="conf").rates(state)
    shares = torch.tensor([-0.9, -0.2]).double().softmax(0) * 0.8  # σ_max = .4/.5
    torch.testing.assert_close(remask[0, [0, 2]], shares)
    assert remask[0, [1, 3]].tolist() == [0, 0]


def test_conf_is_finite_when_nothing_is_revealed():
    state = replace(state_at(1.0, 0.9, canvas=[[MASK] * 3]), memory=torch.ones(1, 3).double())
    reveal, remask = ReMDM(strategy="conf").rates(state)
    assert remask.tolist() == [[0.0] * 3]
    assert reveal[0].tolist() == pytest.approx([0.1] * 3)


def test_conf_remembers_the_probability_of_what_it_reveals():
    state = replace(
        state_at(1.0, 0.0, canvas=[[MASK, MASK, 1]]),
        memory=torch.tensor([[1.0, 1.0, 0.3]]).double(),
        injected={"token": torch.tensor([[0.1, 0.9, 0.5]]).double(), "event": torch.full((1, 3), 0.5).double()},
    )
    probabilities = torch.tensor([0.25, 0.0, 0.75, 0.0]).double()
    decision = ReMDM(strategy="conf")(Prediction(probabilities.log().expand(1, 3, 4)), state)
    assert decision.tokens[0, :2].tolist() == [0, 2]
    assert decision.memory[0].tolist() == pytest.approx([0.25, 0.75, 0.3])
