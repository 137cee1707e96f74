"""Results and states print on one line, without the contents of large tensors."""

import pytest
import torch

import dgemma
from dgemma.run.records import BlockCommit
from rowwise import RowwiseDenoiser

PROMPT = torch.tensor([[2, 7, 9]])


def test_a_decision_shows_the_shapes_of_its_tensors():
    write = torch.ones(2, 16, dtype=torch.bool)
    decision = dgemma.Decision(tokens=torch.zeros(2, 16, dtype=torch.int64), write=write, renoise=~write)
    assert repr(decision) == "Decision(tokens=int64 (2, 16), write=bool (2, 16), renoise=bool (2, 16))"


def test_numbers_of_rows_are_shown_as_numbers():
    steps, finished = torch.tensor([3, 4]), torch.tensor([True, False])
    commit = BlockCommit(block=1, tokens=torch.zeros(2, 16), finished=finished, steps=steps)
    assert repr(commit) == "BlockCommit(block=1, tokens=float32 (2, 16), finished=[True, False], steps=[3, 4])"


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
