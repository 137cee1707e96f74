"""The vision tower against transformers' Gemma4VisionModel, and the places of images in a prompt."""

import pytest
import torch

from dgemma import DiffusionGemma, presets
from dgemma.model.vision.images import Images
from dgemma.quantization.rounding import Quantization
from dgemma.train.lora import LoRA, add_lora
from image_prompts import GRIDS, padded, random_images
from published import pair


@torch.no_grad()
@pytest.mark.parametrize("grids", [GRIDS, GRIDS[1:2]], ids=["several", "one"])
def test_features_equal_the_published_ones(grids):
    """Float32 rounding through two layers; an error in a position or a norm is of the order of the features."""
    ours, theirs = pair(presets.tiny(vision=True))
    images = random_images(grids)
    pixels, positions = padded(images)
    expected = theirs.model.encoder.get_image_features(pixels, positions, return_dict=True).pooler_output
    got = ours.vision(images)
    assert got.shape == (sum(images.num_tokens), 64)
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


@torch.no_grad()
def test_an_image_alone_has_the_features_that_it_has_among_others():
    tower, images = DiffusionGemma(presets.tiny(vision=True)).vision, random_images()
    alone = torch.cat([tower(images.select([number])) for number in range(len(images))])
    torch.testing.assert_close(tower(images), alone)
    joined = Images.join([images.select([0, 1]), images.select([2, 3])])
    assert torch.equal(joined.patches, images.patches)
    assert joined.grids == images.grids


def test_positions_are_column_then_row():
    assert random_images([(3, 6)]).positions.tolist()[:4] == [[0, 0], [1, 0], [2, 0], [0, 1]]


def test_features_do_not_overflow_in_float16():
    """Patches of 3e4 become 1.7e5 after the scaling by sqrt(32): beyond float16, before they are standardised."""
    tower = DiffusionGemma(presets.tiny(vision=True)).half().vision
    with torch.no_grad():
        tower.patch_embedder.position_embedding_table.fill_(1.5e4)
        tower.std_scale.fill_(1e-3)
        assert tower(random_images()).isfinite().all()


def test_images_of_another_processor_and_too_long_images_are_named():
    tower = DiffusionGemma(presets.tiny(vision=True)).vision
    with pytest.raises(ValueError, match="have patches of 48 values"):
        tower(random_images(patch_dim=768))
    with pytest.raises(ValueError, match="at most 256 patches per side, got 300"):
        tower(random_images([(300, 3)]))
    with pytest.raises(ValueError, match=r"Images.patches must be uint8 patches \(9, patch_dim\)"):
        Images(torch.zeros(8, 48, dtype=torch.uint8), ((3, 3),))


def test_quantisation_and_adapters_leave_the_tower_alone(tmp_path):
    model = DiffusionGemma(presets.tiny(vision=True), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    quantized = DiffusionGemma.from_pretrained(tmp_path / "plain", quantization=Quantization(group_size=32))
    quantized.save_pretrained(tmp_path / "quantized")
    again = DiffusionGemma.from_pretrained(tmp_path / "quantized")
    for name, weight in model.vision.state_dict().items():
        assert torch.equal(again.vision.state_dict()[name], weight), name
    assert [part.format for part in again.memory_report().parts if part.part == "vision"] == ["bfloat16"]

    add_lora(model, LoRA(targets=("attention", "dense")))
    assert not any(weight.requires_grad for weight in model.vision.parameters())
    projection = DiffusionGemma(presets.tiny(vision=True))
    add_lora(projection, LoRA(targets=("vision_projection",)))
    names = {name for name, weight in projection.named_parameters() if weight.requires_grad}
    assert names == {"vision.embedding_projection.lora_a", "vision.embedding_projection.lora_b"}
