"""The fused engine reads images as the reference does."""

import copy
import itertools

import pytest
import torch

import dgemma
from dgemma import presets
from dgemma.model.quantize import quantize
from dgemma.model.quantized import set_weight
from dgemma_kernels import accelerate
from dgemma_kernels.ops.attention import reference
from dgemma_kernels.ops.attention.images import attention_with_images
from image_prompts import IMAGE, prompts
from kernel_inputs import make_model

CLOSE = {"rtol": 2e-4, "atol": 2e-4}  # as in test_engine
CODES = {"rtol": 3e-2, "atol": 3e-2}  # prompts without images differ by 0.015: kernels round the inputs of codes
VISION = {"vision_config": presets.tiny(vision=True).vision_config, "carried": {"image_token_id": IMAGE}}
ROWS = [[2, (6, 6), 1], [1], [(3, 3), (9, 6), 3]]  # the last has an image of 6 tokens, longer than the window of 5


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def small_prompts(device, rows=ROWS, seed=0):
    tokens, mask, images = prompts(rows, seed=seed)
    tokens = torch.where(tokens > 100, tokens % 50, tokens)  # text in a vocabulary of 60
    return tokens.to(device), mask.to(device), images


@torch.no_grad()
@pytest.mark.parametrize("most", [pytest.param(64, marks=pytest.mark.slow), 9], ids=["whole", "chunks"])
@pytest.mark.parametrize("weights", ["bf16", pytest.param("int4", marks=pytest.mark.slow)])
def test_a_prompt_with_images_equals_the_reference(device, monkeypatch, weights, most):
    """With `most` of 9 tokens, three rows of a forward have 4 each, fewer than an image."""
    model = make_model(device, vocab_size=60, moe_intermediate_size=64, hidden_size=64, **VISION)
    for layer, name in itertools.product(range(2 if weights == "int4" else 0), ("gate_up_proj", "down_proj")):
        full = f"layers.{layer}.experts.{name}"
        set_weight(model, full, quantize(model.state_dict()[full], "int4", group_size=64))
    plain = copy.deepcopy(model)
    fast = accelerate(model)
    monkeypatch.setattr(fast._arena, "most_read", most)
    tokens, mask, images = small_prompts(device)
    canvas = torch.arange(5, 9, device=device).expand(3, -1)
    more, _, more_images = small_prompts(device, [[1, (3, 6), 1]] * 3, seed=1)
    results = []
    for denoiser in (plain, fast):
        cache = denoiser.encode(tokens, None, mask, images=images)
        first = denoiser.denoise(canvas, cache).logits
        denoiser.encode(canvas, cache)
        denoiser.encode(more, cache, images=more_images)
        results.append(
            (first, denoiser.denoise(canvas, cache).logits, denoiser.causal_logits(more, cache, images=more_images))
        )
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **(CLOSE if weights == "bf16" else CODES))


@pytest.mark.slow
@torch.no_grad()
def test_generated_tokens_equal_the_reference_s(device):
    model = make_model(device, vocab_size=60, **VISION)
    plain = copy.deepcopy(model)
    tokens, mask, images = small_prompts(device)
    options = {"attention_mask": mask, "images": images, "max_new_tokens": 8, "steps": 3, "eos_token_ids": []}
    want, got = (dgemma.generate(denoiser, tokens, **options) for denoiser in (plain, accelerate(model)))
    assert torch.equal(got.new_tokens, want.new_tokens)


def test_without_images_it_is_the_causal_reference_and_slots_after_the_tokens_may_be_nan(device):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(device)  # noqa: E731
    queries, keys, values = draw(2, 4, 4, 16), draw(2, 2, 12, 16), draw(2, 2, 12, 16)
    length = torch.tensor([3, 0], device=device)
    text = torch.full((2, 4), -1, device=device)
    keys[0, :, 7:], values[1, :, 4:] = torch.nan, torch.nan
    for window in (None, 3):
        want = reference.attention(queries, keys, values, length, causal=True, window=window)
        torch.testing.assert_close(attention_with_images(queries, keys, values, length, text, window=window), want)


def test_images_are_refused_where_they_cannot_be_read(device):
    tokens, mask, images = small_prompts(device)
    with pytest.raises(ValueError, match="without a vision tower"):
        accelerate(make_model(device, vocab_size=60)).encode(tokens, None, mask, images=images)
    invariant = accelerate(make_model(device, vocab_size=60, **VISION), batch_invariant=True)
    with pytest.raises(ValueError, match="images must be None with batch_invariant"):
        invariant.encode(tokens, None, mask, images=images)
