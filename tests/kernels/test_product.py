"""Products against float64."""

import pytest
import torch

from dgemma_kernels.formats import quantize
from dgemma_kernels.ops.product import kernel, reference


@pytest.mark.parametrize(("cols", "width"), [(48, 300), (33, 1100), (9, 5000)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float16, 2e-3)])
def test_a_product_of_one_row_matches_float64(device, cols, width, dtype, limit):
    generator = torch.Generator().manual_seed(cols)
    x, weight = (torch.randn(n, width, generator=generator).to(device, dtype) for n in (1, cols))
    got, want = kernel.multiply_row(x, weight), reference.multiply_row(x.double(), weight.double())
    assert ((got.double() - want).norm() / want.norm()).item() < limit


@pytest.mark.parametrize("rounded", [False, True])
def test_a_product_with_a_float8_weight_matches_float64(device, rounded):
    generator = torch.Generator().manual_seed(3)
    plain, wide = (torch.randn(n, 1100, generator=generator).to(device) for n in (1, 33))
    x, weight = quantize(plain) if rounded else plain, quantize(wide)
    got = kernel.multiply_row(x, weight)
    want = reference.multiply_row(x.decode() if rounded else plain.double(), weight.decode())
    assert ((got.double() - want).norm() / want.norm()).item() < 1e-6


@pytest.mark.parametrize(("rows", "cols", "depth"), [(128, 128, 384), (100, 272, 400)], ids=["exact", "ragged"])
def test_a_product_next_to_other_kernels_matches_float64_without_scales(device, rows, cols, depth):
    generator = torch.Generator().manual_seed(rows)
    x, weight = (quantize(torch.randn(n, depth, generator=generator).to(device)) for n in (rows, cols))
    got, want = kernel.multiply_beside(x, weight), reference.multiply_beside(x, weight)
    # Hopper adds in 14 bits, the interpreter in float32.
    assert ((got - want).norm() / want.norm()).item() < (4e-3 if device.type == "cuda" else 1e-5)
