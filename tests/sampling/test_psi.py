"""The Ψ sampler keeps the distribution of the canvas at every noise level, and becomes exact as steps grow."""

import pytest
import torch

from dgemma.diffusion.prediction import Prediction
from dgemma.sampling import Ancestral, Psi
from toy import exact_network, fresh_state, propagate, total_variation, uniform_noise

NOISE = uniform_noise()
SIZE = 3


def cells(kappa):
    """The uniforms at which the sampler decides otherwise, from its definition."""

    def tokens(prediction, state):
        return prediction.logits.softmax(-1).cumsum(-1)[..., :-1]

    def events(prediction, state):
        x0 = prediction.sample(state.uniform("token"))
        clean, stay = NOISE.routes(x0, state.canvas, state.noise_level, state.next_noise_level)
        clean, stay = kappa * clean + (1 - kappa) * (1 - state.next_noise_level[:, None]), kappa * stay
        return torch.stack([clean, clean + stay], dim=-1)

    return {"token": tokens, "event": events}


@pytest.mark.parametrize("kappa", [0.0, 0.3, 0.9])
def test_a_step_leads_from_one_marginal_to_the_next(kappa):
    """For every clean token x: the sum over z_t of q(z_t | x) K(z_s | z_t, x) is q(z_s | x)."""
    state = fresh_state(torch.arange(SIZE)[:, None], NOISE, 4)
    level, next_level = float(state.noise_level[0]), float(state.next_noise_level[0])
    for x in range(SIZE):
        prediction = Prediction(torch.eye(SIZE).double()[x].log().expand(SIZE, 1, SIZE))
        before, after = (torch.full((SIZE,), each / SIZE).double() for each in (level, next_level))
        before[x], after[x] = before[x] + 1 - level, after[x] + 1 - next_level
        clean, keep = cells(kappa)["event"](prediction, state)[:, 0].unbind(-1)
        reached = torch.diag(before * (keep - clean)).sum(0) + (before * (1 - keep)).sum() / SIZE
        reached[x] += (before * clean).sum()
        torch.testing.assert_close(reached, after)


def test_the_law_becomes_exact_as_steps_grow_and_kappa_one_is_ancestral():
    def law(sampler, kappa, steps):
        options = {"denoiser": exact_network(NOISE), "cells": cells(kappa), "independent": True}
        return propagate(sampler, NOISE, steps=steps, check=steps <= 4, **options).law

    coarse, fine = (total_variation(law(Psi(kappa=0.5), 0.5, steps)) for steps in (4, 16))
    assert fine < coarse / 2
    torch.testing.assert_close(law(Psi(kappa=1.0), 1.0, 4), law(Ancestral(), 1.0, 4), rtol=0, atol=0)
