"""Presets have the sizes that their names and docstrings state."""

from dataclasses import replace
from pathlib import Path

import pytest

import dgemma

ASSETS = Path(dgemma.__file__).parent / "assets"


def counts(config: dgemma.ModelConfig) -> tuple[int, int]:
    model = dgemma.DiffusionGemma(config, device="meta")
    return model.num_parameters(), model.num_parameters(active=True)


def test_the_1b_preset_has_the_published_proportions():
    ours, published = dgemma.presets.medium_1b(), dgemma.presets.diffusiongemma_26b_a4b()
    total, active = counts(ours)
    assert total == pytest.approx(0.94e9, rel=0.01)
    assert active == pytest.approx(0.38e9, rel=0.01)
    for numerator, denominator in (
        ("top_k_experts", "num_experts"),
        ("intermediate_size", "hidden_size"),
        ("moe_intermediate_size", "hidden_size"),
        ("num_key_value_heads", "num_attention_heads"),
        ("head_dim", "global_head_dim"),
        ("canvas_length", "sliding_window"),
    ):
        ratios = [getattr(config, numerator) / getattr(config, denominator) for config in (ours, published)]
        assert ratios[0] == ratios[1], numerator
    assert ours.vocab_size == published.vocab_size


@pytest.mark.parametrize("name", ["text", "sudoku"])
def test_checkpoints_that_ship_have_presets(name):
    shipped = dgemma.ModelConfig.from_hf(ASSETS / name)
    # `carried` holds the dtype of the saved weights, which a preset does not define.
    assert getattr(dgemma.presets, name)() == replace(shipped, carried={})
