"""Results and states print on one line, without the contents of large tensors."""

import pytest
import torch

import dgemma
from rowwise import RowwiseDenoiser

PROMPT = torch.tensor([[2, 7, 9]])


@pytest.mark.parametrize("canvas_len", [16, 256])
def test_the_events_of_a_stream_print_on_one_line_at_any_size(canvas_len):
    model = RowwiseDenoiser()
    model.config = model.config.replace(canvas_length=canvas_len)
    record, *_, commit = dgemma.stream(model, PROMPT, steps=2, max_new_tokens=canvas_len)
    for event in (record, record.state, commit):
        assert len(repr(event).splitlines()) == 1
        assert len(repr(event)) < 2000  # a tensor of 256 tokens alone takes more
    assert f"canvas=int64 (1, {canvas_len})" in repr(record)
    assert "memory" not in repr(record.state).replace("stop_memory", "")  # a field that is None


def test_a_guided_model_does_not_print_the_layers_of_its_denoiser():
    model = dgemma.DiffusionGemma(dgemma.presets.tiny())
    guided = dgemma.Guided(model, strength=1.5, unconditional=4)
    assert repr(guided) == "Guided(denoiser=DiffusionGemma(...), strength=1.5, unconditional=4)"
    with dgemma.observe(model, residuals=[0], prefix=True) as observation:
        model.denoise(torch.zeros(1, 4, dtype=torch.int64), model.encode(PROMPT))
    assert repr(observation) == "Observation(2 passes, 1 of canvases)"
    assert "residuals={0: float32 (1, 3, " in repr(observation.passes[0])
