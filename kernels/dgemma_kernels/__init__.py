"""Triton kernels, and two doors: `accelerate` for inference, `accelerate_training` for training."""

import importlib
from typing import TYPE_CHECKING, Any

from dgemma.printing import install_command

try:
    import triton
except ModuleNotFoundError as error:
    raise ImportError(
        f"dgemma_kernels needs Triton, which is not installed: {install_command('kernels')}, or use dgemma itself, "
        "which needs neither Triton nor a GPU."
    ) from error

from dgemma_kernels import interpreter

if triton.knobs.runtime.interpret:  # these replace private functions of Triton that only its interpreter uses
    interpreter.accept_new_numpy()
    interpreter.round_float8()

__all__ = ["FusedDenoiser", "accelerate", "accelerate_training"]

if TYPE_CHECKING:
    from dgemma_kernels.engine.denoiser import FusedDenoiser, accelerate
    from dgemma_kernels.training.door import accelerate_training
else:

    def __getattr__(name: str) -> Any:
        """Import a door on first use: inference need not load training, nor kernels the model."""
        if name in ("engine", "formats", "ops", "training"):
            return importlib.import_module(f"dgemma_kernels.{name}")
        if name not in __all__:
            raise AttributeError(f"module 'dgemma_kernels' has no attribute {name!r}")
        if name == "accelerate_training":
            return importlib.import_module("dgemma_kernels.training.door").accelerate_training
        return getattr(importlib.import_module("dgemma_kernels.engine.denoiser"), name)

    def __dir__() -> list[str]:
        return __all__
