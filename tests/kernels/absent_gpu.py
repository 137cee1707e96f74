"""A driver for compilation without a GPU."""

from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget


def absent_gpu() -> SimpleNamespace:
    """Return the parts of the driver of a Hopper GPU that Triton needs to compile a launch.

    Example: `triton.runtime.driver.set_active(absent_gpu())`.
    """
    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
    )
