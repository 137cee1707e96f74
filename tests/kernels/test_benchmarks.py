"""The parts of the benchmarks that run without a GPU: parity before timing, the calls compared."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dgemma_kernels.ops.experts import kernel as kernels

BENCHMARKS = Path(__file__).parents[2] / "kernels" / "benchmarks"
SIZES = {"E": 4, "A": 2, "D": 64, "F": 128, "DENSE": 16, "GPU": torch.device("cpu")}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the sizes are those of Triton's interpreter")
@pytest.mark.parametrize(("format", "part"), [("packed", "planes"), ("fp8", "scale")])
def test_wrong_experts_are_not_timed(monkeypatch, format, part):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.delitem(sys.modules, "experts", raising=False)
    experts = importlib.import_module("experts")
    # The interpreter truncates to bfloat16 where a GPU rounds: 6e-3.
    for constant, value in (SIZES | {"LIMIT": 1e-2}).items():
        monkeypatch.setattr(experts, constant, value)
    if format == "packed":  # the interpreter does not multiply bfloat16
        monkeypatch.setattr(experts, "DTYPE", torch.float32)
    torch.manual_seed(0)
    layer, index = experts.draw_layer(format), experts.draw_index(12, 4)
    assert experts.check_experts("even", layer, index) < experts.LIMIT
    experts.check_experts("skewed", layer, torch.tensor([[0, 1]] * 12, dtype=torch.int32))
    # Scales of the previous row, bytes of the previous column.
    rolled = {part: getattr(layer.down, part).roll(1, dims=-1)}
    down = kernels.expert_down
    monkeypatch.setattr(kernels, "expert_down", lambda x, w, *rest: down(x, replace(w, **rolled), *rest))
    with pytest.raises(SystemExit, match="PARITY FAILED, nothing timed: experts, even"):
        experts.check_experts("even", layer, index)


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
