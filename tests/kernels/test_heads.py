"""Norms and rotations of heads in training, and their gradient, against float64."""

import pytest
import torch

from dgemma_kernels.ops.heads import reference
from dgemma_kernels.ops.heads.kernel import HeadInputs, norm_heads, norm_heads_gradient
from kernel_inputs import error

ROWS, LENGTH, HEADS, KV_HEADS, DIM = 2, 11, 4, 2, 64
FIRST, SEEN = 3, 5  # tokens of the first part; tokens of the second part that the first part sees


def draw_inputs(device, dtype, has_value):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    num_tokens, num_heads = ROWS * LENGTH, HEADS + KV_HEADS * (2 if has_value else 1)
    angles = torch.rand(num_tokens, DIM // 2, generator=generator).repeat(1, 2) * 6
    tables = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    return draw, HeadInputs(draw(num_tokens, num_heads * DIM), draw(DIM), draw(DIM), *tables)


@pytest.mark.parametrize("has_value", [True, False])
def test_heads_match_float64(device, has_value):
    _, inputs = draw_inputs(device, torch.float16, has_value)
    sizes = {"num_heads": HEADS, "kv_heads": KV_HEADS, "eps": 1e-6}
    got = norm_heads(inputs, **sizes)
    want = reference.norm_heads(HeadInputs(*(x.double() for x in inputs)), **sizes)
    for ours, theirs in zip(got, want, strict=True):
        assert error(ours, theirs) < 1e-3  # a few roundings to float16


@pytest.mark.parametrize("has_value", [True, False])
@pytest.mark.parametrize("by_head", [False, True])  # the order of tokens and heads in memory
def test_the_gradient_of_heads_matches_float64(device, has_value, by_head):
    draw, inputs = draw_inputs(device, torch.float16, has_value)

    def grads(*lengths):
        shapes = ((ROWS, size, heads, DIM) for size, heads in zip(lengths, (HEADS, KV_HEADS, KV_HEADS), strict=True))
        drawn = [draw(*shape) for shape in shapes]
        return [x.transpose(1, 2).contiguous().transpose(1, 2) if by_head else x for x in drawn]

    firsts, seconds = grads(FIRST, FIRST + SEEN, FIRST + SEEN), grads(*[LENGTH - FIRST] * 3)
    got = norm_heads_gradient(inputs, firsts, seconds, eps=1e-6)
    exact = [[x.double() for x in part] for part in (firsts, seconds)]
    want = reference.norm_heads_gradient(HeadInputs(*(x.double() for x in inputs)), *exact, eps=1e-6)
    assert error(got, want) < 1e-3
