"""Grouped products on Hopper: when they run, and their results.

The kernels are compiled only on a Hopper GPU. On every machine their source runs in `gluon_interpreter`.
`test_experts_many` edits mistakes into the queue and the ring, which both share.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attention_cases import native
from dgemma_kernels.ops import configs
from dgemma_kernels.ops.grouped import kernel, multiply, reference
from gluon_interpreter import Hazard, load

LIMIT = 5e-3  # GeGLU rounds three times, each by 2**-9 at most; 3.6e-3 was measured
CHOICES = 2


class Kind(NamedTuple):
    gated: bool
    transposed: bool
    gathered: bool


KINDS = {
    "gate_up": Kind(gated=True, transposed=False, gathered=True),
    "gate_up without GeGLU": Kind(gated=False, transposed=False, gathered=True),
    "gradient of hidden values": Kind(gated=False, transposed=True, gathered=True),
    "down": Kind(gated=False, transposed=False, gathered=False),
    "gradient of tokens": Kind(gated=False, transposed=True, gathered=False),
}


class Inputs(NamedTuple):
    x: Tensor
    weights: Tensor
    narrow: Tensor
    b: Tensor
    tiles: Tensor
    order: Tensor | None


def draw(kind: Kind, sizes: tuple[int, ...], width: int, num_out: int, rank: int, device: str = "cpu") -> Inputs:
    """Draw inputs of experts with these numbers of rows."""
    generator, num_rows, experts = torch.Generator().manual_seed(num_out), sum(sizes), len(sizes)

    def values(*shape: int, depth: int = 1) -> Tensor:
        return (torch.randn(shape, generator=generator) * depth**-0.5).to(device, torch.bfloat16)

    # Both products have values of the same size, so that an error of either is seen.
    if kind.transposed:
        weights, b = values(experts, width, num_out, depth=width).mT, values(experts, rank, num_out, depth=rank).mT
    else:
        weights, b = values(experts, num_out, width, depth=width), values(experts, num_out, rank, depth=rank)
    order = torch.randperm(num_rows, generator=generator).to(device) if kind.gathered else None
    x = values(num_rows // CHOICES if kind.gathered else num_rows, width)
    experts_of_rows = torch.arange(experts).repeat_interleave(torch.tensor(sizes))[:, None]
    tiles = reference.group_choices(experts_of_rows.to(device), experts)[3]
    return Inputs(x, weights, values(num_rows, rank), b, tiles, order)


def error(got: Tensor, inputs: Inputs, kind: Kind) -> float:
    """Return the relative error against float64."""
    exact = (each.double() for each in inputs[:4])
    want = reference.multiply(*exact, inputs.tiles, inputs.order, gated=kind.gated)
    return ((got.double() - want).norm() / want.norm()).item()


def interpreted(inputs: Inputs, kind: Kind, **options: Any) -> Tensor:
    module = load("dgemma_kernels.ops.grouped.hopper", **options)
    out = module.multiply(*inputs, gated=kind.gated)
    assert inputs.tiles[0, 1] == 0  # so that the next product over these tiles starts with the first item
    return out


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("sizes", "width", "num_out", "rank"),
    # Tall items, for at most 144 rows per expert: a block of weights that is not full; a rank of more than 16; both
    # sizes, with several items per program. Wide items of all sizes.
    [
        ((7, 3), 128, 64, 8),
        ((5, 1), 64, 384, 24),
        pytest.param((150, 128), 192, 320, 16, marks=pytest.mark.slow),
        pytest.param((561, 161, 150, 128), 192, 320, 8, marks=pytest.mark.slow),
    ],
    ids=["tall", "rank 24", "several tall items", "wide"],
)
def test_interpreted_products_match_float64(name, sizes, width, num_out, rank):
    kind = KINDS[name]
    inputs = draw(kind, sizes, width, num_out, rank)
    assert error(interpreted(inputs, kind, seed=sum(sizes)), inputs, kind) < LIMIT


def test_a_missing_fence_before_the_adapter_is_detected():
    kind = KINDS["gate_up"]
    edits = {"            fence_async_shared()  # threads": "            pass  # threads"}
    with pytest.raises(Hazard, match="without fence_async_shared"):
        interpreted(draw(kind, (70, 8), 512, 128, 8), kind, edits=edits)


def test_sizes_dtypes_and_versions_that_do_not_fit_are_known(monkeypatch):
    monkeypatch.setattr(kernel, "is_hopper", lambda device: True)
    monkeypatch.setattr(configs, "GLUON_RAN_WITH", (configs.triton.__version__,))

    def fits(width: int, num_out: int, rank: int, dtype: torch.dtype) -> bool:
        weights, b = torch.empty(2, num_out, width, dtype=dtype), torch.empty(2, num_out, rank, dtype=dtype)
        narrow, x = torch.empty(6, rank, dtype=dtype), torch.empty(6, width, dtype=dtype)
        return kernel.fits_product(x, weights, narrow, b)

    assert fits(128, 144, 8, torch.bfloat16)
    assert fits(128, 144, 64, torch.float16)
    assert not fits(128, 144, 8, torch.float32)
    assert not fits(128, 136, 8, torch.bfloat16)
    assert not fits(128, 144, 4, torch.bfloat16)
    assert not fits(128, 144, 72, torch.bfloat16)
    assert not fits(128, 16, 8, torch.bfloat16)
    monkeypatch.setattr(configs, "GLUON_RAN_WITH", ("0.",))
    assert not fits(128, 144, 8, torch.bfloat16)


@native
@pytest.mark.parametrize("sizes", [(1, 128, 160, 161, 0, 320, 257, 21), (20, 0, 600, 700)], ids=["tall", "wide"])
@pytest.mark.parametrize("name", KINDS)
def test_published_sizes_match_float64_on_a_gpu(name, sizes):
    kind = KINDS[name]
    width, num_out = {"down": (704, 2816), "gradient of hidden values": (2816, 704)}.get(name, (2816, 1408))
    inputs = draw(kind, sizes, width, num_out, 8, "cuda")
    got = multiply(*inputs, gated=kind.gated)
    assert error(got, inputs, kind) < LIMIT
    assert torch.equal(got, multiply(*inputs, gated=kind.gated))
