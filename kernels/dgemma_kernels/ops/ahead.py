"""Compilation of kernels before their first launch, in the worker processes of torch's compiler.

A worker compiles without a GPU and writes the result to Triton's folder on disk. A thread of this process waits for the
worker and loads the kernel from there. If the worker fails, the thread compiles the kernel itself.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from triton import AsyncCompileMode
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_SECONDS = 60.0  # after which a thread no longer waits for a worker; the largest kernel compiles in 7
_MOST_THREADS = 32
_started: list[AsyncCompileMode] = []  # global, as are the kernels that Triton has loaded
_compiling = threading.RLock()  # `only_compiling` replaces a function that all threads share


def start(calls: Sequence[partial[Any]]) -> None:
    """Start to compile the kernels that these calls launch, each call in a worker. Nothing is launched.

    Tensors of the calls are on the meta device. If this version of torch lacks a function that is needed, nothing is
    started. Each kernel then compiles at its first launch.

    Example: `start([partial(rms_norm, torch.empty(256, 2816, device="meta"), None, 1e-6)])`.
    """
    workers = _find_workers()
    if workers is None:
        return
    # torch sets Triton's folder at its first compilation. Files are written before that, so the folder is set now.
    os.environ.setdefault("TRITON_CACHE_DIR", workers.cache_folder(torch.cuda.current_device()))
    processes = _Processes(ThreadPoolExecutor(_MOST_THREADS), workers)
    mode = AsyncCompileMode(processes, ignore_errors=True)
    copy_context().run(_start, mode, processes, calls)
    processes.threads.shutdown(wait=False)  # threads end after their last kernel
    _started.append(mode)


def finish() -> None:
    """Wait for all kernels that `start` compiles. A kernel that fails to compile raises at its launch.

    Example: `finish()`.
    """
    while True:
        try:
            mode = _started.pop()
        except IndexError:  # another thread took the last one
            break
        copy_context().run(mode.__exit__, None, None, None)


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


class _Workers(NamedTuple):
    """The functions of torch's compiler that `start` uses. They are private, so another version may not have them."""

    cache_folder: Callable[[int], str]  # of Triton, for a device
    num_processes: Callable[[], int]
    pool: Callable[[], Any]


def _find_workers() -> _Workers | None:
    try:
        from torch._inductor.async_compile import AsyncCompile, get_compile_threads
        from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

        return _Workers(triton_cache_dir, get_compile_threads, AsyncCompile.process_pool)
    except (ImportError, AttributeError):
        return None


class _Setup(NamedTuple):
    """Parts of the key by which Triton finds a compiled kernel: those that depend on the launching process."""

    target: GPUTarget
    settings: dict[str, str]  # Triton's environment variables
    tools: str  # version of the assembler that Triton found first; torch later sets the path of another


def _compile_for(setup: _Setup, call: Callable[[], Any]) -> None:
    """Compile the kernels of a call in a worker, for a GPU that the worker does not use."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment = patch.dict(os.environ, others | setup.settings, clear=True)
    same_tools = patch.object(type(make_backend(setup.target)), "hash", lambda backend: setup.tools)
    driver.set_active(AbsentGPU(setup.target))
    try:
        with environment, same_tools, only_compiling():
            call()
    finally:
        driver.set_active(None)


def _start(mode: AsyncCompileMode, processes: "_Processes", calls: Sequence[partial[Any]]) -> None:
    mode.__enter__()
    with only_compiling():
        for call in calls:
            processes.use(call)
            with suppress(ValueError):  # a kernel that refuses these sizes is not launched later
                call()


class _Processes(Executor):
    """Threads that load kernels. Each waits for a worker of torch's compiler, which compiles the kernels of a call."""

    call: Callable[[], Any]
    job: Future[None] | None

    def __init__(self, threads: ThreadPoolExecutor, workers: _Workers) -> None:
        target = driver.active.get_current_target()
        settings = {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}
        self.threads, self.workers = threads, workers
        self.setup = _Setup(target, settings, make_backend(target).hash())

    def use(self, call: Callable[[], Any]) -> None:
        """Let a worker run `call`, to compile the kernels that are submitted next."""
        self.call, self.job = call, None

    def submit(self, load: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        if self.job is None and self.workers.num_processes() > 1:
            with suppress(OSError, RuntimeError):  # torch's workers have ended
                self.job = self.workers.pool().submit(partial(_compile_for, self.setup, self.call))
        return self.threads.submit(_load_after, self.job, load)


def _load_after(job: Future[None] | None, load: Callable[[], Any]) -> Any:
    if job is not None:
        wait([job], _SECONDS)
    kernel = load()
    # Build the launcher, which is C code for the host. Otherwise the first launch would build it.
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


class AbsentGPU(DriverBase):
    """The parts of a driver that Triton needs to compile a launch.

    Example: `triton.runtime.driver.set_active(AbsentGPU(GPUTarget("cuda", 90, 32)))`.
    """

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def is_active(self) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError
