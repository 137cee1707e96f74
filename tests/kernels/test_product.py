"""The product of one row against float64."""

import pytest
import torch

from dgemma_kernels.ops.product import kernel, reference


@pytest.mark.parametrize(("cols", "width"), [(48, 300), (33, 1100), (9, 5000)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float16, 2e-3)])
def test_a_product_of_one_row_matches_float64(device, cols, width, dtype, limit):
    generator = torch.Generator().manual_seed(cols)
    x, weight = (torch.randn(n, width, generator=generator).to(device, dtype) for n in (1, cols))
    got, want = kernel.multiply_row(x, weight), reference.multiply_row(x.double(), weight.double())
    assert ((got.double() - want).norm() / want.norm()).item() < limit


def test_several_rows_and_other_dtypes_are_refused(device):
    weight = torch.zeros(8, 16, device=device)
    with pytest.raises(ValueError, match=r"must get a row \(1, K\)"):
        kernel.multiply_row(torch.zeros(2, 16, device=device), weight)
    with pytest.raises(ValueError, match="contiguous tensors of one dtype"):
        kernel.multiply_row(torch.zeros(1, 16, dtype=torch.float16, device=device), weight)
