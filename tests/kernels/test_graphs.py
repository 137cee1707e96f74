"""Kernels are compiled in parallel before a capture, without being launched."""

import gc
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

import dgemma
from dgemma.model.config import FULL, SLIDING
from dgemma_kernels import accelerate
from dgemma_kernels.engine.graphs import CaptureError, GraphMemory, Graphs, Replay, compile_together
from kernel_inputs import make_model


class _Kernel(JITFunction):
    """A kernel whose compilation waits until another compilation has begun."""

    launched, compiled = 0, 0

    def __init__(self, name: str, both: threading.Barrier) -> None:
        self.name, self.both = name, both

    def compile_it(self) -> str:
        self.both.wait(timeout=300)
        return self.name

    def finalize(self, kernel: str) -> None:
        self.compiled += 1


def _run(kernel: _Kernel, *args: object, grid: object, warmup: bool, **options: object) -> None:
    kernel.launched += not warmup
    mode = _async_compile.active_mode.get()
    if mode is not None:
        after_failure = [lambda future: None] * (len(signature(mode.submit).parameters) - 3)  # since Triton 3.7
        mode.submit(kernel.name, kernel.compile_it, kernel.finalize, *after_failure)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[_Kernel]:
    monkeypatch.setattr(JITFunction, "run", _run)
    both = threading.Barrier(2)
    return [_Kernel("a", both), _Kernel("b", both)]


def test_kernels_compile_in_parallel_and_once(kernels):
    def launches():
        for kernel in (*kernels, *kernels):
            kernel[(1,)]("an argument", num_warps=4)

    compile_together(launches)
    assert [kernel.compiled for kernel in kernels] == [1, 1]
    assert [kernel.launched for kernel in kernels] == [0, 0]


def test_only_the_most_recently_used_graphs_are_kept():
    graphs = Graphs()
    for key in range(graphs.most):
        graphs.remembered(key, object)
    first = graphs.remembered(0, object)  # used again, so it outlives key 1
    graphs.remembered("new", object)
    assert graphs.remembered(0, object) is first
    assert len(graphs) == graphs.most == 400
    assert 1 not in graphs


@pytest.fixture
def absent_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Functions of torch that write what they would do to a list."""
    log: list[str] = []

    @contextmanager
    def on_stream(stream):
        log.append("enter")
        yield
        log.append("leave")

    def begin(*pool, capture_error_mode):
        log.append("begin")

    graph = SimpleNamespace(capture_begin=begin, capture_end=lambda: log.append("end"))
    stream = SimpleNamespace(wait_stream=lambda other: None)
    replaced = {"CUDAGraph": lambda: graph, "Stream": lambda device: stream, "stream": on_stream}
    replaced |= dict.fromkeys(("graph_pool_handle", "current_stream", "synchronize"), lambda *device: None)
    for name, function in (replaced | {"empty_cache": lambda: log.append("empty cache")}).items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(GraphMemory, "prepare", lambda memory: log.append("prepare"))
    monkeypatch.setattr(GraphMemory, "renew", lambda memory, failed: log.append("renew"))
    return log


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("full"), RuntimeError("not allowed\nin a capture")])
def test_a_failed_capture_ends_and_is_tried_again_only_for_lack_of_memory(absent_gpu, error, is_warm):
    errors = iter([None, error, None])  # of the run before the capture, of the capture, of the next capture
    memory = GraphMemory(torch.device("cuda"))
    memory.is_warm = is_warm

    def function():
        if (raised := next(errors)) is not None:
            raise raised
        return "result"

    start, capture = ["enter", "leave", *["empty cache"] * (not is_warm)], ["prepare", "enter", "begin", "end"]
    if type(error) is RuntimeError:
        with pytest.raises(CaptureError, match=r"CUDA graph \(not allowed\)\.$"):
            Replay(function, memory)
        assert absent_gpu == [*start, *capture, "renew"]
        return
    assert Replay(function, memory).result == "result"
    failed = [] if error is None else [*capture, "renew", "empty cache"]
    assert absent_gpu == [*start, *failed, *capture, "leave"]


@pytest.mark.usefixtures("absent_gpu")
def test_a_kernel_that_fails_before_capture_is_not_reported_as_a_failed_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", MagicMock(side_effect=RuntimeError("an illegal memory access")))
    with pytest.raises(RuntimeError, match="illegal memory access") as raised:  # at the next wait for the device
        Replay(lambda: None, GraphMemory(torch.device("cuda")))
    assert not isinstance(raised.value, CaptureError)


def test_many_samplers_drop_no_forward_and_a_larger_arena_no_sampler(device, monkeypatch):
    monkeypatch.setattr(Graphs, "most", 3)
    fast, prompt = accelerate(make_model(device)), torch.zeros(1, 5, dtype=torch.int64, device=device)
    forwards = []
    for bound in range(4):
        dgemma.generate(fast, prompt, steps=1, sampler=dgemma.EntropyBound(bound=bound), max_new_tokens=4)
        forwards.append({id(graph) for graph in fast._workspace.graphs.values()})
    assert forwards == forwards[:1] * 4
    steps = [*fast._stepper.graphs]
    assert [key[0].sampler.bound for key in steps] == [1, 2, 3]
    fast._arena.make_room(1, 100_000, 4)
    assert (list(fast._workspace.graphs), list(fast._stepper.graphs)) == ([], steps)


@pytest.mark.slow
def test_batches_share_the_memory_of_the_largest_and_keep_their_graphs(device):
    fast = accelerate(make_model(device))
    prompt = torch.zeros(4, 5, dtype=torch.int64, device=device)
    fast.denoise(prompt[:, :4], fast.encode(prompt))
    memory = [tensor.data_ptr() for tensor in (*fast._arena.tensors.values(), *fast._stepper._statics)]
    graphs = set(fast._workspace.graphs)
    for batch in (1, 3):
        fast.denoise(prompt[:batch, :4], fast.encode(prompt[:batch]))
    assert [t.data_ptr() for t in (*fast._arena.tensors.values(), *fast._stepper._statics)] == memory
    assert graphs < set(fast._workspace.graphs)
    fast.encode(torch.zeros(9, 5, dtype=torch.int64, device=device))  # too many rows
    assert not graphs & set(fast._workspace.graphs)


def test_longer_forwards_take_more_memory_in_one_sliding_layer_only(device):
    arena, sizes = accelerate(make_model(device, num_hidden_layers=3, layer_types=(SLIDING, SLIDING, FULL)))._arena, []
    for most in (64, 4096):
        arena.most_read = most
        arena.make_room(1, 100, 4)
        sizes.append(sum(tensor.nbytes for tensor in arena.tensors.values()))
    assert sizes[1] - sizes[0] == (4096 - 64) * 2 * 4 * 2 * 16  # keys and values in float32, two heads of 16


def test_a_cache_at_rest_takes_the_memory_of_its_tokens(device):
    model = make_model(device)
    fast, prompt = accelerate(model), torch.zeros(1, 9, dtype=torch.int64, device=device)
    first, _ = fast.encode(prompt), fast.encode(prompt)  # the second takes the place of the first
    assert first.num_bytes == model.encode(prompt).num_bytes


def run_uninterpreted(name: str, cache: Path) -> str:
    """Run a script of this folder without Triton's interpreter, and return what it prints."""
    switches = ("TRITON_INTERPRET", "TRITON_OVERRIDE_ARCH")
    environment = {name: value for name, value in os.environ.items() if name not in switches}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, Path(__file__).with_name(name)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_after_a_warm_up_calls_of_other_shapes_and_settings_compile_nothing(tmp_path):
    printed = run_uninterpreted("compile_after_warm_up.py", tmp_path)
    assert re.fullmatch(r"ready: \d+\n", printed), printed


@pytest.mark.compile
def test_real_kernels_are_compiled_and_a_wrong_one_raises_at_its_launch(tmp_path):
    found = json.loads(run_uninterpreted("compile_side_by_side.py", tmp_path))
    assert found["cached"] == [["CompiledKernel"], ["CompiledKernel"], []]
    assert found["loaded"] == ["_attention_residual_kernel", "_rms_norm_kernel"]
    assert "fails as intended" in found["error"]


def test_an_interrupt_leaves_nothing_behind(kernels):
    def interrupt():
        raise KeyboardInterrupt

    kernels[0].compile_it = interrupt
    with pytest.raises(KeyboardInterrupt):
        compile_together(lambda: kernels[0][(1,)]())
    assert _async_compile.active_mode.get() is None
    assert JITFunction.run is _run


def test_launches_of_another_thread_are_not_left_out(kernels):
    def launches():
        other = threading.Thread(target=lambda: kernels[1][(1,)]())
        other.start()
        other.join(20)

    compile_together(launches)
    assert kernels[1].launched == 1


def test_threads_compile_one_after_the_other_and_restore_triton():
    run, first_is_done = JITFunction.run, threading.Event()
    second = threading.Thread(target=lambda: compile_together(lambda: first_is_done.wait(20)))

    def launches():
        second.start()
        second.join(0.1)  # time to begin in the middle of the first

    compile_together(launches)
    first_is_done.set()
    second.join(20)
    assert JITFunction.run is run


def _products(device: torch.device) -> tuple[GraphMemory, list[torch.cuda.Stream], Callable[[], list[torch.Tensor]]]:
    """Return memory for graphs, its two streams, and a function that computes one product on each of two streams.

    The products are deep and narrow, so cuBLAS splits the depth and adds the parts in its workspace. Each stream has
    already run a product, so it has a workspace outside that memory.
    """
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (torch.randn(64, 65_536, device=device, generator=generator).bfloat16() for _ in range(2))
    side = torch.cuda.Stream(device)
    memory = GraphMemory(device, [side])

    def run() -> list[torch.Tensor]:
        here = torch.cuda.current_stream(device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            beside = x @ weight.T
        result = [weight @ x.T, beside]
        here.wait_stream(side)
        return result

    for stream in (memory.capture, side):
        with torch.cuda.stream(stream):
            x @ weight.T
    torch.cuda.synchronize()
    return memory, [memory.capture, side], run


@pytest.mark.gpu
def test_a_graph_keeps_its_bits_and_writes_nowhere_else_after_others_of_its_streams_are_gone():
    device = torch.device("cuda")
    memory, streams, run = _products(device)
    kept, dropped = Replay(run, memory), Replay(run, memory)
    kept.replay()
    want = [result.clone() for result in kept.result]
    for stream in streams:  # a graph of somebody else
        other, x = torch.cuda.CUDAGraph(), torch.zeros(1, device=device)
        with torch.cuda.graph(other, stream=stream):
            x.zero_()
        del other
    del dropped
    gc.collect()
    torch.cuda.empty_cache()
    rest = [torch.full((1 << 23,), 7, dtype=torch.int32, device=device) for _ in range(40)]  # takes freed memory
    for _ in range(3):
        kept.replay()
    assert all(torch.equal(*pair) for pair in zip(kept.result, want, strict=True))
    assert all(bool((block == 7).all()) for block in rest)


@pytest.mark.gpu
def test_functions_are_captured_after_all_graphs_are_gone():
    device = torch.device("cuda")
    memory, _, run = _products(device)
    want = [result.clone() for result in run()]
    for _ in range(3):
        replay = Replay(run, memory)
        replay.replay()
        assert all(torch.equal(*pair) for pair in zip(replay.result, want, strict=True))
        del replay
        gc.collect()


@pytest.mark.gpu
def test_a_prefix_keeps_its_logits_while_graphs_of_other_shapes_come_and_go():
    device = torch.device("cuda")
    fast = accelerate(make_model(device))
    generator = torch.Generator(device).manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(40, shape, device=device, generator=generator)

    prefix, canvas = fast.encode(draw(2, 6)), draw(2, 4)
    want = fast.denoise(canvas, prefix).logits.clone()
    for batch in range(3, 35):
        fast.denoise(draw(batch, 4), fast.encode(draw(batch, 6)))
    torch.cuda.empty_cache()
    rest = [torch.full((1 << 20,), 7, dtype=torch.int32, device=device) for _ in range(40)]
    assert torch.equal(fast.denoise(canvas, prefix).logits, want)
    assert all(bool((block == 7).all()) for block in rest)
