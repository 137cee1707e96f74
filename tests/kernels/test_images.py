"""The fused engine reads images as the reference does."""

import copy
import itertools
from functools import partial

import pytest
import torch

from attention_cases import LIMITS, draw, exact, is_hopper, pretend_hopper
from dgemma import presets
from dgemma.quantization.rounding import quantize
from dgemma.quantization.weights import set_weight
from dgemma_kernels import accelerate
from dgemma_kernels.engine import reading, vision
from dgemma_kernels.ops.attention import kernel as module
from dgemma_kernels.ops.attention.images import image_spans
from dgemma_kernels.ops.attention.kernel import attention
from gluon_interpreter import load
from image_prompts import IMAGE, prompts
from kernel_inputs import error, make_model

CLOSE = {"rtol": 2e-4, "atol": 2e-4}  # as in test_engine
VISION = {"vision_config": presets.tiny(vision=True).vision_config, "carried": {"image_token_id": IMAGE}}
ROWS = [[2, (3, 3), 1], [(3, 3), (9, 6), 3]]  # the last has an image of 6 tokens, longer than the window of 5


def small_prompts(device, rows=ROWS, seed=0):
    tokens, mask, images = prompts(rows, seed=seed)
    tokens = torch.where(tokens > 100, tokens % 50, tokens)  # text in a vocabulary of 60
    return tokens.to(device), mask.to(device), images


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(("weights", "most"), [("bf16", 9), ("int4", 64)], ids=["chunks", "whole"])
def test_a_prompt_with_images_equals_the_reference(device, monkeypatch, weights, most):
    """With `most` of 9 tokens, two rows of a forward have 4 each, fewer than an image."""
    model = make_model(device, vocab_size=60, moe_intermediate_size=64, hidden_size=64, **VISION)
    plain = copy.deepcopy(model)
    for layer, name in itertools.product(range(2 if weights == "int4" else 0), ("gate_up_proj", "down_proj")):
        full = f"layers.{layer}.experts.{name}"
        codes = quantize(model.state_dict()[full], "int4", group_size=64)
        set_weight(model, full, codes)
        plain.state_dict()[full].copy_(codes.decode(torch.float64).bfloat16())  # kernels round decoded weights
    fast = accelerate(model)
    monkeypatch.setattr(fast._arena, "most_read", most)
    tokens, mask, images = small_prompts(device)
    canvas = torch.arange(5, 9, device=device).expand(2, -1)
    more, _, more_images = small_prompts(device, [[1, (3, 6), 1]] * 2, seed=1)
    results = []
    for denoiser in (plain, fast):
        cache = denoiser.encode(tokens, None, mask, images=images)
        first = denoiser.denoise(canvas, cache).logits
        denoiser.encode(canvas, cache)
        results.append((first, denoiser.causal_logits(more, cache, images=more_images)))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.slow
@torch.no_grad()
def test_after_warm_up_a_prompt_with_images_captures_no_forward(device, monkeypatch):
    monkeypatch.setattr(reading, "_SIZES", (4, 32))  # fewer, for the interpreter
    monkeypatch.setattr(vision, "_SIZES", (9, 90))
    model = make_model(device, vocab_size=60, **VISION)
    plain, fast = copy.deepcopy(model), accelerate(model)
    reading.plan_chunks.cache_clear()
    fast.warm_up(1, 30, progress=False)
    tower = fast._workspace.vision
    captured = [set(graphs) for graphs in (fast._workspace.graphs, tower._graphs)]
    tokens, mask, images = small_prompts(device, [[(3, 3), (9, 6), 3]])
    canvas = torch.arange(5, 9, device=device)[None]
    want, got = (d.denoise(canvas, d.encode(tokens, None, mask, images=images)).logits for d in (plain, fast))
    torch.testing.assert_close(got, want, **CLOSE)
    assert [set(graphs) for graphs in (fast._workspace.graphs, tower._graphs)] == captured
    reading.plan_chunks.cache_clear()


NUMBERS = torch.tensor([[0] * 5 + [1] * 30 + [2] * 9 + [0], [3] * 3 + [0] * 40 + [4] * 2])  # images of 30, 9, 3, 2


def test_spans_are_the_bounds_of_images_and_of_single_tokens():
    spans = image_spans(NUMBERS)
    assert spans[0, [0, 4, 5, 20, 34, 35, 43, 44]].tolist() == [
        [0, 0], [4, 4], [5, 34], [5, 34], [5, 34], [35, 43], [35, 43], [44, 44],
    ]  # fmt: skip
    assert spans[1, [0, 2, 3, 42, 44]].tolist() == [[0, 2], [0, 2], [3, 3], [42, 42], [43, 44]]


@pytest.mark.parametrize("num_splits", [pytest.param(1, marks=pytest.mark.slow), 2], ids=["whole", "two-parts"])
@pytest.mark.parametrize(
    ("kernel", "layer", "options"),
    [
        ("triton", (1, 256), {"window": 12}),  # shorter than an image
        ("hopper", (1, 256), {"window": 12}),
        ("hopper", (1, 512), {}),
        ("hopper_shared", (1, 512), {"rotary_pairs": 64}),
    ],
)
def test_attention_sees_whole_images(device, monkeypatch, kernel, layer, options, num_splits):
    """On a Hopper GPU compiled, elsewhere interpreted. Keys equal values, as `rotary_pairs` allows."""
    queries, keys, _, length = draw([70, 3], 45, layer, heads=4, dtype=torch.float16, device=device)
    case, spans = (queries, keys, keys, length), image_spans(NUMBERS.to(device))
    want = exact(*case, causal=True, spans=spans, window=options.get("window"))
    if not is_hopper and kernel != "triton":
        pretend_hopper(monkeypatch)
        for name in ("hopper", "hopper_shared"):
            monkeypatch.setattr(module, f"_{name}", partial(load, f"dgemma_kernels.ops.attention.{name}"))
    name = "hopper" if kernel == "hopper_shared" else kernel
    got = attention(*case, causal=True, spans=spans, kernel=name, num_splits=num_splits, **options)
    assert error(got, want) < LIMITS[torch.float16]


def test_images_are_refused_where_they_cannot_be_read(device):
    tokens, mask, images = small_prompts(device)
    with pytest.raises(ValueError, match="without a vision tower"):
        accelerate(make_model(device, vocab_size=60)).encode(tokens, None, mask, images=images)
    invariant = accelerate(make_model(device, vocab_size=60, **VISION), batch_invariant=True)
    with pytest.raises(ValueError, match="images must be None with batch_invariant"):
        invariant.encode(tokens, None, mask, images=images)
