"""The experts' products for many tokens on Hopper: when they run, and their results.

The kernels are compiled only on a Hopper GPU. On every machine their source runs in `gluon_interpreter`. Copies of the
source with one mistake each must be detected.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import native
from dgemma_kernels.formats import Quantized, decode
from dgemma_kernels.formats.float8 import quantize
from dgemma_kernels.ops import configs
from dgemma_kernels.ops.experts import kernel, reference
from dgemma_kernels.ops.router import reference as router
from dgemma_kernels.ops.router.kernel import sort_by_expert
from gluon_interpreter import Hazard, load
from kernel_inputs import error

# Hidden values round three times and outputs twice, each by 2**-9 at most; 3.5e-3 was measured.
LIMIT = 5e-3
ROWS = {"tall": 160, "wide": 288}  # per tile


def draw(width: int, hidden: int, index: Tensor, experts: int, float8: bool) -> list[Any]:
    """Return tokens, both weights and routing weights."""
    generator = torch.Generator(index.device).manual_seed(index.shape[0])
    shapes = (index.shape[0], width), (experts, 2 * hidden, width), (experts, width, hidden)
    values = [torch.randn(shape, generator=generator, device=index.device) * shape[-1] ** -0.5 for shape in shapes]
    rows = [2 * value.bfloat16() for value in values]
    weights = torch.rand(index.shape, generator=generator, device=index.device)
    return [*(map(quantize, rows) if float8 else rows), weights]


def check(
    module: Any, index: Tensor, width: int, hidden: int, experts: int, rows_per_tile: int, float8: bool
) -> tuple[Tensor, Tensor]:
    """Compare both products with float64 and return them."""
    tiles = router.sort_by_expert(index, router.count_pairs(index, experts), rows_per_tile)
    x, gate_up, down, weights = draw(width, hidden, index, experts, float8)
    got = module.expert_gate_up(x, gate_up, tiles)
    want = reference.expert_gate_up(decode(x).double(), decode(gate_up).double(), tiles)
    assert error(got, want) < LIMIT
    rows: Tensor | Quantized = quantize(got) if float8 else got
    out = module.expert_down(rows, down, weights, tiles)
    wanted = reference.expert_down(decode(rows).double(), decode(down).double(), weights.double(), tiles)
    assert error(out, wanted) < LIMIT
    assert tiles.queue[0] == 0  # so that the next product over these tiles starts with the first item
    if not float8:
        tiles = router.sort_by_expert(index, router.count_pairs(index, experts), rows_per_tile)
        assert torch.equal(module.multiply_experts(x, gate_up, down, weights, tiles), out)
        assert tiles.queue[0] == 0
    return got, out


def routing(*rows_of_experts: int) -> Tensor:
    return torch.arange(len(rows_of_experts)).repeat_interleave(torch.tensor(rows_of_experts))[:, None].int()


# Every size of products, with the first and last number of rows of each, and experts with two tiles or none.
SIZES = {"tall": (1, 128, 129, 160, 0, 161), "wide": (1, 128, 129, 160, 161, 256, 257, 288, 0, 289)}


@pytest.mark.parametrize("float8", [False, True], ids=["bfloat16", "float8"])
@pytest.mark.parametrize("kind", ["tall", "wide"])
@pytest.mark.parametrize(
    ("rows", "width", "hidden"),
    # An odd and an even number of blocks of 64 hidden columns; programs with several items; the ring begins anywhere.
    [((3, 1), 256, 192), pytest.param(None, 384, 128, marks=pytest.mark.slow)],
    ids=["odd", "even, all sizes of tiles"],
)
def test_interpreted_products_match_float64(rows, width, hidden, kind, float8):
    rows = rows or SIZES[kind]
    module = load("dgemma_kernels.ops.experts.hopper_many", seed=sum(rows))
    check(module, routing(*rows), width, hidden, len(rows), ROWS[kind], float8)


UNWRITTEN = "without having waited for the write"
MISTAKES = {
    "rows-not-awaited": ("129 if FIRST.GATHERED else 1", "1", f"{UNWRITTEN}|expects no more arrivals"),
    "no-fence": ("        fence_async_shared()  # the rows", "        pass  # the rows", "without fence_async_shared"),
    "slots-never-free": ("        if step > 0:\n            _free_before(ring, slot)\n", "", "deadlock"),
    "slots-free-too-early": (
        "_wait_for_products((low, high, more_low, more_high), RUNNING, MORE, PARTS)",
        "(low, high, more_low, more_high)",
        "overwrites shared memory that an operation in flight reads|not waited for",
    ),
    "item-not-awaited": (
        "    mbarrier.wait(handover.full.index(at), turn // 2 & 1)\n", "", f"{UNWRITTEN}|never written"
    ),
    "no-fence-between-products": (
        "            fence_async_shared()  # threads", "            pass  # threads", "without fence_async_shared"
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "hazard"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_in_the_kernel_are_detected(old, new, hazard):
    module = load("dgemma_kernels.ops.experts.hopper_many", edits={old: new})
    with pytest.raises(Hazard, match=hazard):
        check(module, routing(70, 9), 512, 128, 2, ROWS["wide"], False)


def test_down_waits_for_the_hidden_values_of_its_tile():
    passage = "            while num_finished < SIZE.HALVES_BEFORE:\n"
    module = load("dgemma_kernels.ops.experts.hopper_many", edits={passage: "            while num_finished < 0:\n"})
    with pytest.raises(AssertionError):  # hidden values are read before they are written
        check(module, routing(9), 512, 128, 1, ROWS["wide"], False)


@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_other_versions_of_triton_get_tiles_of_the_triton_kernel(format, monkeypatch):
    monkeypatch.setattr(configs, "gpu_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(configs, "GLUON_RAN_WITH", (configs.triton.__version__,))
    sizes = {2048: ROWS["tall"], 4096: ROWS["wide"]}
    for num_tokens, rows in sizes.items():
        chosen = configs.expert_config(num_tokens, torch.device("cuda"), format)
        assert (chosen.persistent, chosen.rows) == (True, rows)
    monkeypatch.setattr(configs, "GLUON_RAN_WITH", ("0.",))
    assert not any(configs.expert_config(n, torch.device("cuda"), format).persistent for n in sizes)


def test_sizes_that_do_not_fit_whole_blocks_run_the_triton_kernel(monkeypatch):
    monkeypatch.setattr(kernel, "is_hopper", lambda device: True)
    cases = {
        (256, 128, torch.bfloat16): True,
        (128, 192, torch.float16): True,
        (256, 128, torch.float8_e4m3fn): True,
        (256, 128, torch.float32): False,
        (192, 128, torch.bfloat16): False,
        (256, 160, torch.bfloat16): False,
    }
    index = routing(3)
    tiles = router.sort_by_expert(index, router.count_pairs(index, 1), ROWS["wide"])
    for (width, hidden, dtype), fits in cases.items():
        rows, weights = torch.empty(3, hidden, dtype=dtype), torch.empty(1, width, hidden, dtype=dtype)
        assert kernel._fits_many(rows, weights, tiles, width, hidden) is fits
    rows, weights = torch.empty(3, 128).bfloat16(), torch.empty(1, 256, 128).bfloat16()
    assert kernel._fits_many(rows, weights, tiles, 256, 128)
    assert not kernel._fits_many(rows, weights, tiles._replace(rows_per_tile=320), 256, 128)
    assert not kernel._fits_many(torch.empty(385).bfloat16()[1:].view(3, 128), weights, tiles, 256, 128)


@native
@pytest.mark.parametrize("float8", [False, True], ids=["bfloat16", "float8"])
@pytest.mark.parametrize("kind", ["tall", "wide"])
@pytest.mark.parametrize("num_tokens", [300, 2048])
def test_the_published_sizes_match_float64_and_the_triton_kernel_on_a_gpu(num_tokens, kind, float8):
    from dgemma_kernels.ops.experts import hopper_many

    experts = 16  # few, with several tiles each
    scores = torch.rand(num_tokens, experts, generator=torch.Generator("cuda").manual_seed(2), device="cuda")
    index = (scores + torch.linspace(0, 0.2, experts, device="cuda")).topk(8).indices.int().contiguous()
    first = check(hopper_many, index, 2816, 704, experts, ROWS[kind], float8)
    again = check(hopper_many, index, 2816, 704, experts, ROWS[kind], float8)
    assert all(torch.equal(*both) for both in zip(first, again, strict=True))
    if not float8:  # sums over the depth have one order
        table = configs.EXPERTS["bf16"]["NVIDIA H200"]
        chosen = next(config for config in table if config.persistent and config.rows == ROWS[kind])
        x, gate_up, down, weights = draw(2816, 704, index, experts, float8)
        for config in (table[-1], chosen):  # the first runs the Triton kernel
            tiles = sort_by_expert(index, router.count_pairs(index, experts), config.rows)
            hidden = kernel.expert_gate_up(x, gate_up, tiles, config=config)
            assert torch.equal(hidden, first[0])
            assert torch.equal(kernel.expert_down(hidden, down, weights, tiles, config=config), first[1])
            tiles = sort_by_expert(index, router.count_pairs(index, experts), config.rows)
            assert torch.equal(kernel.multiply_experts(x, gate_up, down, weights, tiles, config=config), first[1])
