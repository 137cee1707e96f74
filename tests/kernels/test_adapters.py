"""Products with B of the adapters of linear layers, against float64."""

import pytest
import torch

from dgemma_kernels.ops.adapters import reference
from dgemma_kernels.ops.adapters.kernel import expand
from kernel_inputs import error

ROWS = 150  # more than one tile of rows, the last one partly filled
WIDTHS = pytest.mark.parametrize(
    "widths",
    [[24], [128, 64], [2100, 40, 1024]],  # less than a tile; a tile and a half one; several splits of the gradient
)


def draw_inputs(device, widths, rank):
    generator = torch.Generator().manual_seed(rank)
    shapes = (ROWS, sum(widths)), (ROWS, len(widths) * rank), (sum(widths), rank)
    return [torch.randn(*shape, generator=generator).to(device, torch.float16) for shape in shapes]


@WIDTHS
@pytest.mark.parametrize("rank", [8, 3])
def test_products_with_the_b_of_each_layer_match_float64(device, widths, rank):
    _, narrow, b = draw_inputs(device, widths, rank)
    assert error(expand(narrow, b, widths), reference.expand(narrow.double(), b.double(), widths)) < 1e-3
