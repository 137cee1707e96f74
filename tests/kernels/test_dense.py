"""The dense MLP in one launch against its reference in float64."""

from dataclasses import replace
from threading import Thread
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from dgemma_kernels.ops import configs
from dgemma_kernels.ops.mlp import kernel as dense
from dgemma_kernels.ops.mlp import reference
from kernel_inputs import error

# float32 sums of a hundred terms; float16 rounds five times on the way, 2**-11 each.
LIMITS = {torch.float32: 1e-6, torch.float16: 2e-3}
SMALL = configs.DenseConfig(
    min_tokens=1, max_tokens=512, programs=3, rows=32, gate_up_cols=16, down_cols=32, depth=32, warps=4, stages=2
)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(configs.DENSE, "default", (SMALL,))


def draw(
    tokens: int, width: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, width, 1), (2 * hidden, width, width), (width, hidden, hidden))
    drawn = (torch.randn(m, n, generator=generator) * fan_in**-0.5 for m, n, fan_in in shapes)
    x, gate_up, down = (tensor.to(device, dtype) for tensor in drawn)
    return x, gate_up, down


def count(device: torch.device) -> Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("tokens", [1, 32, 70], ids=["one-row", "one-block", "ragged-blocks"])
@pytest.mark.parametrize(("width", "hidden"), [(64, 96), (72, 88), (16, 8)], ids=["exact", "ragged", "less-than-tiles"])
def test_the_dense_mlp_matches_float64(tokens, width, hidden, dtype, device):
    arguments = draw(tokens, width, hidden, dtype, device)
    want = reference.dense_mlp(*(tensor.double() for tensor in arguments), count(device))
    assert error(dense.dense_mlp(*arguments, count(device)), want) < LIMITS[dtype]


@pytest.mark.parametrize("programs", [1, 4, 40], ids=["one", "some", "more-than-tiles"])
def test_counters_are_zero_after_a_launch(programs, monkeypatch, device):
    monkeypatch.setitem(configs.DENSE, "default", (replace(SMALL, programs=programs),))
    arguments, progress = draw(70, 72, 88, torch.float32, device), count(device)
    first = dense.dense_mlp(*arguments, progress)
    assert progress.tolist() == [0, 0]
    assert torch.equal(dense.dense_mlp(*arguments, progress), first)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the waiting kernel would block writes to the counters")
@pytest.mark.usefixtures("small_tiles")
def test_down_waits_for_tiles_that_another_program_has_not_stored_yet(device):
    arguments, progress = draw(32, 32, 32, torch.float32, device), count(device)
    progress[0] = 2  # 32 hidden columns in two tiles, both taken
    beside = Thread(target=dense.dense_mlp, args=(*arguments, progress), daemon=True)
    beside.start()
    beside.join(0.5)  # without the wait it would have finished by now
    assert beside.is_alive()
    progress[1] = 2
    beside.join(60)
    assert progress.tolist() == [0, 0]


@pytest.mark.usefixtures("small_tiles")
def test_the_dense_mlp_rounds_where_separate_float16_layers_round(device):
    # Gate, activation, product and output each round. With one rounding, more than half of the values would differ.
    arguments = draw(64, 72, 88, torch.float16, device)
    got, want = (module.dense_mlp(*arguments, count(device)) for module in (dense, reference))
    assert (got != want).float().mean() < 0.05


def test_few_and_many_tokens_use_library_products(monkeypatch):
    monkeypatch.setattr(configs, "gpu_name", lambda device: "NVIDIA H200")
    own = [tokens for tokens in range(1, 2000) if configs.dense_config(tokens, torch.device("cpu")) is not None]
    assert own == list(range(65, 1153))  # the tables have no gap


def test_float32_weights_use_library_products(monkeypatch, device):
    # float32 tiles of gate, up and 256 tokens, 64 deep in four stages, take 384 KiB; a multiprocessor has 227.
    monkeypatch.setattr(configs, "gpu_name", lambda device: "NVIDIA H200")
    launches = MagicMock()
    monkeypatch.setattr(dense, "_dense_mlp_kernel", launches)
    arguments = draw(70, 72, 88, torch.float32, device)
    want = reference.dense_mlp(*(tensor.double() for tensor in arguments), count(device))
    assert error(dense.dense_mlp(*arguments, count(device)), want) < LIMITS[torch.float32]
    assert not launches.mock_calls
    dense.dense_mlp(*(tensor.half() for tensor in arguments), count(device))
    assert launches.mock_calls
