"""Launches of a single token against float64."""

import pytest
import torch
from torch.utils._pytree import tree_map

from dgemma_kernels.formats.float8 import Quantized
from dgemma_kernels.ops.experts.kernel import expert_down, expert_gate_up
from dgemma_kernels.ops.token import kernel, reference
from kernel_inputs import error

DTYPES = [(torch.float32, 1e-5), (torch.float16, 4e-3)]  # float16 has 11 bits, and a norm follows a norm


def draw_inputs(device, dtype, width, num_experts):
    """Return attention, residual, four norms, the router's weight, and the experts' scales."""
    generator = torch.Generator().manual_seed(width)
    rows = [torch.randn(1, width, generator=generator) for _ in range(2)]
    norms = [1 + 0.1 * torch.randn(width, generator=generator) for _ in range(4)]
    router = torch.randn(num_experts, width, generator=generator)
    scales = 1 + 0.1 * torch.randn(num_experts, generator=generator)
    return tree_map(lambda tensor: tensor.to(device, dtype), [*rows, norms, router, scales])


@pytest.mark.parametrize(("width", "num_experts"), [(300, 16), (1100, 10), (64, 128)])
@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
def test_inputs_and_scores_of_a_token_match_float64(device, width, num_experts, dtype, limit):
    *inputs, _ = draw_inputs(device, dtype, width, num_experts)
    got = kernel.score_token(*inputs, 1e-6)
    want = reference.score_token(*tree_map(lambda tensor: tensor.double(), inputs), 1e-6)
    for result, expected in zip(got, want, strict=True):
        assert error(result, expected) < limit


def test_the_experts_input_of_a_token_may_be_float8(device):
    *inputs, _ = draw_inputs(device, torch.float32, 300, 16)
    rounded, plain = (kernel.score_token(*inputs, 1e-6, float8=float8)[2] for float8 in (True, False))
    assert isinstance(rounded, Quantized)
    assert error(rounded.decode(), plain.double()) < 0.04  # three bits after the leading one


@pytest.mark.parametrize(("num_experts", "num_active"), [(16, 4), (10, 3), (128, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_experts_of_a_token_match_float64(device, num_experts, num_active, dtype):
    generator = torch.Generator().manual_seed(num_experts)
    scores, scales = (torch.randn(num_experts, generator=generator).to(device, dtype) for _ in range(2))
    weights, tiles = kernel.choose_token(scores, scales, num_active, 16)
    wanted, order = reference.choose_token(scores.double(), scales.double(), num_active, 16)
    assert error(weights, wanted) < 1e-6
    for got, want in zip(tiles, order, strict=True):
        assert got.tolist() == want.tolist() if isinstance(want, torch.Tensor) else got == want


def test_the_experts_multiply_the_tiles_of_a_token(device):
    """The tiles of a single token are in the order of the choice, not of the experts."""
    generator = torch.Generator().manual_seed(5)
    scores, x = torch.randn(10, generator=generator).to(device), torch.randn(1, 96, generator=generator).to(device)
    gate_up, down = (torch.randn(10, *shape, generator=generator).to(device) / 8 for shape in ((96, 96), (96, 48)))
    weights, tiles = kernel.choose_token(scores, torch.ones_like(scores), 3, 16)
    out = expert_down(expert_gate_up(x, gate_up, tiles), down, weights, tiles, overlap=True)
    top = scores.double().softmax(0).topk(3)
    for at, expert in enumerate(top.indices.tolist()):
        gate, up = (x.double() @ gate_up[expert].double().T).chunk(2, -1)
        row = torch.nn.functional.gelu(gate, approximate="tanh") * up @ down[expert].double().T
        assert error(out[:, at], row * top.values[at] / top.values.sum()) < 1e-5
