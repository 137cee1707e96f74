"""Int4 experts in one launch with float8 tokens: when the kernel can run, and its results.

The kernel is compiled only on a Hopper GPU. On every machine its source runs in `gluon_interpreter`. Copies of the
source with one mistake each must be detected.
"""

import pytest
import torch
import triton
import triton.language as tl

from attention_cases import native
from dgemma.quantization.weights import IntWeight
from dgemma_kernels import accelerate
from dgemma_kernels.formats.fourbit import FourBit, OrderedRows, arrange, order_rows
from dgemma_kernels.ops.experts import reference
from dgemma_kernels.ops.experts.kernel import float8_obstacle, multiply_experts
from dgemma_kernels.ops.norms.kernel import _round_to_float8, attention_residual
from dgemma_kernels.ops.router import reference as router
from dgemma_kernels.ops.router.kernel import sort_by_expert
from gluon_interpreter import Hazard, load
from kernel_inputs import NUM_EXPERTS, draw_routing, error, make_model

# Hidden values, outputs and decoded weights are rounded to bfloat16, each by 2**-8 at most; 4.4e-3 was measured.
LIMIT = 6e-3


def draw(
    num_rows: int, width: int, *, gated: bool, experts: int = NUM_EXPERTS, group: int = 64, device: str = "cpu"
) -> FourBit:
    generator = torch.Generator(device).manual_seed(num_rows)
    codes = torch.randint(256, (experts, num_rows, width // 2), generator=generator, device=device).to(torch.uint8)
    scale = torch.rand(experts, num_rows, width // group, generator=generator, device=device) * 0.01 + 0.005
    return arrange(IntWeight(codes=codes, scale=scale.bfloat16()), dtype=torch.bfloat16, gated=gated)


def draw_rows(num_tokens: int, width: int, device: str = "cpu") -> OrderedRows:
    generator = torch.Generator(device).manual_seed(5)
    return order_rows(torch.randn(num_tokens, width, generator=generator, device=device).bfloat16())


def interpret(routing: str, width: int, hidden: int, edits: dict[str, str] | None = None) -> float:
    """Return the relative error of the interpreted kernel against float64."""
    if routing == "every-size-of-tile":
        index = torch.tensor([1] * 17 + [3] * 9 + [0] * 3, dtype=torch.int32)[:, None]
    else:
        index = draw_routing(routing)[:10, :1].contiguous()
    tiles = router.sort_by_expert(index, router.count_pairs(index, NUM_EXPERTS), 32)
    proj = draw(2 * hidden, width, gated=True), draw(width, hidden, gated=False)
    arguments = draw_rows(index.shape[0], width), *proj, torch.rand(index.shape), tiles
    got = load("dgemma_kernels.ops.experts.hopper", edits=edits).multiply_experts(*arguments)
    return error(got, reference.multiply_experts(*arguments))


@pytest.mark.parametrize(
    ("routing", "width", "hidden"),
    [
        ("one-token", 1408, 448),
        pytest.param("every-size-of-tile", 1408, 384, marks=pytest.mark.slow),
        pytest.param("two-experts-have-no-rows", 2048, 384, marks=pytest.mark.slow),
    ],
    ids=["one block at a time", "products of 32, 16 and 8 rows", "several tiles"],
)
def test_both_products_in_one_launch_match_float64(routing, width, hidden):
    assert interpret(routing, width, hidden) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "hazard"),
    [
        ("cp.async.wait_group 3;", "cp.async.wait_group 4;", "without having waited for the write"),
        (" fence.proxy.async.shared::cta;", "", "without fence_async_shared"),
        ("    thread_barrier()\n    MMA", "    MMA", "without having waited for the write"),
        ("warpgroup_mma_wait(1, deps=(low_run,))", "warpgroup_mma_wait(2, deps=(low_run,))", "not waited for"),
    ],
    ids=["one plane too early", "no fence", "no barrier", "sums of a running product"],
)
def test_mistakes_in_the_kernel_are_detected(old, new, hazard):
    with pytest.raises(Hazard, match=hazard):
        interpret("one-token", 1408, 384, {old: new})


def test_ordered_rows_decode_to_the_rounded_rows():
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = order_rows(x)
    unit = x.abs().amax(-1, keepdim=True).float() / 448
    want = (x / unit).to(torch.float8_e4m3fn)
    assert torch.equal(rows.decode(), want.double() * unit)
    sums = rows.sums.double().sum(1)[:, :2]
    assert torch.allclose(sums, want.double().view(3, 2, 64).sum(-1) * -(2.0**-46), rtol=2**-15, atol=0)


@triton.jit
def _round_kernel(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, _round_to_float8(tl.load(x + at)))


def test_every_boundary_between_float8_values_rounds_as_in_torch(device):
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[values.isfinite()].unique()
    middle = (values[1:] + values[:-1]) / 2
    x = torch.cat((values, middle, middle * (1 + 2.0**-20), middle * (1 - 2.0**-20)))
    x = torch.nn.functional.pad(x, (0, 1024 - len(x))).to(device)
    got = torch.empty_like(x)
    _round_kernel[(1,)](x, got, 1024)
    assert torch.equal(got, x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("width", [192, 2816])
def test_the_residual_kernel_writes_ordered_rows(width, device):
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(5, width, generator=generator).to(device) for _ in range(2)]
    vectors = [(1 + 0.2 * torch.randn(width, generator=generator)).to(device) for _ in range(4)]
    got = attention_residual(*rows, vectors, 1e-6, ordered=True)[2]
    want = order_rows(attention_residual(*rows, vectors, 1e-6)[2])
    assert error(got.decode(), want.decode()) < 5e-3  # sums in another order may round a value the other way
    sums = got.values.double().view(5, -1, 64).sum(-1) * -(2.0**-46)
    assert torch.allclose(got.sums.double().sum(1)[:, : width // 64], sums, rtol=2.0**-13, atol=0)


def test_weights_that_one_launch_cannot_multiply_are_named():
    up, down = draw(2 * 384, 1408, gated=True, experts=1), draw(1408, 384, gated=False, experts=1)
    assert float8_obstacle(up, torch.empty(1, 1408, 384)) == "experts in int4"
    narrow = draw(1408, 384, gated=False, experts=1, group=32)
    assert float8_obstacle(up, narrow) == "symmetric int4 in groups of 64 columns or more"
    for width in (1024, 1152, 1472, 4224):
        assert "a multiple of 128" in (float8_obstacle(up, draw(width, 384, gated=False, experts=1)) or "")
    assert "at least 384" in (float8_obstacle(up, draw(1408, 320, gated=False, experts=1)) or "")
    with pytest.raises(AssertionError, match=r"a Hopper GPU .* got weights on cpu"):
        multiply_experts(draw_rows(1, 1408), up, down, torch.ones(1, 1), None)


def test_models_whose_experts_cannot_have_float8_inputs_are_refused(device):
    with pytest.raises(ValueError, match=r'"experts" needs experts in int4\. Use "exact"'):
        accelerate(make_model(device), "fp8", precision=["experts"])
    with pytest.raises(ValueError, match='"experts" needs batch_invariant=False'):
        accelerate(make_model(device), "int4", precision=["experts"], batch_invariant=True)


@native
@pytest.mark.parametrize("num_tokens", [65, 256, 1152])
def test_the_published_sizes_match_float64_on_a_gpu(num_tokens):
    width, hidden, experts = 2816, 704, 16  # few experts, with several tiles each
    scores = torch.rand(num_tokens, experts, generator=torch.Generator("cuda").manual_seed(2), device="cuda")
    index = (scores + torch.linspace(0, 0.2, experts, device="cuda")).topk(8).indices.int().contiguous()
    up = draw(2 * hidden, width, gated=True, experts=experts, device="cuda")
    down = draw(width, hidden, gated=False, experts=experts, device="cuda")
    rows, weights = draw_rows(num_tokens, width, "cuda"), torch.rand(index.shape, device="cuda")
    results = []
    for _ in range(2):
        tiles = sort_by_expert(index, router.count_pairs(index, experts), 32)
        results.append(multiply_experts(rows, up, down, weights, tiles))
    assert error(results[0], reference.multiply_experts(rows, up, down, weights, tiles)) < LIMIT
    assert torch.equal(*results)
