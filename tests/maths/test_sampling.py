"""Samplers with exact networks on random texts: the law of what they write, by enumeration."""

import re
from dataclasses import replace

import pytest
import torch

import dgemma
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.schedule import ClippedLinear, Loop
from dgemma.run.knobs import Knobs
from dgemma.sampling.temperature import ConstantTemperature
from exact_networks import Network, random_joint
from toy import (
    SEQUENCES,
    Law,
    advance,
    fresh_state,
    gibbs_cells,
    initial,
    likelihood,
    propagate,
    route_cells,
    total_variation,
    uniform_noise,
)

CODE = torch.tensor([9, 3, 1])


class Listener(dgemma.Denoiser):
    """A network with flat predictions that stores the noise level it gets."""

    takes_noise_level = True

    def denoise(self, canvas, cache, self_cond=None, self_cond_mask=None, noise_level=None):
        self.level = noise_level
        return Prediction(torch.zeros(*canvas.shape, 3, dtype=torch.float64))


def level_told(sampler, *, per_position=False):
    """Return a function from a state to the noise level that `dgemma.step` passes to a network."""

    def level(state):
        listener = Listener()
        listener.takes_position_levels = per_position
        knobs = Knobs(sampler=sampler, temperature=ConstantTemperature(value=1.0))
        dgemma.step(listener, state, cache=None, knobs=knobs)
        return listener.level

    return level


def law_of(canvas, weight):
    return torch.zeros(27, dtype=torch.float64).index_add(0, canvas @ CODE, weight)


@pytest.mark.parametrize("level", [0.2, 0.8])
def test_a_correction_keeps_the_law_of_its_level_whatever_the_loops_clock_says(level):
    """Canvases have the law of the level, but the clock says 0.93. The network gets the level that `step` passes."""
    noise, joint = uniform_noise(), random_joint(5)
    table = likelihood(noise, torch.tensor([level], dtype=torch.float64))[0]
    noisy = torch.einsum("abc,ax,by,cz->xyz", joint.reshape(3, 3, 3), table, table, table).flatten()
    sampler = dgemma.LeaveOneOutGibbs(parametrisation="loo")
    state = fresh_state(SEQUENCES, noise, 99)
    state = replace(
        state,
        step=torch.full((27,), 1),
        noise_level=torch.full((27,), 0.93, dtype=torch.float64),
        memory=torch.full((27,), level, dtype=torch.float64),
    )
    network = Network(joint, noise, 3, "loo").at(level_told(sampler)(state))
    after = advance(Law(state, noisy), sampler, network, gibbs_cells(sampler))
    assert total_variation(law_of(after.state.canvas, after.weight), noisy) < 1e-13


def test_first_hitting_tells_the_time_of_its_own_clock():
    state = fresh_state(torch.full((2, 3), 2), dgemma.MaskNoise(3, mask_token_id=2), 8)
    state = replace(state, memory=torch.tensor([0.3, 0.6], dtype=torch.float64))
    assert level_told(dgemma.sampling.FirstHitting())(state).tolist() == [0.3, 0.6]


ALLOWED = {6: torch.arange(6) < 3, 30: torch.arange(30) < 3}


def restricted(noise, sampler, steps):
    """The first canvases of a run in which only tokens 0, 1 and 2 are allowed."""
    law = initial(noise, sampler, steps)
    allowed = ALLOWED[noise.vocab_size].expand(27, 1, -1)
    return Law(replace(law.state, allowed=allowed), law.weight)


@pytest.mark.parametrize("vocab_size", ALLOWED)
def test_ancestral_steps_over_an_allowed_set_are_those_of_a_vocabulary_of_that_size(vocab_size):
    """The network is exact for noise over three tokens, which are the whole vocabulary or three of 6 or 30.

    The law is the same in all cases, and it approaches the joint.
    """
    joint, sampler = random_joint(7), dgemma.Ancestral()
    noise = dgemma.UniformNoise(vocab_size)
    for steps, near in ((4, 1.0), (32, 0.025)) if vocab_size == 6 else ((4, 1.0),):
        alone = propagate(
            sampler,
            uniform_noise(),
            steps=steps,
            denoiser=Network(joint, uniform_noise(), 3),
            cells={"event": route_cells},
            independent=True,
            check=False,
        ).law
        among = propagate(
            sampler,
            noise,
            steps=steps,
            denoiser=Network(joint, uniform_noise(), vocab_size),
            cells={"event": route_cells},
            independent=True,
            check=False,
            start=restricted(noise, sampler, steps),
        ).law
        assert total_variation(among, alone) < 1e-12
        assert total_variation(among, joint) < near


def restricted_likelihood(level, sets, vocab_size):
    """q(z | x) of uniform noise over each position's set, from its definition: (positions, x, z)."""
    uniform = sets.double() / sets.sum(-1, keepdim=True)
    return (1 - level) * torch.eye(vocab_size, dtype=torch.float64) + level * uniform[:, None, :]


SETS = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 1, 0, 1], [0, 0, 0, 1, 1]], dtype=torch.bool)  # (3 positions, V)


@pytest.mark.parametrize("levels", [(0.7, 0.4), (1.0, 0.3), (0.5, 0.0)])
def test_the_posterior_over_an_allowed_set_is_bayes_rule_over_it(levels):
    """q(z_s | z_t, x) for every x and z_t of each position's set."""
    noise, (before, after) = dgemma.UniformNoise(5), levels
    marginal = restricted_likelihood(after, SETS, 5)
    # From s to t a token survives with α_t / α_s, else it is drawn from the set.
    bridge = restricted_likelihood(1 - (1 - before) / (1 - after), SETS, 5)
    identity = torch.eye(5, dtype=torch.float64)
    for position, tokens in enumerate(SETS):
        for x in tokens.nonzero()[:, 0].tolist():
            for z in tokens.nonzero()[:, 0].tolist():
                joint = marginal[position, x] * bridge[position, :, z]
                found = noise.posterior(
                    torch.tensor(z),
                    identity[x],
                    torch.tensor(1 - before, dtype=torch.float64),
                    torch.tensor(1 - after, dtype=torch.float64),
                    allowed=tokens,
                )
                torch.testing.assert_close(found, joint / joint.sum(), atol=1e-14, rtol=0)


def test_the_conversion_over_an_allowed_set_is_that_of_its_own_noise():
    """Mean and leave-one-out networks for noise over three of six tokens, by enumeration."""
    joint, noise, level = random_joint(8), dgemma.UniformNoise(6), torch.full((27,), 0.6, dtype=torch.float64)
    mean, loo = (
        Network(joint, uniform_noise(), 6, kind).at(level).denoise(SEQUENCES).logits for kind in ("mean", "loo")
    )
    allowed = ALLOWED[6][None, None]
    found = noise.to_loo(mean, SEQUENCES, level, allowed=allowed).softmax(-1)
    torch.testing.assert_close(found, loo.softmax(-1), atol=1e-14, rtol=0)
    found = noise.to_mean(loo, SEQUENCES, level, allowed=allowed).softmax(-1)
    torch.testing.assert_close(found, mean.softmax(-1), atol=1e-14, rtol=0)


def test_a_token_that_is_not_allowed_is_gone_at_the_end():
    """A caller put forbidden tokens on the canvas. Whatever the draws, the last step replaces all of them."""
    noise = dgemma.UniformNoise(6)
    state = fresh_state(torch.full((500, 3), 5), noise, 1)
    state = replace(state, seeds=torch.arange(500), allowed=ALLOWED[6][None, None])
    prediction = Prediction(torch.zeros(500, 3, 6).masked_fill(~ALLOWED[6], -torch.inf))
    assert dgemma.Ancestral()(prediction, state).write.all()


def infilling(sampler, noise, first, steps):
    """Canvases whose first token is given and frozen, and the rest noise."""
    rest = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    canvas = torch.cat([torch.full((9, 1), first), rest], dim=1)
    frozen = torch.tensor([True, False, False]).expand(9, 3)
    state = replace(fresh_state(canvas, noise, steps), frozen=frozen, open=~frozen)
    state = replace(state, memory=sampler.start(state))
    return Law(state, torch.full((9,), 1 / 9, dtype=torch.float64))


def conditional(joint, first):
    """p(x | x at 0), over the 27 sequences."""
    kept = torch.where(SEQUENCES[:, 0] == first, joint, 0.0)
    return kept / kept.sum()


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (1, 2))])
def test_holes_are_drawn_from_their_conditional_by_a_network_that_takes_a_level_per_position(first):
    """One level for all of a canvas makes the given token look noisy: the negative control."""
    noise, joint, sampler, steps = uniform_noise(), random_joint(9), dgemma.Ancestral(), 32
    exact, blurred = (
        propagate(
            sampler,
            noise,
            steps=steps,
            denoiser=Network(joint, noise, 3),
            cells={"event": route_cells},
            independent=True,
            check=False,
            start=infilling(sampler, noise, first, steps),
            level=level_told(sampler, per_position=per_position),
        ).law
        for per_position in (True, False)
    )
    assert total_variation(exact, conditional(joint, first)) < 0.02
    assert total_variation(blurred, conditional(joint, first)) > 0.04


@pytest.mark.slow
def test_corrections_near_clean_text_repair_holes_of_a_network_that_takes_one_level():
    """At a level of .01 the network believes the given token, and Gibbs sampling forgets its start.

    Ancestral steps of the same network stay at a distance of .108, however many there are.
    """
    joint, first, steps = random_joint(10), 2, 31
    noise = uniform_noise(schedule=Loop(plateau=0.99, start=0.9, stop=0.05))
    sampler = dgemma.LeaveOneOutGibbs(corrections=9, parametrisation="loo")
    found = propagate(
        sampler,
        noise,
        steps=steps,
        denoiser=Network(joint, noise, 3, "loo"),
        cells=gibbs_cells(sampler),
        check=False,
        start=infilling(sampler, noise, first, steps),
        level=level_told(sampler),
    ).law
    assert total_variation(found, conditional(joint, first)) < 0.02


def test_pure_noise_is_refused_under_a_schedule_that_begins_with_less():
    model = dgemma.DiffusionGemma(dgemma.presets.tiny())
    vocab_size, length = model.config.vocab_size, model.config.canvas_length
    noise = dgemma.UniformNoise(vocab_size, schedule=ClippedLinear(0.0, 0.5))
    prompt = torch.tensor([[2, 7]])
    options = {"noise": noise, "sampler": dgemma.Ancestral(), "steps": 2, "progress": False}
    refusal = re.escape("generate noise must have a schedule that starts from pure noise, got")
    for canvas in (None, torch.full((1, length), -1), torch.full((1, length - 1), 7)):
        with pytest.raises(ValueError, match=refusal):
            dgemma.generate(model, prompt, max_new_tokens=length, canvas=canvas, **options)
    with pytest.raises(ValueError, match=refusal):
        dgemma.infill(model, torch.full((1, 9), 7), [(3, 5)], **options)
    whole = torch.full((1, length), 7)
    assert (
        dgemma.generate(model, prompt, max_new_tokens=length, canvas=whole, **options).new_tokens.shape == whole.shape
    )
    assert dgemma.edit(model, torch.full((1, 9), 7), noise_level=0.4, **options).tokens.shape == (1, 9)


def test_a_run_may_start_from_masks_under_any_schedule():
    """A canvas of masks is pure noise. The network can count the masks, so it needs no level."""
    model = dgemma.DiffusionGemma(dgemma.presets.tiny())
    noise = dgemma.MaskNoise(model.config.vocab_size, schedule=ClippedLinear(0.0, 0.5))
    found = dgemma.generate(model, torch.tensor([[2, 7]]), max_new_tokens=1, noise=noise, steps=2, progress=False)
    assert not noise.masked(found.new_tokens).any()
