"""Runs `graphs.compile_together` without a GPU and prints the kernels in Triton's cache as JSON.

Run it in a separate process, without TRITON_INTERPRET.
"""

import json
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from absent_gpu import absent_gpu
from triton.runtime.jit import JITFunction

from dgemma_kernels.engine.graphs import compile_together
from dgemma_kernels.ops import configs
from dgemma_kernels.ops.norms import kernel as norms


@triton.jit
def _wrong_kernel(x):
    tl.static_assert(False, "fails as intended")


def cached_kernels(kernel: JITFunction) -> list[str]:
    return [type(compiled).__name__ for kernels, *_ in kernel.device_caches.values() for compiled in kernels.values()]


def main() -> None:
    gpu, loaded = absent_gpu(), []
    gpu.launcher_cls = lambda source, metadata: None
    gpu.utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232_448},
        load_binary=lambda name, *args: (loaded.append(name) or name, 1, 32, 0, 1024),
        unload_module=lambda module: None,
    )
    triton.runtime.driver.set_active(gpu)
    configs.gpu_name = lambda device: "NVIDIA H200"
    x, weight = torch.empty(4, 96), torch.empty(96)

    def launches() -> None:
        for _ in range(2):
            norms.rms_norm(x, weight, 1e-6)
            norms.attention_residual(x, x, [weight] * 4, 1e-6, float8=True)
            _wrong_kernel[(1,)](x)

    compile_together(launches)
    try:
        _wrong_kernel[(1,)](x)
        message = ""
    except triton.CompilationError as error:
        message = str(error)
    kernels = (norms._rms_norm_kernel, norms._attention_residual_kernel, _wrong_kernel)
    cached = [cached_kernels(kernel) for kernel in kernels]
    print(json.dumps({"cached": cached, "error": message, "loaded": sorted(loaded)}))


if __name__ == "__main__":
    main()
