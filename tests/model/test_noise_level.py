"""The optional noise-level input: off by default and without effect; if on, the network uses it and it is saved."""

import json

import pytest
import torch

import dgemma
from dgemma.tasks.guidance import Guided
from dgemma.tasks.slots import Slot, slots

PLAIN = dgemma.presets.tiny()
CONDITIONED = PLAIN.replace(noise_conditioning=True)


@pytest.fixture
def canvas():
    return torch.randint(512, (2, 32))


def levels(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_config_and_weights_have_no_noise_level_if_it_is_off(tmp_path):
    model = dgemma.DiffusionGemma(PLAIN)
    model.save_pretrained(tmp_path)
    assert "noise_conditioning" not in (tmp_path / "config.json").read_text()
    assert not [name for name in model.state_dict() if "noise" in name]
    assert dgemma.ModelConfig.from_hf(tmp_path).noise_conditioning is False


def test_a_level_changes_nothing_if_conditioning_is_off(canvas):
    model = dgemma.DiffusionGemma(PLAIN)
    cache = model.encode(canvas[:, :4])
    logits = model.denoise(canvas, cache, noise_level=levels(0.2, 0.9)).logits
    assert torch.equal(logits, model.denoise(canvas, cache).logits)


def test_the_prediction_of_a_row_depends_on_its_level_if_conditioning_is_on(canvas):
    model = dgemma.DiffusionGemma(CONDITIONED)
    cache = model.encode(canvas[:, :4])
    first, second = (model.denoise(canvas, cache, noise_level=levels(a, 0.9)).logits for a in (0.2, 0.7))
    assert (first[0] - second[0]).abs().max() > 1e-4
    assert torch.equal(first[1], second[1])


def test_a_level_per_position_is_the_level_of_the_row_repeated(canvas):
    model = dgemma.DiffusionGemma(CONDITIONED)
    by_row = model.embed_canvas(canvas, None, levels(0.2, 0.9))
    by_position = model.embed_canvas(canvas, None, levels(0.2, 0.9)[:, None].expand(2, 32))
    torch.testing.assert_close(by_row, by_position)  # products of other sizes may round differently


def test_both_ends_are_finite_and_gradients_reach_the_weights(canvas):
    model = dgemma.DiffusionGemma(CONDITIONED)
    logits = model.denoise(canvas, model.encode(canvas[:, :4]), noise_level=levels(0.0, 1.0)).logits
    logits.square().mean().backward()
    for weight in model.noise_level_embedding.parameters():
        assert weight.grad.isfinite().all()
        assert weight.grad.abs().max() > 0


def test_the_level_embedding_is_saved_and_loaded(tmp_path, canvas):
    model = dgemma.DiffusionGemma(CONDITIONED)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["text_config"]["noise_conditioning"] is True
    again = dgemma.DiffusionGemma.from_pretrained(tmp_path)
    assert again.config.noise_conditioning
    logits = [m.denoise(canvas, m.encode(canvas[:, :4]), noise_level=levels(0.3, 0.6)).logits for m in (model, again)]
    assert torch.equal(*logits)


@pytest.fixture
def heard(monkeypatch):
    """A conditioned model, and a list of the levels per position that it gets."""
    model, levels = dgemma.DiffusionGemma(CONDITIONED), []
    denoise = model.denoise

    def listen(canvas, cache, **keywords):
        levels.extend(map(tuple, keywords["noise_level"].tolist()))
        return denoise(canvas, cache, **keywords)

    monkeypatch.setattr(model, "denoise", listen)
    return model, levels


def test_generation_passes_the_level_of_every_step_to_the_model(heard):
    model, levels = heard
    for denoiser in (model, Guided(model, strength=0.0, unconditional=0)):
        levels.clear()
        dgemma.generate(denoiser, torch.randint(512, (1, 5)), max_new_tokens=32, steps=4, stop=None)
        assert levels[:: len(levels) // 4] == [(level,) * 32 for level in (1.0, 0.75, 0.5, 0.25)]


def test_slots_pass_the_noise_of_each_position_to_the_model(heard):
    model, levels = heard
    slots(model, [[7, 8, 9], Slot([[10], [11]]), [12, 13]])
    assert set(levels) == {(1, 0, 0, *[1] * 29)}  # only the tokens 12 and 13 are known


def test_a_model_that_needs_the_level_raises_without_it(canvas):
    model = dgemma.DiffusionGemma(CONDITIONED)
    with pytest.raises(ValueError, match=r"noise_level must be a tensor .* got None"):
        model.denoise(canvas, model.encode(canvas[:, :4]))
    with pytest.raises(ValueError, match=r"ModelConfig\.noise_conditioning must be bool, got 1"):
        PLAIN.replace(noise_conditioning=1)


def test_the_fused_engine_refuses_noise_conditioning():
    dgemma_kernels = pytest.importorskip("dgemma_kernels")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = dgemma.DiffusionGemma(CONDITIONED, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="noise_conditioning must be False for the kernels"):
        dgemma_kernels.accelerate(model)
