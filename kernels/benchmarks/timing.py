"""Measurement for the benchmarks: CUDA-graph replays, read bandwidth, parity, and the description of a run."""

import ctypes
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl


def time_graph(fn: Callable[[], object], *, calls: int = 1, replays: int = 20, warmup: int = 3) -> tuple[float, float]:
    """Return the median milliseconds of `fn()` and the spread (90th minus 10th percentile) over CUDA-graph replays.

    `fn` first runs eagerly (compilation, lazy initialisation), then it is captured `calls` times into one graph. It
    must rotate over inputs larger than the L2 cache if a warm cache would distort its time. For one small kernel raise
    `calls`, which divides the cost of starting a replay.

    Example: `median_ms, spread_ms = time_graph(lambda: run_all_layers(x), replays=50)`.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    for _ in range(warmup):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) / calls for a, b in itertools.pairwise(marks))
    graph.reset()
    return statistics.median(times), times[(9 * replays) // 10] - times[replays // 10]


@triton.jit
def _read_kernel(x: tl.tensor, out: tl.tensor, steps: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Sum `steps` blocks per program; blocks of neighbouring programs are neighbours in memory."""
    cols = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for step in range(steps):
        block = step.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)  # type: ignore[attr-defined]
        total += tl.load(x + block * BLOCK + cols)
    tl.store(out + tl.program_id(0), tl.sum(total))


def measure_read_bandwidth(num_bytes: int = 8 << 30) -> float:
    """Return the bytes per second at which this GPU reads uncached memory, the upper bound of every benchmark.

    Example: `measure_read_bandwidth() / 1e12` is about 4.5 on an H200.
    """
    block, best = 4096, 0.0
    x = torch.randint(0, 1 << 20, (num_bytes // 4,), dtype=torch.int32, device="cuda")
    for steps in (4, 16, 64):
        programs = x.numel() // (block * steps)
        out = torch.empty(programs, dtype=torch.int32, device="cuda")

        def read(steps: int = steps, programs: int = programs, out: torch.Tensor = out) -> None:
            _read_kernel[(programs,)](x, out, steps, BLOCK=block, num_warps=8)

        median_ms, _ = time_graph(read, replays=10)
        best = max(best, programs * steps * block * 4 / (median_ms * 1e-3))
    return best


def seconds_of(function: Callable[[], object]) -> float:
    """Return the seconds of one call, with all of its work on the device.

    Example: `seconds_of(lambda: model.warm_up())`.
    """
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def read_joules() -> float:
    """Return the energy that this GPU has used since its driver was loaded, in joules (NVML).

    The counter changes about every 0.1 s, so take a difference over a second or more.

    Example: `start = read_joules(); run(); joules = read_joules() - start`.
    """
    nvml, device, energy = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), ctypes.c_ulonglong()
    uuid = f"GPU-{torch.cuda.get_device_properties('cuda').uuid}".encode()
    results = (
        nvml.nvmlInit_v2(),
        nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(device)),
        nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(energy)),  # in millijoules
    )
    if any(results):
        raise RuntimeError(f"read_joules got the NVML errors {results}. This GPU may have no energy counter.")
    return energy.value / 1e3


def describe_run() -> str:
    """Return device, versions, commit (or the variable COMMIT) and command, for every recorded result."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    commit = os.environ.get("COMMIT") or git.stdout.strip() or "unknown"
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{device}, {versions}, commit {commit}, command: python {' '.join(sys.argv)}"


def results_folder() -> Path:
    """Return the folder of this GPU's results: `results/h200` for an "NVIDIA H200"."""
    gpu = torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "_")
    return Path(__file__).parent / "results" / gpu


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return ‖got − want‖ / ‖want‖ in float64, which is NaN or infinite if any element of `got` is.

    Example: `relative_error(torch.tensor([1.0]), torch.tensor([2.0]))` is `0.5`.
    """
    difference = got.double() - want.double()
    return (difference.norm() / want.double().norm()).item()


def demand_parity(name: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> float:
    """Return the relative error, or exit if it exceeds `limit`, because a wrong kernel must not be timed."""
    error = relative_error(got, want)
    if not error <= limit:
        raise SystemExit(f"PARITY FAILED, nothing timed: {name} is off by {error:.3e}, the limit is {limit:.1e}.")
    return error
