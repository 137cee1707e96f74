"""The options of `generate` and of functions like it are the same at run time and in signatures."""

import inspect

import pytest
import torch

import dgemma
from dgemma.many.on_ray import generate_on_ray
from dgemma.many.prompts import ManyOptions
from dgemma.run.options import GenerateOptions, RunOptions, defaults_of
from dgemma.run.plan import read_plan
from dgemma.tasks.infill import InfillOptions


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (dgemma.generate, GenerateOptions),
        (dgemma.stream, RunOptions),
        (dgemma.generate_many, ManyOptions),
        (generate_on_ray, ManyOptions),
        (read_plan, RunOptions),
        (dgemma.infill, InfillOptions),
        (dgemma.edit, InfillOptions),
    ],
)
def test_a_signature_shows_every_option_with_its_default(function, options):
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in options.__annotations__} == defaults_of(options)
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())


@pytest.mark.parametrize("function", [dgemma.generate, dgemma.stream, read_plan])
def test_an_unknown_option_is_refused_by_the_function_that_got_it(function):
    sentence = rf"{function.__name__} got .* argument 'eos_token_id'\. Perhaps you meant eos_token_ids\. It takes"
    with pytest.raises(TypeError, match=sentence):
        function(dgemma.DiffusionGemma(dgemma.presets.tiny()), torch.full((1, 3), 5), eos_token_id=3)


def test_a_model_that_is_not_a_denoiser_is_refused():
    with pytest.raises(TypeError, match=r"model must be a Denoiser, got str\. Load one .* derive its class from"):
        dgemma.generate("dgemma/text", torch.full((1, 3), 5))
    with pytest.raises(TypeError, match=r"Guided model must be a Denoiser, got str"):
        dgemma.Guided("dgemma/text", strength=1.0, unconditional=4)
