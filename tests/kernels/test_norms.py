"""The kernels of the residual stream, and GeGLU, against their references in float64."""

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dgemma_kernels import blocks
from dgemma_kernels.formats import Quantized
from dgemma_kernels.ops.mlp import kernel as mlp
from dgemma_kernels.ops.mlp import reference as mlp_reference
from dgemma_kernels.ops.norms import kernel as norms
from dgemma_kernels.ops.norms import reference as norms_reference
from kernel_inputs import error

EPS = 1e-6
# In float32, the error of a sum of a few hundred terms. In float16, one rounding is at most 2**-11, and `layer_tail`
# rounds about eight times, one after the other.
LIMITS = {torch.float32: 1e-6, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
# One row and one column; a row of exactly one block; a ragged row, as the published 2816 is; many short rows.
SHAPES = pytest.mark.parametrize("shape", [(1, 1), (3, 256), (2, 2816), (37, 88)], ids=str)


def draw(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) + 0.1).to(dtype).to(device)


@DTYPES
@SHAPES
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "scaleless"])
def test_rms_norm_matches_float64(shape, dtype, weighted, device):
    x = draw(*shape, dtype=dtype, device=device, seed=1)
    weight = draw(shape[1], dtype=dtype, device=device, seed=2) if weighted else None
    want = norms_reference.rms_norm(x.double(), weight.double() if weighted else None, EPS)
    assert error(norms.rms_norm(x, weight, EPS), want) < LIMITS[dtype]


def test_rms_norm_of_an_all_zero_row_is_zero(device):
    x = torch.zeros(2, 48, device=device)
    assert torch.equal(norms.rms_norm(x, None, EPS), x)


@DTYPES
@SHAPES
def test_attention_residual_matches_float64(shape, dtype, device):
    rows = [draw(*shape, dtype=dtype, device=device, seed=seed) for seed in (1, 2)]
    vectors = [draw(shape[1], dtype=dtype, device=device, seed=seed) for seed in (3, 4, 5, 6)]
    got = norms.attention_residual(*rows, vectors, EPS)
    want = norms_reference.attention_residual(*(t.double() for t in rows), [t.double() for t in vectors], EPS)
    assert all(error(g, w) < LIMITS[dtype] for g, w in zip(got, want, strict=True))


def test_attention_residual_rounds_where_separate_float16_layers_round(device):
    # Where the kernel rounds at other places than the reference, about a third of the float16 values differ.
    rows = [draw(64, 88, dtype=torch.float16, device=device, seed=seed) for seed in (1, 2)]
    vectors = [draw(88, dtype=torch.float16, device=device, seed=seed) for seed in (3, 4, 5, 6)]
    got = norms.attention_residual(*rows, vectors, EPS)
    want = norms_reference.attention_residual(*rows, vectors, EPS)
    assert all((g != w).float().mean() < 0.01 for g, w in zip(got, want, strict=True))


@DTYPES
@SHAPES
@pytest.mark.parametrize(("num_active", "scalars"), [(1, "one"), (8, "one-a-row")])
def test_layer_tail_matches_float64(shape, dtype, num_active, scalars, device):
    rows = [draw(*shape, dtype=dtype, device=device, seed=seed) for seed in (1, 2)]
    expert_rows = draw(shape[0], num_active, shape[1], dtype=dtype, device=device, seed=3)
    vectors = [draw(shape[1], dtype=dtype, device=device, seed=seed) for seed in (4, 5, 6)]
    scalar = torch.linspace(0.37, 0.9, 1 if scalars == "one" else shape[0]).to(device, dtype)
    following = draw(shape[1], dtype=dtype, device=device, seed=7)
    arguments = [*rows, expert_rows, vectors, scalar, following]
    want = norms_reference.layer_tail(*tree_map(lambda t: t.double(), arguments), EPS)
    for alone in (False, True):
        got = norms.layer_tail(*arguments, EPS, alone=alone)
        assert all(error(g, w) < LIMITS[dtype] for g, w in zip(got, want, strict=True))


@DTYPES
@SHAPES
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "rows-and-columns"])
def test_scale_rows_matches_float64(shape, dtype, columns, device):
    x = draw(*shape, dtype=dtype, device=device, seed=1)
    scales = [draw(size, dtype=torch.float32, device=device, seed=size) for size in shape[: 2 if columns else 1]]
    got = norms.scale_rows(x, *scales, factor=3.0, dtype=torch.float32)
    assert got.dtype == torch.float32
    want = norms_reference.scale_rows(x.double(), *(scale.double() for scale in scales), factor=3.0)
    assert error(got, want) < LIMITS[torch.float32]
    assert error(norms.scale_rows(x, *scales, factor=3.0), want) < LIMITS[dtype]


def assert_rounded(got: Quantized, want: Tensor) -> None:
    """The largest value of a row becomes 448, and the others are off by at most half a step of float8."""
    torch.testing.assert_close(got.scale.double(), want.abs().amax(-1) / 448, rtol=1e-6, atol=0)
    exact = want / got.scale.double()[:, None]
    # Half a step: 1/16 of the value, and at least 2**-10, half of the smallest float8 value.
    half = torch.maximum(exact.abs() / 16, torch.full_like(exact, 2.0**-10))
    assert ((got.values.double() - exact).abs() <= half * 1.001).all()


@SHAPES
def test_round_rows_rounds_to_the_nearest_float8(shape, device):
    x = draw(*shape, dtype=torch.float16, device=device, seed=1)
    assert_rounded(norms.round_rows(x), x.double())


@pytest.mark.parametrize("shape", [(1, 2), (3, 2 * 256), (5, 2 * 600)], ids=["one", "one-block", "ragged"])
def test_geglu_float8_scales_its_inputs_and_rounds_its_outputs(shape, device):
    gate_up = draw(*shape, dtype=torch.float32, device=device, seed=1)
    scales = (torch.linspace(0.5, 2, shape[0], device=device), torch.linspace(2, 0.5, shape[1], device=device))
    want = mlp_reference.geglu(gate_up.double() * scales[0][:, None] * scales[1])
    assert_rounded(mlp.geglu_float8(gate_up, *scales), want)


def test_many_rows_have_the_bits_of_few(device, monkeypatch):
    rows = [draw(9, 88, dtype=torch.float16, device=device, seed=seed) for seed in (1, 2)]
    vectors = [draw(88, dtype=torch.float16, device=device, seed=seed) for seed in (3, 4, 5, 6)]
    gate_up = draw(9, 2 * 600, dtype=torch.float16, device=device, seed=7)
    scales = (torch.linspace(0.5, 2, 9, device=device), torch.linspace(0.5, 2, 2 * 600, device=device))

    def results() -> list[Tensor]:
        tensors = list(norms.attention_residual(*rows, vectors, EPS))
        for rounded in (norms.round_rows(rows[0]), mlp.geglu_float8(gate_up, *scales)):
            tensors += [rounded.values.float(), rounded.scale]
        return tensors

    few = results()
    for module in (norms, blocks):
        monkeypatch.setattr(module, "MANY_ROWS", 8)
    assert all(torch.equal(a, b) for a, b in zip(few, results(), strict=True))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 2), (3, 2 * 1024), (5, 2 * 1030)], ids=["one", "one-block", "ragged"])
def test_geglu_matches_float64(shape, dtype, device):
    gate_up = 3 * draw(*shape, dtype=dtype, device=device, seed=1)
    assert error(mlp.geglu(gate_up), mlp_reference.geglu(gate_up.double())) < LIMITS[dtype]


def test_geglu_saturates_where_tanh_does(device):
    gate = torch.tensor([[-1e4, -20.0, 0.0, 20.0, 1e4]], device=device)
    got = mlp.geglu(torch.cat((gate, torch.full_like(gate, 2.0)), dim=1))
    assert torch.equal(got, torch.tensor([[0.0, 0.0, 0.0, 40.0, 2e4]], device=device))
