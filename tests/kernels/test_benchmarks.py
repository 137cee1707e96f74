"""The parts of the benchmarks that run without a GPU: parity before timing, the sweep of tiles, the calls compared."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dgemma_kernels.ops import configs
from dgemma_kernels.ops.experts import kernel as kernels

BENCHMARKS = Path(__file__).parents[2] / "kernels" / "benchmarks"
SIZES = {"E": 4, "A": 2, "D": 64, "F": 128, "DENSE": 16, "GPU": torch.device("cpu")}


@pytest.fixture
def bench(monkeypatch) -> tuple[ModuleType, ModuleType]:
    """Import `experts` and `experts_sweep` with small sizes, without a GPU."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    modules = []
    for name in ("experts", "experts_sweep"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        modules.append(module)
        for constant in SIZES.keys() & vars(module).keys():
            monkeypatch.setattr(module, constant, SIZES[constant])
    monkeypatch.setattr(modules[0], "LIMIT", 1e-2)  # the interpreter truncates to bfloat16 where a GPU rounds: 6e-3
    return tuple(modules)


@pytest.mark.parametrize(
    ("name", "options"), [("experts", []), ("experts_sweep", ["256", "512", "--weights", "packed", "--distinct", "84"])]
)
def test_a_benchmark_without_a_gpu_exits_with_a_message(bench, monkeypatch, name, options):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        sys.modules[name].main()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the sizes are those of Triton's interpreter")
@pytest.mark.parametrize(("format", "part"), [("packed", "planes"), ("fp8", "scale")])
def test_wrong_experts_are_not_timed(bench, monkeypatch, format, part):
    experts, _ = bench
    if format == "packed":  # the interpreter does not multiply bfloat16
        monkeypatch.setattr(experts, "DTYPE", torch.float32)
    torch.manual_seed(0)
    layer, index = experts.draw_layer(format), experts.draw_index(12, 4)
    assert experts.check_experts("even", layer, index) < experts.LIMIT
    experts.check_experts("skewed", layer, torch.tensor([[0, 1]] * 12, dtype=torch.int32))
    rolled = {
        part: getattr(layer.down, part).roll(1, dims=-1)
    }  # scales of the previous row, bytes of the previous column
    down = kernels.expert_down
    monkeypatch.setattr(kernels, "expert_down", lambda x, w, *rest: down(x, replace(w, **rolled), *rest))
    with pytest.raises(SystemExit, match="PARITY FAILED, nothing timed: experts, even"):
        experts.check_experts("even", layer, index)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the sizes are those of Triton's interpreter")
def test_a_sweep_times_every_tile_and_prints_the_best_correct_pair(bench, monkeypatch, capsys):
    experts, sweep = bench
    torch.manual_seed(0)
    times = iter([3.0, 2.0, 5.0, 4.0, 9.0])  # two tiles of gate_up, two of down, the better of each together
    monkeypatch.setattr(sweep, "time_graph", lambda run, replays: (run(), (next(times), 0.0))[1])
    monkeypatch.setitem(sweep.FLOAT8_GATE_UP_TILES, 16, [(64, 32, 4, 2), (64, 64, 4, 2)])
    monkeypatch.setitem(sweep.FLOAT8_DOWN_TILES, 16, [(32, 64, 4, 2), (64, 128, 4, 2), (64, 64, 4, 2)])
    tables, report = dict(configs.EXPERTS["fp8"]), experts.Report(bandwidth=1e12, lines=[])
    sweep.sweep(report, [experts.draw_layer("fp8")], 8, 4)
    printed = capsys.readouterr().out
    assert [line["name"].partition(":")[0] for line in report.lines] == ["gate_up 8"] * 2 + ["down 8"] * 2 + ["both 8"]
    assert "64x128 w4 s2: AssertionError" in printed  # a block has 64
    assert report.lines[-1]["name"] == "both 8: 16 rows, 64x64 w4 s2 and 64x64 w4 s2"
    assert "BEST at 8: 9000.0 us per layer" in printed
    assert tables == configs.EXPERTS["fp8"]


def test_a_call_is_compared_with_the_median_of_its_shape(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    workloads = importlib.import_module("workloads")
    monkeypatch.setattr(workloads, "draw_tokens", lambda *shape: torch.zeros(shape, dtype=torch.int64))
    seconds = iter([1.0] * 8 + [1.6])  # the last call of some shape is slow
    monkeypatch.setattr(workloads, "seconds_of", lambda call: next(seconds))
    results = workloads.Results(bandwidth=0.0)
    workloads.time_calls(results, None, num_calls=11)  # three shapes, three times each
    (calls,) = results.parts["calls"]
    assert [calls[name] for name in ("calls", "shapes", "above_1_5", "slowest_ratio")] == [9, 3, 1, 1.6]
    assert results.parts["slowest"][0]["ms"] == [1000.0, 1000.0, 1600.0]
    assert next(seconds, None) is None
