"""The leave-one-out Gibbs corrector on toy T0; the numbers were computed independently of this library."""

from dataclasses import replace

import pytest
import torch

from dgemma.diffusion.prediction import Prediction
from dgemma.sampling.gibbs import LeaveOneOutGibbs
from toy import (
    JOINT,
    SEQUENCES,
    Law,
    Points,
    advance,
    exact_network,
    fresh_state,
    gibbs_cells,
    likelihood,
    permutations,
    propagate,
    total_variation,
    uniform_noise,
)

NOISE = uniform_noise()
LEVEL = 0.4


def noisy_text():
    """The law of a canvas at the level, by the definition of uniform noise."""
    table = likelihood(NOISE, torch.tensor([LEVEL], dtype=torch.float64))[0]
    return torch.einsum("abc,ax,by,cz->xyz", JOINT.reshape(3, 3, 3), table, table, table).flatten()


def corrected(sampler, choice=permutations):
    """The law of a noisy text after one correction at its level."""
    state = fresh_state(SEQUENCES, NOISE, 99)
    state = replace(state, step=torch.full((27,), 1), memory=torch.full((27,), LEVEL, dtype=torch.float64))
    assert not sampler.clock(state)[0].any()
    network = exact_network(NOISE, sampler.parametrisation).at(LEVEL)
    law = advance(Law(state, noisy_text()), sampler, network, gibbs_cells(sampler, choice))
    return torch.zeros(27).double().index_add(0, law.state.canvas @ torch.tensor([9, 3, 1]), law.weight)


def distance_after(sampler, choice=permutations):
    return total_variation(corrected(sampler, choice), noisy_text())


@pytest.mark.parametrize("parametrisation", ["mean", "loo"])
def test_one_position_picked_at_random_keeps_the_distribution_exactly(parametrisation):
    assert distance_after(LeaveOneOutGibbs(parametrisation=parametrisation)) < 1e-14


@pytest.mark.parametrize(("num_positions", "distance"), [(2, 0.0462), (3, 0.1375)])
@pytest.mark.slow
def test_several_positions_at_once_do_not_keep_the_distribution(num_positions, distance):
    assert distance_after(LeaveOneOutGibbs(num_positions=num_positions)) == pytest.approx(distance, abs=5e-5)


def margins():
    """Margin of the canvas's token over the best other token, in the law of its redraw, (27, 3), by enumeration."""
    loo = exact_network(NOISE, "loo").at(LEVEL).denoise(SEQUENCES, None).logits.exp()
    law = ((1 - LEVEL) * loo + LEVEL / 3).log()
    shown = torch.nn.functional.one_hot(SEQUENCES, 3).bool()
    return law[shown].reshape(27, 3) - law.masked_fill(shown, -torch.inf).amax(-1)


def one_position_by_gumbel(state):
    """Gumbel noise on -margin picks position l with probability softmax(-margin) at l."""
    canvas = state.canvas @ torch.tensor([9, 3, 1])
    winner = torch.where(torch.eye(3).bool(), 1 - 1e-9, 1e-3).double().expand(len(canvas), -1, -1)
    return Points(winner, (-margins()).softmax(-1)[canvas])


def test_positions_picked_by_their_content_bias_the_distribution():
    """The negative controls pick the position of smallest margin, exactly or with Gumbel noise."""
    greedy = distance_after(
        LeaveOneOutGibbs(choice_temperature=0.0), lambda state: torch.zeros(state.batch_size, 3, 0).double()
    )
    blurred = distance_after(LeaveOneOutGibbs(choice_temperature=1.0), one_position_by_gumbel)
    assert greedy == pytest.approx(0.2556, abs=1e-4)
    assert blurred == pytest.approx(0.0842, abs=5e-5)


def test_a_correction_brings_two_ancestral_steps_closer_to_the_text():
    """Two ancestral steps without a correction have a distance of .3063."""
    sampler = LeaveOneOutGibbs(corrections=1)
    result = propagate(sampler, NOISE, steps=3, cells=gibbs_cells(sampler), level=lambda state: state.memory)
    assert result.law.sum().item() == pytest.approx(1, abs=1e-12)
    assert total_variation(result.law) < 0.29


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (1, ["1→0"]),
        (4, ["1→.5", "fix", "fix", ".5→0"]),
        (5, ["1→.667", ".667→.333", "fix", "fix", ".333→0"]),
        (7, ["1→.667", "fix", "fix", ".667→.333", "fix", "fix", ".333→0"]),
    ],
)
def test_ancestral_steps_divide_the_schedule_equally_and_include_the_first_and_last_step(steps, expected):
    sampler = LeaveOneOutGibbs(corrections=2)
    state = fresh_state(SEQUENCES[:1], NOISE, steps)
    state = replace(state, memory=sampler.start(state))
    seen = []
    for n in range(steps):
        state = replace(state, step=torch.tensor([n]))
        ancestral, level = sampler.clock(state)
        before, after = (f"{x.item():.3g}".lstrip("0") or "0" for x in (state.memory, level))
        seen.append(f"{before}→{after}" if ancestral.item() else "fix")
        assert ancestral.item() or before == after
        state = replace(state, memory=level)
    assert seen == expected


@pytest.mark.parametrize("num_positions", [1, 3])
def test_only_positions_that_may_change_are_picked(num_positions):
    state = fresh_state(SEQUENCES, NOISE, 9)
    state = replace(state, step=torch.full((27,), 1), memory=torch.full((27,), 0.5, dtype=torch.float64))
    state = replace(state, seeds=torch.arange(27), frozen=torch.tensor([True, False, True]).expand(27, 3))
    decision = LeaveOneOutGibbs(num_positions=num_positions)(Prediction(torch.zeros(27, 3, 3)), state)
    assert (decision.write | decision.renoise).sum(0).tolist() == [0, 27, 0]
