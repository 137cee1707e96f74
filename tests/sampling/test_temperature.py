"""Temperature schedules, the published one bit for bit against transformers."""

import pytest
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import LinearTemperatureScheduleLogitsProcessor

from dgemma.diffusion.prediction import Prediction
from dgemma.sampling.temperature import LinearTemperature


def every_step(temperature, num_steps):
    step = torch.arange(num_steps)
    return temperature(step, torch.full_like(step, num_steps))


@pytest.mark.parametrize("num_steps", [1, 7, 48])
@pytest.mark.parametrize(("start", "end"), [(0.8, 0.4), (1.3, 0.1)])
def test_tempered_logits_equal_those_of_transformers_bit_for_bit(num_steps, start, end):
    reference = LinearTemperatureScheduleLogitsProcessor(t_min=end, t_max=start, max_denoising_steps=num_steps)
    logits = torch.randn(num_steps, 4, 33, generator=torch.Generator().manual_seed(0)) * 8
    temperature = every_step(LinearTemperature(start=start, end=end), num_steps)
    tempered = Prediction(logits).shaped(temperature=temperature).logits  # row n is at step n
    for n in range(num_steps):
        steps_left = torch.tensor(num_steps - n, dtype=torch.int32)
        assert torch.equal(tempered[n], reference(None, logits[n], cur_step=steps_left))


def test_rows_may_be_at_different_steps_of_runs_of_different_length():
    values = LinearTemperature(start=1.0, end=0.5)(torch.tensor([0, 2, 5]), torch.tensor([4, 4, 10]))
    assert values.tolist() == [1.0, 0.75, 0.75]
