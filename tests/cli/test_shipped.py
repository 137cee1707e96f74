"""The shipped checkpoints: default commands work without a network and give sensible results."""

import json
from pathlib import Path

import pytest
import torch
from transformers import DiffusionGemmaConfig
from transformers.models.diffusion_gemma.generation_diffusion_gemma import DiffusionGemmaGenerationConfig

import dgemma

ASSETS = Path(dgemma.__file__).parent / "assets"
PUZZLE = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"
SOLUTION = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"

needs_text, needs_sudoku = (
    pytest.mark.skipif(not (ASSETS / name / "config.json").is_file(), reason=f"this copy ships no dgemma/{name}")
    for name in ("text", "sudoku")
)


@pytest.mark.parametrize(
    ("name", "noise", "sampler", "bound"),
    [
        pytest.param("text", dgemma.UniformNoise, dgemma.EntropyBound, 1.0, marks=needs_text),
        pytest.param("text-mask", dgemma.MaskNoise, dgemma.sampling.P2, 0.1, marks=needs_text),
        pytest.param("sudoku", dgemma.MaskNoise, dgemma.EntropyBound, 0.1, marks=needs_sudoku),
    ],
)
def test_a_shipped_checkpoint_stores_noise_and_sampler_and_transformers_can_read_it(name, noise, sampler, bound):
    model = dgemma.DiffusionGemma.from_pretrained(f"dgemma/{name}")
    assert type(dgemma.learnt_noise(model)) is noise
    assert type(dgemma.default_sampler(model)) is sampler
    theirs = DiffusionGemmaGenerationConfig.from_pretrained(ASSETS / name)
    assert (theirs.t_max, theirs.sampler_config.entropy_bound) == (model.generation.t_max, bound)
    assert DiffusionGemmaConfig.from_pretrained(ASSETS / name).noise["kind"] == noise.kind


@needs_text
def test_the_twin_of_the_text_model_differs_only_in_its_defaults(command):
    model, twin = (dgemma.DiffusionGemma.from_pretrained(f"dgemma/{name}") for name in ("text", "text-mask"))
    assert twin.config == model.config
    assert torch.equal(twin.norm.weight, model.norm.weight)
    assert "p2:eta=1.0" in command("info", "dgemma/text-mask").out


@needs_text
def test_a_hole_includes_the_space_before_its_word(command):
    """Tokens of whole words start with a space. If the space stayed outside the hole, none of them would fit."""
    found = json.loads(command("infill", "--json", "--steps", "1", "The ____ sat down.").out)
    words = dgemma.Tokenizer.from_pretrained("dgemma/text")
    assert found["tokens"][:2] == words.encode("The")
    assert found["tokens"][6:] == words.encode(" sat down.", bos=False)


@needs_text
def test_kept_words_keep_the_space_before_them(command):
    text, words = "It was the old man who spoke.", dgemma.Tokenizer.from_pretrained("dgemma/text")
    found = json.loads(command("edit", "--json", "--level", "1", "--steps", "1", "--keep", "old man", text).out)
    before, kept = len(words.encode("It was the")), words.encode(" old man", bos=False)
    assert found["tokens"][before : before + len(kept)] == kept


@pytest.mark.slow
@needs_text
def test_the_text_model_writes_words(command):
    found = json.loads(command("generate", "-n", "64", "--json", "It was a dark night, and the old captain").out)
    letters = sum(character.isalpha() or character in " ,.'\n" for character in found["text"])
    assert letters > 0.9 * len(found["text"])
    assert {"the", "and", "of", "to", "a", "in", "was", "his", "he"} & set(found["text"].split())


@pytest.mark.slow
@needs_text
def test_a_hole_is_filled_by_the_text_model(command):
    ran = command("infill", "The ____ said that he would not go.")
    assert ran.out.startswith("The ")
    assert ran.out.endswith(" said that he would not go.\n")


@needs_sudoku
def test_the_solver_solves(command):
    ran = command("sudoku", "--json", PUZZLE)
    assert json.loads(ran.out)["solution"] == SOLUTION
    assert ran.code == 0


def test_info_lists_the_shipped_checkpoints(command):
    shipped = sorted(f"dgemma/{config.parent.name}" for config in ASSETS.glob("*/config.json"))
    assert json.loads(command("info", "--json").out)["checkpoints"] == shipped
