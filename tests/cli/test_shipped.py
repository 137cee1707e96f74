"""The shipped checkpoints: default commands work without a network and give sensible results."""

import json
from pathlib import Path

import pytest
from transformers import DiffusionGemmaConfig
from transformers.models.diffusion_gemma.generation_diffusion_gemma import DiffusionGemmaGenerationConfig

import dgemma
from cli.test_sudoku import PUZZLE, SOLUTION

ASSETS = Path(dgemma.__file__).parent / "assets"


@pytest.mark.parametrize(
    ("name", "noise", "sampler", "bound"),
    [
        ("text", dgemma.UniformNoise, dgemma.EntropyBound, 1.0),
        ("text-mask", dgemma.MaskNoise, dgemma.sampling.P2, 0.1),
        ("sudoku", dgemma.MaskNoise, dgemma.EntropyBound, 0.1),
    ],
)
def test_a_shipped_checkpoint_stores_noise_and_sampler_and_transformers_can_read_it(name, noise, sampler, bound):
    model = dgemma.DiffusionGemma.from_pretrained(f"dgemma/{name}")
    assert type(dgemma.learnt_noise(model)) is noise
    assert type(dgemma.default_sampler(model)) is sampler
    theirs = DiffusionGemmaGenerationConfig.from_pretrained(ASSETS / name)
    assert (theirs.t_max, theirs.sampler_config.entropy_bound) == (model.generation.t_max, bound)
    assert DiffusionGemmaConfig.from_pretrained(ASSETS / name).noise["kind"] == noise.kind


def test_a_hole_includes_the_space_before_its_word(command):
    """Tokens of whole words start with a space. If the space stayed outside the hole, none of them would fit."""
    found = json.loads(command("infill", "--json", "--steps", "1", "The ____ sat down.").out)
    words = dgemma.Tokenizer.from_pretrained("dgemma/text")
    assert found["tokens"][:2] == words.encode("The")
    assert found["tokens"][6:] == words.encode(" sat down.", bos=False)


def test_kept_words_keep_the_space_before_them(command):
    text, words = "It was the old man who spoke.", dgemma.Tokenizer.from_pretrained("dgemma/text")
    found = json.loads(command("edit", "--json", "--level", "1", "--steps", "1", "--keep", "old man", text).out)
    before, kept = len(words.encode("It was the")), words.encode(" old man", bos=False)
    assert found["tokens"][before : before + len(kept)] == kept


@pytest.mark.slow
def test_the_text_model_writes_words(command):
    found = json.loads(command("generate", "-n", "64", "--json", "It was a dark night, and the old captain").out)
    letters = sum(character.isalpha() or character in " ,.'\n" for character in found["text"])
    assert letters > 0.9 * len(found["text"])
    assert {"the", "and", "of", "to", "a", "in", "was", "his", "he"} & set(found["text"].split())


def test_the_solver_solves(command):
    ran = command("sudoku", "--json", PUZZLE)
    assert json.loads(ran.out)["solution"] == SOLUTION
    assert ran.code == 0
