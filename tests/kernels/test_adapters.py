"""Products with B of the adapters of linear layers, and their gradients, against float64."""

import pytest
import torch

from dgemma_kernels.ops.adapters import expand, expand_gradient, reference

ROWS = 150  # more than one tile of rows, the last one partly filled
WIDTHS = pytest.mark.parametrize(
    "widths",
    [[24], [128, 64], [2100, 40, 1024]],  # less than a tile; a tile and a half one; several splits of the gradient
)


def draw_inputs(device, widths, rank):
    generator = torch.Generator().manual_seed(rank)
    shapes = (ROWS, sum(widths)), (ROWS, len(widths) * rank), (sum(widths), rank)
    return [torch.randn(*shape, generator=generator).to(device, torch.float16) for shape in shapes]


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@WIDTHS
@pytest.mark.parametrize("rank", [8, 3])
def test_products_with_the_b_of_each_layer_match_float64(device, widths, rank):
    _, narrow, b = draw_inputs(device, widths, rank)
    assert error(expand(narrow, b, widths), reference.expand(narrow.double(), b.double(), widths)) < 1e-3


@WIDTHS
@pytest.mark.parametrize("rank", [8, 3])
def test_the_gradients_of_these_products_match_float64(device, widths, rank):
    inputs = draw_inputs(device, widths, rank)
    got = expand_gradient(*inputs, widths, scale=0.5)
    want = reference.expand_gradient(*(x.double() for x in inputs), widths, scale=0.5)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape
        assert error(ours, theirs) < 1e-3


def test_a_gradient_may_have_gaps_between_its_rows(device):
    grad, narrow, b = draw_inputs(device, [128, 64], 8)
    wider = torch.full((ROWS, 200), float("nan"), dtype=grad.dtype, device=grad.device)
    wider[:, :192] = grad
    got = expand_gradient(wider[:, :192], narrow, b, [128, 64], scale=1.0)
    for ours, theirs in zip(got, expand_gradient(grad, narrow, b, [128, 64], scale=1.0), strict=True):
        assert torch.equal(ours, theirs)
