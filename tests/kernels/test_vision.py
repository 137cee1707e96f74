"""The kernels of the vision tower against their references in float64, and the whole tower against the plain one."""

import pytest
import torch

from dgemma import presets
from dgemma.model.config import VisionConfig
from dgemma.model.vision.tower import rotary_table_2d
from dgemma_kernels.engine import vision
from dgemma_kernels.engine.graphs import GraphMemory
from dgemma_kernels.ops.vision import kernel, reference
from image_prompts import IMAGE, random_images
from kernel_inputs import error, make_model

EPS = 1e-6
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3}  # a sum of a few hundred terms; a few roundings of 2**-11
DTYPES = pytest.mark.parametrize("dtype", LIMITS, ids=["float32", "float16"])
VISION = {"vision_config": presets.tiny(vision=True).vision_config, "carried": {"image_token_id": IMAGE}}
NUM_HEADS = 3
TILE = kernel.PatchTile(rows=16, keys=16)  # several tiles in 40 patches


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@DTYPES
@pytest.mark.parametrize("head_dim", [72, 16, 12], ids=["two-products", "one-product", "padded"])
def test_heads_are_normed_rotated_and_padded_with_zeros(head_dim, dtype, device):
    config = VisionConfig(head_dim=head_dim)
    positions = torch.tensor([[0, 0], [3, 1], [41, 59]], device=device)
    tables = [table.flatten(1) for table in rotary_table_2d(config, positions, dtype)]
    inputs = [draw(3, 9 * head_dim, seed=1), draw(head_dim, seed=2), draw(head_dim, seed=3)]
    inputs = [*(x.to(device, dtype) for x in inputs), *tables]
    got = kernel.norm_patch_heads(*inputs, num_heads=NUM_HEADS, eps=EPS)
    want = reference.norm_patch_heads(*(x.double() for x in inputs), num_heads=NUM_HEADS, eps=EPS)
    assert error(got[..., :head_dim], want) < LIMITS[dtype]
    assert not got[..., head_dim:].any()


@DTYPES
@pytest.mark.parametrize("head_dim", [72, 16], ids=["two-products", "one-product"])
def test_patches_see_their_image_and_padding_sees_nothing(head_dim, dtype, device):
    """An image of one patch, images that begin and end within tiles, and six patches of padding."""
    bounds = torch.tensor([0, 1, 18, 34, 34])
    sizes = torch.tensor([1, 17, 16, 6])
    spans = torch.stack((bounds[:-1], bounds[1:]), -1).repeat_interleave(sizes, 0).int().to(device)
    width = {72: 80, 16: 16}[head_dim]
    heads = draw(3, NUM_HEADS, 40, width, seed=1).to(device, dtype)
    heads[..., head_dim:] = 0
    got = kernel.attend_patches(heads, spans, head_dim, tile=TILE)
    assert error(got, reference.attend_patches(heads.double(), spans, head_dim)) < LIMITS[dtype]
    assert not got[34:].any()


@DTYPES
def test_the_residual_stream_and_the_next_norm(dtype, device):
    rows = [draw(5, 88, seed=seed).to(device, dtype) for seed in (1, 2)]
    norms = [draw(88, seed=seed).to(device, dtype) for seed in (3, 4)]
    wants = reference.add_normed(*(x.double() for x in rows + norms), EPS)
    for got, want in zip(kernel.add_normed(*rows, *norms, EPS), wants, strict=True):
        assert error(got, want) < LIMITS[dtype]


@pytest.mark.slow
@torch.no_grad()
def test_the_tower_equals_the_plain_one_over_several_forwards(device, monkeypatch):
    """Images of 9, 54, 90 and 63 patches in groups of at most 90, twice, so that a captured forward runs again."""
    monkeypatch.setattr(vision, "_MOST", 90)
    tower = make_model(device, vocab_size=60, **VISION).vision
    fused = vision.FusedTower(tower, GraphMemory(device))
    for seed in (0, 1):
        images = random_images(seed=seed)
        torch.testing.assert_close(fused(images), tower(images.to(device)), rtol=2e-5, atol=2e-5)
