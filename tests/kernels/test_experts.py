"""The experts' two products over ragged and skewed routings, against float64; `test_half_layer` has transformers'."""

from dataclasses import replace
from threading import Thread

import pytest
import torch
from torch import Tensor

from dgemma_kernels.ops import configs
from dgemma_kernels.ops.configs import gpu_name
from dgemma_kernels.ops.experts import kernel as experts
from dgemma_kernels.ops.experts import reference as experts_reference
from kernel_inputs import NUM_EXPERTS, draw_routing, sort_choices

E, D, F = NUM_EXPERTS, 72, 88  # neither width is a multiple of any tile
# float32: sums of 88 products. float16: roundings of hidden value, product and weighted row, 2**-11 each.
LIMITS = {torch.float32: 1e-6, torch.float16: 2e-3}


def draw(index: Tensor, width: int, hidden: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(index.numel())
    shapes = [(index.shape[0], width), (E, 2 * hidden, width), (E, width, hidden)]
    x, gate_up, down = (torch.randn(*s, generator=generator) * s[-1] ** -0.5 * 2 for s in shapes)
    weights = torch.rand(index.shape, generator=generator)
    return [*(t.to(dtype).to(device) for t in (x, gate_up, down)), weights.to(device)]


def run(index: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
    return experts.multiply_experts(x, gate_up, down, weights, sort_choices(index))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("routing", ["one-token", "even", "one-expert-has-every-row", "two-experts-have-no-rows"])
@pytest.mark.parametrize(("width", "hidden"), [(D, F), (64, 128)], ids=["ragged", "exact"])
@pytest.mark.usefixtures("described")
def test_experts_match_float64(routing, width, hidden, dtype, device):
    index = draw_routing(routing).to(device)
    x, gate_up, down, weights = draw(index, width, hidden, dtype, device)
    tiles = sort_choices(index)

    got_hidden = experts.expert_gate_up(x, gate_up, tiles)
    want_hidden = experts_reference.expert_gate_up(x.double(), gate_up.double(), tiles)
    assert (got_hidden - want_hidden).norm() / want_hidden.norm() < LIMITS[dtype]

    got = experts.expert_down(got_hidden, down, weights, tiles)
    want = experts_reference.expert_down(want_hidden, down.double(), weights.double(), tiles)
    assert got.shape == (*index.shape, width)
    assert (got - want).norm() / want.norm() < LIMITS[dtype]


@pytest.mark.parametrize(
    ("rows_of_experts", "num_tiles", "grid"),
    # The grid has as many tiles as an even spread over experts fills: six for 38 rows, twelve for 97.
    [([17, 17, 1, 1, 1, 1], 8, 6), ([97, 0, 0, 0, 0, 0], 7, 12)],
    ids=["more-tiles-than-programs", "more-programs-than-tiles"],
)
def test_every_tile_is_computed(rows_of_experts, num_tiles, grid, device, monkeypatch):
    config = replace(configs.EXPERTS["bf16"]["default"][0], rows=16)
    monkeypatch.setitem(configs.EXPERTS["bf16"], "default", (config,))
    index = torch.arange(E).repeat_interleave(torch.tensor(rows_of_experts))[:, None].int().to(device)
    inputs = draw(index, D, F, torch.float32, device)
    tiles = sort_choices(index, rows=16)
    assert (tiles.tiles[:, 2] > 0).sum() == num_tiles
    assert experts._grid_tiles(tiles) == grid
    hidden = experts_reference.expert_gate_up(inputs[0].double(), inputs[1].double(), tiles)
    want = experts_reference.expert_down(hidden, inputs[2].double(), inputs[3].double(), tiles)
    assert (run(index, *inputs) - want).norm() / want.norm() < LIMITS[torch.float32]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the waiting kernel would block writes to the counters")
def test_down_reads_a_tile_only_after_gate_up_counted_it():
    index = draw_routing("even")
    x, gate_up, down, weights = draw(index, 16, 16, torch.float32, index.device)
    tiles = sort_choices(index, rows=32)
    hidden = experts.expert_gate_up(x, gate_up, tiles)
    want = experts.expert_down(hidden, down, weights, tiles)
    late, counted, rows = torch.full_like(hidden, torch.nan), tiles.finished.clone(), []
    tiles.finished.zero_()
    beside = Thread(
        target=lambda: rows.append(experts.expert_down(late, down, weights, tiles, overlap=True)), daemon=True
    )
    beside.start()
    beside.join(0.5)  # without the wait it would have finished by now
    late.copy_(hidden)
    tiles.finished.copy_(counted)
    beside.join(60)
    assert torch.equal(rows[0], want)


@pytest.mark.usefixtures("described")
def test_a_tile_of_two_blocks_gives_the_rows_of_a_tile_of_one(device, monkeypatch):
    # 32 + 16 rows share the weights. Experts have no row, one row, one block, both blocks, and a second tile.
    index = torch.arange(E).repeat_interleave(torch.tensor([0, 1, 32, 33, 48, 49]))[:, None].int().to(device)
    inputs = draw(index, D, F, torch.float16, device)
    rows = {}
    for size in (32, 48):
        config = replace(configs.EXPERTS["bf16"]["default"][0], rows=size)
        monkeypatch.setitem(configs.EXPERTS["bf16"], "default", (config,))
        rows[size] = run(index, *inputs)
    assert torch.equal(rows[48], rows[32])


def test_descriptors_give_the_bits_of_pointers(monkeypatch, device):
    index = draw_routing("even").to(device)
    inputs = draw(index, D, F, torch.float16, device)
    pointers = run(index, *inputs)
    shapes = []
    monkeypatch.setattr(configs, "TENSOR_DESCRIPTORS", {"default"})
    described = experts.TensorDescriptor.from_tensor
    monkeypatch.setattr(
        experts.TensorDescriptor,
        "from_tensor",
        staticmethod(lambda tensor, block: shapes.append(tensor.shape) or described(tensor, block)),
    )
    assert torch.equal(run(index, *inputs), pointers)
    assert shapes == [(E * 2 * F, D), (E * D, F)]


@pytest.mark.usefixtures("described")
@pytest.mark.parametrize(("width", "offset"), [(12, 0), (16, 2)], ids=["rows-of-24-bytes", "4-bytes-in"])
def test_weights_that_are_not_aligned_to_16_bytes_are_read_by_pointers(width, offset, device):
    index = draw_routing("even").to(device)
    x, gate_up, _, _ = draw(index, width, F, torch.float16, device)
    memory = torch.empty(gate_up.numel() + offset, dtype=gate_up.dtype, device=device)
    weights = memory[offset:].view_as(gate_up).copy_(gate_up)
    tiles = sort_choices(index, rows=32)
    want = experts_reference.expert_gate_up(x.double(), gate_up.double(), tiles)
    assert (experts.expert_gate_up(x, weights, tiles) - want).norm() / want.norm() < LIMITS[torch.float16]


@pytest.mark.parametrize(
    ("format", "name"), [(format, name) for format in ("bf16", "packed", "fp8") for name in configs.EXPERTS[format]]
)
def test_every_table_of_tiles_covers_every_batch_and_its_blocks_agree(format, name, monkeypatch):
    monkeypatch.setattr(configs, "gpu_name", lambda device: name)
    sizes = [configs.expert_config(tokens, torch.device("cpu"), format) for tokens in (1, 16, 256, 512, 4096, 1 << 20)]
    assert [config.rows for config in sizes] == sorted(config.rows for config in sizes)
    for config in configs.EXPERTS[format][name]:
        gate_up, down = config.gate_up, config.down
        if format == "packed":
            assert config.rows.bit_count() == 1
            assert (gate_up.cols, gate_up.depth, down.cols, down.depth) == (64, 128, 128, 128)
        if format == "fp8" and not config.one_scale:
            # One block width in all configs, so that a token's hidden values round the same in every batch.
            assert gate_up.cols == 64
            assert gate_up.cols % down.depth == 0


@pytest.mark.parametrize(
    ("name", "capability", "tables"),
    [
        ("NVIDIA H200", (9, 0), "NVIDIA H200"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "NVIDIA H200"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "default"),
        ("NVIDIA B200", (10, 0), "default"),
    ],
)
def test_an_unmeasured_hopper_gpu_uses_the_tables_of_the_h200(name, capability, tables, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(configs, "gpu_name", gpu_name.__wrapped__)  # not the remembered name of this machine's GPU
    gpu = torch.device("cuda")
    assert configs.expert_config(256, gpu) in configs.EXPERTS["bf16"][tables]
    assert (configs.dense_config(256, gpu) is not None) is (tables == "NVIDIA H200")
    assert configs.dependent_launch(gpu)["DEPENDENT"] is configs.tensor_descriptors(gpu) is (tables == "NVIDIA H200")


def test_float32_weights_get_the_default_tiles_at_half_the_depth_on_every_gpu(monkeypatch):
    # A GPU's tiles fill its shared memory with weights of 2 bytes; at full depth the default tiles spill registers.
    monkeypatch.setattr(configs, "gpu_name", lambda device: "NVIDIA H200")
    wide, narrow = (configs.expert_config(256, torch.device("cpu"), format) for format in ("float32", "bf16"))
    default = configs.EXPERTS["bf16"]["default"][0]
    halved = (replace(product, depth=product.depth // 2) for product in (default.gate_up, default.down))
    assert (wide.rows, wide.gate_up, wide.down) == (default.rows, *halved)
    assert narrow in configs.EXPERTS["bf16"]["NVIDIA H200"]
