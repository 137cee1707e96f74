"""Recipes agree and differ where their sources do: in their fields, and in the loss of a small model."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

import dgemma
from dgemma import DiffusionGemma
from dgemma.model.config import ModelConfig
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


def sums(model: DiffusionGemma, loss: Objective, term: str) -> Tensor:
    with torch.no_grad():
        return loss(model, BATCH, seeds=SEEDS).sums[term]


def scalar(model: DiffusionGemma, loss: Objective, rows: slice = slice(None)) -> float:
    with torch.no_grad():
        return loss.reduce(loss(model, BATCH.select(rows), seeds=SEEDS[rows])).item()


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
    assert parts(recipes.RECIPES[one](CONFIG), recipes.RECIPES[other](CONFIG)) == switches


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_recipe_takes_its_sizes_from_the_config_and_trains(model, name):
    loss = recipes.RECIPES[name](CONFIG)
    assert (loss.canvas_len, loss.fill_token, loss.noise.vocab_size) == (8, 3, 48)
    model.zero_grad()
    loss.reduce(loss(model, BATCH, seeds=SEEDS)).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0


def test_official_jax_and_trl_score_the_same_canvases_except_for_self_cond_off(model):
    jax, trl = recipes.official_jax(CONFIG), recipes.trl(CONFIG)
    repaired = recipes.official_jax(CONFIG, self_cond_off="zero_signal")
    assert (sums(model, jax, "decoder") - sums(model, trl, "decoder")).abs().min() > 1e-3
    torch.testing.assert_close(sums(model, repaired, "decoder")[:2], sums(model, trl, "decoder")[:2])
    # In the cut row TRL does not score the fill of the last canvas, if that canvas was drawn.
    assert sums(model, repaired, "decoder")[2] >= sums(model, trl, "decoder")[2]


def test_official_jax_and_trl_differ_in_the_causal_term_only_by_the_fill(model):
    jax, trl = (sums(model, recipe(CONFIG), "causal") for recipe in (recipes.official_jax, recipes.trl))
    for row, (prompt, length) in enumerate([(4, 17), (2, 10), (3, 16)]):
        end = prompt + -(-(length - prompt) // 8) * 8
        text = torch.cat([BATCH.tokens[row, :length], torch.full((end - length,), 3)])
        log_p = model.causal_logits(text[None, :-1])[0].log_softmax(-1)
        cost = -log_p.gather(1, text[1:, None])[:, 0]
        torch.testing.assert_close(jax[row] - trl[row], cost[length - 1 :].sum(), atol=1e-3, rtol=1e-4)
    assert jax[1] == pytest.approx(trl[1].item(), rel=1e-6)  # without fill there is no difference


def test_nemo_and_megatron_measure_the_same_except_for_cut_answers(model):
    nemo, megatron = recipes.nemo(CONFIG), recipes.megatron(CONFIG)
    for term in ("decoder", "causal"):
        torch.testing.assert_close(sums(model, nemo, term)[:2], sums(model, megatron, term)[:2])
        assert sums(model, nemo, term)[2] > 0
        assert sums(model, megatron, term)[2] == 0
    # With one process, Megatron's mean over the tokens of a process is NeMo's global mean.
    assert scalar(model, nemo, slice(0, 2)) == pytest.approx(scalar(model, megatron, slice(0, 2)), rel=1e-6)


def test_means_over_examples_and_over_tokens_agree_only_for_equal_rows(model):
    def pair(rows: slice) -> tuple[float, float]:
        changes = {"self_cond_off": "zero_signal", "t_range": (0.5, 0.5)}
        return tuple(scalar(model, recipe(CONFIG, **changes), rows) for recipe in (recipes.official_jax, recipes.nemo))

    example, token = pair(slice(0, 1))
    assert example == pytest.approx(token, rel=1e-6)
    example, token = pair(slice(0, 2))  # causal terms over 19 and 9 tokens
    assert abs(example - token) > 1e-4


def test_the_range_of_t_changes_the_noise_and_not_the_causal_term(model):
    jax, nemo = recipes.official_jax(CONFIG, self_cond_off="zero_signal"), recipes.nemo(CONFIG)
    torch.testing.assert_close(sums(model, jax, "causal"), sums(model, nemo, "causal"))
    level = [loss.draw(BATCH, SEEDS).noisy.level for loss in (jax, nemo)]
    # The same uniforms, rescaled: (1 - 2e-4) u + 1e-4 against (1 - 1e-3) u + 1e-3.
    torch.testing.assert_close((level[0] - 1e-4) / (1 - 2e-4), (level[1] - 1e-3) / (1 - 1e-3))


def test_dgemma_is_the_published_loss_over_all_canvases(model):
    every, one = recipes.dgemma(CONFIG), recipes.dgemma(CONFIG, canvases="one")
    torch.testing.assert_close(sums(model, every, "causal"), sums(model, one, "causal"))
    # Row 1 has only one canvas.
    torch.testing.assert_close(sums(model, every, "decoder")[1], sums(model, one, "decoder")[1])
    assert sums(model, every, "decoder")[0] > sums(model, one, "decoder")[0]


def test_llada_differs_from_mdlm_by_the_probability_of_the_mask(model):
    mdlm, llada = recipes.mdlm(CONFIG), recipes.llada(CONFIG)
    assert (sums(model, llada, "decoder") > sums(model, mdlm, "decoder")).all()
    torch.testing.assert_close(
        sums(model, recipes.llada(CONFIG, loss=mdlm.loss), "decoder"), sums(model, mdlm, "decoder")
    )


def test_block_diffusion_with_one_block_is_mdlm(model):
    blocks, mdlm = (sums(model, recipe(CONFIG), "decoder") for recipe in (recipes.block_diffusion, recipes.mdlm))
    torch.testing.assert_close(blocks[1], mdlm[1])
    whole = {"canvas_len": 16}  # now every answer is one block
    torch.testing.assert_close(
        sums(model, recipes.block_diffusion(CONFIG, **whole), "decoder"),
        sums(model, recipes.mdlm(CONFIG, **whole), "decoder"),
    )


def test_changes_override_a_recipe_and_unknown_ones_are_refused():
    assert recipes.trl(CONFIG, causal_weight=0.0).causal_weight == 0.0
    with pytest.raises(TypeError, match="label_smoothing"):
        recipes.trl(CONFIG, label_smoothing=0.1)


def test_adapters_are_those_of_the_sources():
    assert recipes.adapter("trl") == recipes.adapter("unsloth")
    assert "router" in recipes.adapter("official_jax").targets
    assert "router" not in recipes.adapter("trl").targets
    assert recipes.adapter("megatron") is None
    with pytest.raises(ValueError, match="recipe must be among"):
        recipes.adapter("nemo")


@pytest.mark.parametrize(
    ("recipe", "router", "others"),
    [("megatron", False, True), ("trl", False, False), ("official_jax", True, False), ("dgemma", True, False)],
)
def test_recipes_differ_in_whether_routers_learn(recipe, router, others):
    """A router learns through its own weights or through an adapter on them."""
    model = DiffusionGemma(CONFIG)
    recipes.prepare(model, recipe)
    loss = recipes.RECIPES[recipe](CONFIG)
    loss.reduce(loss(model, BATCH, seeds=SEEDS)).backward()
    learns = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert any(".router." in name for name in learns) is router
    assert any(name.endswith("q_proj.weight") for name in learns) is others
    assert any("q_proj" in name for name in learns)


def test_recipes_take_the_published_sizes_from_the_published_config():
    published: ModelConfig = dgemma.presets.diffusiongemma_26b_a4b()
    loss = recipes.official_jax(published)
    assert (loss.noise.vocab_size, loss.canvas_len, loss.fill_token) == (262_144, 256, 1)
    assert loss.t_range == (1e-4, 1 - 1e-4)


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
