"""A driver for compilation without a GPU."""

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class AbsentGPU(DriverBase):
    """The parts of the driver of a Hopper GPU that Triton needs to compile a launch.

    Example: `triton.runtime.driver.set_active(AbsentGPU())`.
    """

    def __init__(self) -> None:
        self.target = GPUTarget("cuda", 90, 32)

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
