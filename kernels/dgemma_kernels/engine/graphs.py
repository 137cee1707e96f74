"""Work that is captured once and replayed: a CUDA graph on a GPU; in Triton's interpreter the function runs again."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

_compiling = threading.RLock()  # `only_compiling` replaces a function that all threads share


class CaptureError(RuntimeError):
    """A function that ran without capture could not be captured."""


class Turn:
    """A reentrant lock between threads that also orders their work on the device, on any stream.

    Static buffers and graphs are shared, so code that uses them holds the turn.

    Example: `with turn: graph.replay()`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock, self._depth = device, threading.RLock(), 0
        self._stream: torch.cuda.Stream | None = None  # of the last holder

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            if self._depth == 0 and self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
                stream = torch.cuda.current_stream(self._device)
                if self._stream is not None and self._stream != stream:
                    stream.wait_stream(self._stream)
                self._stream = stream
            self._depth += 1
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        self._lock.release()


def use_here(*tensors: Tensor) -> None:
    """Keep the memory of tensors from being reused before the current stream is done with them.

    Call it for tensors that another thread may have made on another stream. For other tensors it changes nothing.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def in_turn(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Wrap a method so that it holds its owner's `turn` while it runs."""

    @wraps(method)
    def run(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        owner: Any = args[0]
        with owner.turn:
            return method(*args, **options)

    return run


class GraphMemory:
    """Memory that graphs share (a pool). They must not run at the same time, so their callers hold its `turn`.

    After a failed capture, the next graphs share a new pool. Without a GPU there is only the turn.

    Torch reuses memory only on the stream that allocated it, so all graphs are captured on one stream. cuBLAS keeps a
    workspace per stream. When a graph of a stream is freed, torch from 2.12 on frees that workspace, which other graphs
    still use. Memory of the pool stays valid as long as a graph uses it. So a capture must allocate its workspaces in
    the pool. For this, `prepare` frees older workspaces of its streams, and the first run of a function has a stream of
    its own, `first_run`. `sides` are the streams besides `capture` that functions use.

    Example: `Replay(fn, GraphMemory(device))`.
    """

    def __init__(self, device: torch.device, sides: Sequence[torch.cuda.Stream] = ()) -> None:
        self.device, self.turn, self._sides = device, Turn(device), sides
        self.is_warm = False  # True from the warm-up on: kernels are compiled, and torch's unused memory stays
        self._failed: list[torch.cuda.CUDAGraph] = []
        if device.type == "cuda":
            self._start()

    def _start(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.first_run, self.capture = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        self._keeper: torch.cuda.CUDAGraph | None = None

    def prepare(self) -> None:
        """Make the next capture allocate all of its memory in the pool.

        Torch from 2.12 on frees a stream's workspaces when a graph of that stream is reset. It does not capture into a
        pool again after the last graph of the pool is gone, so one small graph stays.
        """
        zero = torch.zeros((), device=self.device)
        if self._keeper is None:
            self._keeper = _capture_clearing(zero, self.capture, self.pool)
        for stream in (self.capture, *self._sides):
            _capture_clearing(zero, stream, None).reset()

    def renew(self, failed: torch.cuda.CUDAGraph) -> None:
        """Replace the memory after the capture of `failed` raised an error.

        Torch before 2.12 leaves the allocations of such a capture open. It then refuses every later capture, and may
        still read the graph.
        """
        self._failed.append(failed)
        index = self.capture.device.index
        try:
            torch._C._cuda_endAllocateToPool(index, self.pool)
        except RuntimeError:
            pass  # torch has ended them
        else:
            torch._C._cuda_releasePool(index, self.pool)
        self._start()


def _capture_clearing(tensor: Tensor, stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
    """Return a graph of one operation, which clears a tensor."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        tensor.zero_()
        graph.capture_end()
    return graph


class Replay:
    """`fn()` captured: `result` is its result, and every `replay()` recomputes the tensors in it in place.

    `fn` reads static tensors, which already hold the first replay's inputs, and returns a pytree. On a GPU, its
    Python code runs only in the constructor. `rehearse` runs all kernels of a long `fn` once, in less time. They are
    compiled in parallel before that. Without it, `fn` runs once before it is captured.

    Example: `square = Replay(lambda: x * x, GraphMemory(x.device)); square.replay(); square.result` is `x * x`.
    """

    def __init__(self, fn: Callable[[], Any], memory: GraphMemory, rehearse: Callable[[], Any] | None = None) -> None:
        device = memory.device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_fresh = True  # without a GPU: the constructor has run `fn` for the first replay
        if device.type != "cuda":
            self._fn, self.result = fn, fn()
            return
        memory.first_run.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(memory.first_run):
            if rehearse is not None and not memory.is_warm:
                compile_together(rehearse)
            (rehearse or fn)()  # loads kernels, and lets libraries allocate what they cannot during capture
        torch.cuda.synchronize(device)  # a failed kernel raises here, and is not reported as a failed capture
        try:
            if not memory.is_warm:
                torch.cuda.empty_cache()  # a capture cannot take the memory that torch keeps for other tensors
            self._capture(fn, memory)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self._capture(fn, memory)

    def _capture(self, fn: Callable[[], Any], memory: GraphMemory) -> None:
        # Not `torch.cuda.graph`: it always empties torch's cache, and the next forward would allocate again.
        memory.prepare()
        self._graph = graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(memory.capture):
                graph.capture_begin(memory.pool, capture_error_mode="thread_local")
                try:
                    self.result = fn()
                finally:
                    graph.capture_end()
        except RuntimeError as error:  # an error of the capture, because the function has just run without one
            memory.renew(graph)
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).partition("\n")[0]
            raise CaptureError(f"This work could not be captured in a CUDA graph ({reason}).") from error

    def replay(self) -> None:
        is_fresh, self._is_fresh = self._is_fresh, False
        if self._graph is not None:
            self._graph.replay()
        elif not is_fresh:
            for target, source in zip(tree_leaves(self.result), tree_leaves(self._fn()), strict=True):
                if isinstance(target, Tensor) and target is not source:
                    target.copy_(source)

    def mark_stale(self) -> "Replay":
        """Make the next call run `fn`, because the constructor has run it for other inputs than those to come."""
        self._is_fresh = False
        return self


class Captured:
    """`fn(*inputs)` captured over copies of the inputs, whose values each call replaces.

    `rehearsal` makes the `rehearse` of `Replay` from a function without arguments.

    Example: `Captured(torch.square, [x], memory, lambda run: run)([y])` is `y * y`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: Sequence[Tensor],
        memory: GraphMemory,
        rehearsal: Callable[[Callable[..., Any]], Callable[[], Any]],
    ) -> None:
        self._inputs = [x.clone() for x in inputs]
        run = partial(fn, *self._inputs)
        self.graph = Replay(run, memory, rehearsal(run))

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        """Return the result for these inputs. The next call overwrites it."""
        for static, new in zip(self._inputs, inputs, strict=True):
            static.copy_(new, non_blocking=True)  # images are on the host
        self.graph.replay()
        return self.graph.result


def compile_together(launches: Callable[[], Any]) -> None:
    """Compile and load in parallel all kernels that `launches` would launch. It runs, but launches none of them.

    So their results are missing: new tensors hold zeros, by which `launches` may index.

    Example: `compile_together(lambda: forward.canvas(tokens, signal, buffers))`.
    """
    copy_context().run(_compile_together, launches)  # so that an interrupt does not leave Triton in this mode


def _compile_together(launches: Callable[[], Any]) -> None:
    # Threads are enough, because Triton releases Python's lock while it compiles. A kernel that fails to compile raises
    # at its launch.
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1  # a thread has its own current device
    with ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(device,)) as threads:
        with AsyncCompileMode(threads, ignore_errors=True), only_compiling() as kernels, _ZeroedMemory():
            launches()
        list(threads.map(_load, {id(kernel): kernel for kernel in kernels}.values()))


@contextmanager
def only_compiling() -> Iterator[list[Any]]:
    """Compile the kernels that this thread launches, and do not launch them. The list gets these kernels.

    Example: `with only_compiling() as kernels: rms_norm(x, None, 1e-6)`.
    """
    with _compiling:
        run, here, kernels = JITFunction.run, threading.get_ident(), []

        def compile_only(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
            if threading.get_ident() != here:
                return run(kernel, *args, warmup=warmup, **options)
            kernels.append(run(kernel, *args, warmup=True, **options))
            return kernels[-1]

        JITFunction.run = compile_only
        try:
            yield kernels
        finally:
            JITFunction.run = run


def _load(kernel: Any) -> None:
    """Build a kernel's launcher, and load the kernel on the device; else its first launch does, and raises errors."""
    if hasattr(kernel, "result"):  # not compiled before
        kernel = kernel.result(True)  # ignores errors
    with suppress(Exception):
        _ = kernel.run  # loads the kernel


class _ZeroedMemory(TorchFunctionMode):
    """Makes torch allocate zeros in a `with` block, so that functions can index by results of kernels not launched."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result.zero_() if function.__name__ in ("empty", "empty_like", "new_empty") else result


@contextmanager
def side_stream(device: torch.device, streams: Sequence[torch.cuda.Stream]) -> Iterator[Callable[[], None]]:
    """Run the launches of a `with` block on a second stream, parallel to the launches after the block.

    Call the yielded function before reading the block's results. The stream is the first of `streams` that is not the
    current one. On a device without streams, `streams` is not used.

    Example: `with side_stream(x.device, sides) as join: y = f(x)`; `z = g(x)`; `join()`; `y + z`.
    """
    if device.type != "cuda":
        yield lambda: None
        return
    here = torch.cuda.current_stream(device)
    side = next(stream for stream in streams if stream != here)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        yield lambda: here.wait_stream(side)


class Graphs(OrderedDict[Any, Any]):
    """Captured work by its key. If there is more than `most`, the least recently used is dropped.

    Example: `graphs.remembered(("trim", 2), make)` calls `make` once.
    """

    most = 400  # so that an option that changes at every step does not fill the memory

    def remembered(self, key: Any, make: Callable[[], Result]) -> Result:
        """Return the work of this key, made on demand."""
        if key not in self:
            self[key] = make()
        self.move_to_end(key)
        while len(self) > self.most:
            self.popitem(last=False)
        found: Result = self[key]
        return found


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy sources[i] to targets[i] for all i, with one launch per dtype.

    Example: `copy_all([x], [torch.ones_like(x)])`.
    """
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        of_dtype = groups.setdefault(target.dtype, ([], []))
        of_dtype[0].append(target)
        of_dtype[1].append(source)
    for group in groups.values():
        torch._foreach_copy_(*group)
