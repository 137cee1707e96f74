"""No sampler and no stop rule waits for the device: all of them run on tensors without values.

The device "meta" stands for a GPU. Its tensors have only a shape, so `.item()`, `bool(tensor)`, `nonzero` and boolean
indexing raise. Combining them with a tensor that was made on the host by mistake raises too.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dgemma.diffusion.noise import UniformNoise
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState
from dgemma.sampling.base import Sampler
from dgemma.sampling.temperature import ConstantTemperature, LinearTemperature
from every_sampler import SAMPLERS, STOP_RULES, noises

VOCAB, CANVAS_LEN, BATCH, DEVICE = 11, 6, 3, "meta"


class QuickDraws(DenoiseState):
    """Cheap draws: Philox takes two hundred operations per draw, and one test below covers it."""

    def uniform(self, purpose: str) -> torch.Tensor:
        return torch.zeros(self.canvas.shape, dtype=torch.float64, device=self.device)

    def row_uniform(self, purpose: str) -> torch.Tensor:
        return torch.zeros(self.batch_size, dtype=torch.float64, device=self.device)


def fake_state(noise: Any, kind: type[DenoiseState] = QuickDraws) -> DenoiseState:
    """A state in the middle of a run."""
    row = torch.ones(BATCH, dtype=torch.int64, device=DEVICE)
    canvas = torch.ones(BATCH, CANVAS_LEN, dtype=torch.int64, device=DEVICE)
    return kind(
        canvas=canvas,
        open=canvas > 0,
        frozen=canvas > 1,
        draft=canvas,
        done=row > 1,
        block=row,
        step=row,
        num_steps=row * 4,
        noise_level=row.double() / 2,
        next_noise_level=row.double() / 4,
        temperature=row.float(),
        seeds=row,
        rows=row,
        noise=noise,
        allowed=torch.ones(1, 1, VOCAB, dtype=torch.bool, device=DEVICE),
    )


def fake_prediction(state: DenoiseState) -> Prediction:
    logits = torch.zeros(BATCH, CANVAS_LEN, VOCAB, device=state.device)
    return Prediction(logits).shaped(temperature=state.temperature, allowed=state.allowed)


def run_sampler(sampler: Sampler, noise: Any) -> None:
    """Take two steps, so that the second gets the memory of the first, and then finish."""
    state = fake_state(noise)
    state = replace(state, memory=sampler.start(state))
    for _ in range(2):
        prediction = fake_prediction(state)
        decision = sampler(prediction, state)
        for mask in (decision.write, decision.renoise):
            assert mask.shape == (BATCH, CANVAS_LEN)
            assert mask.dtype == torch.bool
            assert mask.device.type == DEVICE
        assert decision.tokens.shape == (BATCH, CANVAS_LEN)
        assert decision.tokens.dtype == torch.int64
        refill = noise.refill(state.uniform("noise"), state.next_noise_level, allowed=state.allowed)
        canvas = torch.where(decision.renoise, refill, state.canvas)
        state = replace(state, canvas=canvas, memory=decision.memory)
    assert sampler.final(fake_prediction(state), state).shape == (BATCH, CANVAS_LEN)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_no_sampler_reads_a_value_on_the_host(sampler):
    assert sampler.valid_for
    for noise in noises(sampler, VOCAB):
        run_sampler(sampler, noise)


@pytest.mark.parametrize("rule", [*STOP_RULES, STOP_RULES[0] | (STOP_RULES[1] & STOP_RULES[2])], ids=repr)
def test_no_stop_rule_reads_a_value_on_the_host(rule):
    state = fake_state(UniformNoise(VOCAB))
    state = replace(state, stop_memory=rule.start(state))
    for _ in range(2):
        done, memory = rule(fake_prediction(state), state)
        assert done.shape == (BATCH,)
        assert done.dtype == torch.bool
        assert done.device.type == DEVICE
        state = replace(state, stop_memory=memory)


@pytest.mark.parametrize("temperature", [LinearTemperature(), ConstantTemperature()], ids=repr)
def test_no_temperature_reads_a_value_on_the_host(temperature):
    row = torch.ones(BATCH, dtype=torch.int64, device=DEVICE)
    assert temperature(row, row).device.type == DEVICE


def test_no_draw_reads_a_value_on_the_host():
    state = fake_state(UniformNoise(VOCAB), DenoiseState)
    assert state.uniform("token").shape == (BATCH, CANVAS_LEN)
    assert state.row_uniform("token").shape == (BATCH,)
