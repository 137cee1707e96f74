"""The options of `generate`, `stream`, `infill` and `edit` are the same at run time, in signatures and for mypy."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dgemma
from dgemma.run.options import CanvasOptions, RunOptions, TextOptions, defaults_of
from dgemma.run.plan import read_plan

ROOT = Path(__file__).parents[2]
CALLS = """
import torch
import dgemma

model, tokens = dgemma.DiffusionGemma(dgemma.presets.tiny()), torch.full((1, 8), 5)
dgemma.generate(model, tokens, steps=3, temperature=0.5, sampler=dgemma.EntropyBound(), record=True, seed=[4])
dgemma.infill(model, tokens, [(2, 4)], steps=3, progress=False)
for event in dgemma.stream(model, tokens, stop=None, frozen=None):
    pass
dgemma.edit(model, tokens, noise_level=0.4, allowed=[7, 8])
dgemma.generate(model, tokens, stepz=3)  # refused
dgemma.generate(model, tokens, steps="many")  # refused
dgemma.stream(model, tokens, record=True)  # refused
dgemma.infill(model, tokens, [(2, 4)], max_new_tokens=8)  # refused
dgemma.edit(model, tokens, stepz=3)  # refused
"""


@pytest.mark.slow
def test_mypy_refuses_options_that_do_not_exist_or_have_another_type(tmp_path):
    calls = tmp_path / "calls.py"
    calls.write_text(CALLS)
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", calls]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    refused = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    assert refused == {at for at, line in enumerate(CALLS.splitlines(), 1) if "# refused" in line}, done.stdout


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (dgemma.generate, RunOptions),
        (dgemma.stream, RunOptions),
        (dgemma.generate_many, TextOptions),
        (read_plan, RunOptions),
        (dgemma.infill, CanvasOptions),
        (dgemma.edit, CanvasOptions),
    ],
)
def test_a_signature_shows_every_option_with_its_default(function, options):
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in options.__annotations__} == defaults_of(options)
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def test_an_omitted_option_has_the_default_that_the_signature_shows():
    model, prompt = dgemma.DiffusionGemma(dgemma.presets.tiny()), torch.full((2, 3), 5)
    short, full = read_plan(model, prompt), read_plan(model, prompt, **defaults_of(RunOptions))
    assert (short.knobs, short.noise, short.num_steps) == (full.knobs, full.noise, full.num_steps)
    assert short.seeds.tolist() == full.seeds.tolist() == [[0, 1]] * short.num_blocks


@pytest.mark.parametrize("function", [dgemma.generate, dgemma.stream, read_plan])
def test_an_unknown_option_is_refused_by_the_function_that_got_it(function):
    sentence = rf"{function.__name__} got an unexpected keyword argument 'stepz'\. It takes allowed, .*steps"
    with pytest.raises(TypeError, match=sentence):
        function(dgemma.DiffusionGemma(dgemma.presets.tiny()), torch.full((1, 3), 5), stepz=3)


def test_a_model_that_is_not_a_denoiser_is_refused():
    with pytest.raises(TypeError, match=r"model must be a Denoiser, got str\. Derive its class from dgemma\.Denoiser"):
        dgemma.generate("dgemma/text", torch.full((1, 3), 5))
    with pytest.raises(TypeError, match=r"Guided model must be a Denoiser, got str"):
        dgemma.Guided("dgemma/text", strength=1.0, unconditional=4)
