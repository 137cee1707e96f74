"""Recipes agree and differ where their sources do: in their fields, and in the loss of a small model."""

from dataclasses import fields

import pytest
import torch

import dgemma
from dgemma import DiffusionGemma
from dgemma.train import Objective, TrainBatch, recipes

CONFIG = dgemma.presets.tiny().replace(vocab_size=48, canvas_length=8, eos_token_id=3, num_experts=4)
# Row 0 ends within a canvas, row 1 fills exactly one, and row 2 was cut in its second.
BATCH = TrainBatch(
    tokens=torch.arange(3 * 18).reshape(3, 18) % 40 + 6,
    prompt_len=torch.tensor([4, 2, 3]),
    length=torch.tensor([17, 10, 16]),
    truncated=torch.tensor([False, False, True]),
)
SEEDS = torch.arange(3) + 5
NAMES = (
    *("dgemma", "official_jax", "trl", "unsloth", "nemo", "megatron", "leave_one_out"),
    *("mdlm", "llada", "block_diffusion", "duo", "gidd"),
)


@pytest.fixture(scope="module")
def model() -> DiffusionGemma:
    torch.manual_seed(2)
    model = DiffusionGemma(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def parts(one: Objective, other: Objective) -> set[str]:
    """Return the fields in which two objectives differ."""
    return {f.name for f in fields(Objective) if getattr(one, f.name) != getattr(other, f.name)}


@pytest.mark.parametrize(
    ("one", "other", "switches"),
    [
        ("trl", "unsloth", set()),
        ("official_jax", "trl", {"self_cond_off", "reduction", "causal_fill", "truncated"}),
        ("official_jax", "nemo", {"self_cond_off", "reduction", "t_range"}),
        ("nemo", "megatron", {"reduction", "truncated"}),
        ("nemo", "dgemma", {"t_range", "canvases", "truncated"}),
        ("mdlm", "llada", {"loss", "reduction"}),
        ("mdlm", "block_diffusion", {"canvases"}),
        ("mdlm", "duo", {"noise", "loss"}),
        ("duo", "gidd", {"noise", "loss", "t_range"}),
        ("nemo", "leave_one_out", {"t_range", "loss"}),
    ],
)
def test_two_recipes_differ_in_exactly_these_fields(one, other, switches):
    assert parts(getattr(recipes, one)(CONFIG), getattr(recipes, other)(CONFIG)) == switches


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_takes_its_sizes_from_the_config_and_trains(model, name):
    loss = getattr(recipes, name)(CONFIG)
    assert (loss.canvas_len, loss.fill_token, loss.noise.vocab_size) == (8, 3, 48)
    model.zero_grad()
    loss.reduce(loss(model, BATCH, seeds=SEEDS)).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0


def test_a_recipe_without_an_adapter_or_routers_of_its_own_is_refused():
    with pytest.raises(ValueError, match="recipe must be among"):
        recipes.prepare(DiffusionGemma(CONFIG), "nemo")


@pytest.mark.parametrize(
    ("recipe", "router", "others"),
    [("megatron", False, True), ("trl", False, False), ("official_jax", True, False), ("dgemma", True, False)],
)
def test_recipes_differ_in_whether_routers_learn(recipe, router, others):
    """A router learns through its own weights or through an adapter on them."""
    model = DiffusionGemma(CONFIG)
    recipes.prepare(model, recipe)
    loss = getattr(recipes, recipe)(CONFIG)
    loss.reduce(loss(model, BATCH, seeds=SEEDS)).backward()
    learns = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert any(".router." in name for name in learns) is router
    assert any(name.endswith("q_proj.weight") for name in learns) is others
    assert any("q_proj" in name for name in learns)


def test_softened_attention_scores_have_unit_spread():
    config = dgemma.presets.tiny().replace(head_dim=64, global_head_dim=64)
    torch.manual_seed(0)
    model = dgemma.DiffusionGemma(config)
    tokens = torch.randint(config.vocab_size, (4, 64))

    def spread() -> float:
        # Log-weights within a row are the scores up to a constant.
        with dgemma.observe(model, attention=[2], prefix=True) as observation:
            model.encode(tokens)
        last_rows = observation.passes[0].attention[2][:, :, -1].clamp(min=1e-30).log()
        return last_rows.std(-1).mean().item()

    fresh = spread()
    recipes.soften_attention(model)
    # Products of normalised queries and keys of 64 entries have a standard deviation of sqrt(64) = 8.
    assert 4 < fresh < 16
    assert 0.5 < spread() < 2
