"""Runs `ahead` without a GPU and prints as JSON how many kernels this process compiled, and what was called.

Run it in a separate process, without TRITON_INTERPRET. `ahead` compiles in other processes. After they have ended, this
file runs it again.
"""

import json
import os
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch._inductor import async_compile
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.runtime import _async_compile

from dgemma_kernels.ops import ahead


@triton.jit
def _fill_kernel(x, VALUE: tl.constexpr):
    tl.store(x + tl.arange(0, 32), VALUE)


@triton.jit
def _wrong_kernel(x):
    tl.static_assert(False, "fails as intended")


def fill(value: int) -> None:
    _fill_kernel[(1,)](torch.empty(32, device="meta"), value)


def fail() -> None:
    _wrong_kernel[(1,)](torch.empty(32, device="meta"))


def refuse() -> None:
    raise ValueError


def main() -> None:
    import compile_ahead  # so that other processes find its functions

    gpu, launchers, built = ahead.AbsentGPU(GPUTarget("cuda", 90, 32)), [], []
    gpu.launcher_cls = lambda source, metadata: launchers.append(metadata.name)
    triton.runtime.driver.set_active(gpu)
    build = compiler.CUDABackend.make_cubin
    compiler.CUDABackend.make_cubin = lambda *args: built.append(1) or build(*args)
    torch.cuda.current_device = lambda: 0
    compiler.get_ptxas_version(90)  # is read once; torch changes the path later
    ptxas = Path(os.environ["TRITON_CACHE_DIR"]) / "ptxas"
    ptxas.write_text(f'#!/bin/sh\n{knobs.nvidia.ptxas.path} "$@" && if [ "$1" = --version ]; then echo other; fi\n')
    ptxas.chmod(0o755)
    os.environ["TRITON_PTXAS_PATH"] = str(ptxas)

    def compile_fills(*values: int) -> dict[str, object]:
        fills = [partial(compile_ahead.fill, value) for value in values]
        ahead.start([partial(compile_ahead.refuse), *fills, partial(compile_ahead.fail)])
        # Torch sets this variable while it compiles, and the keys of Triton's cache contain it.
        with patch.dict(os.environ, TRITON_LIBDEVICE_PATH="elsewhere"):
            ahead.finish()
        loaded = compile_ahead._fill_kernel.device_caches[0][0]
        is_over = _async_compile.active_mode.get() is None and not ahead._started
        found = {"built": len(built), "launchers": [*launchers], "is over": is_over}
        found["kernels"] = [type(kernel).__name__ for kernel in loaded.values()]
        for each in (built, launchers, loaded):
            each.clear()
        return found

    alive = compile_fills(1, 2, 1)
    async_compile.AsyncCompile.process_pool().shutdown()
    print(json.dumps({"alive": alive, "dead": compile_fills(3, 4, 3)}))


if __name__ == "__main__":
    main()
