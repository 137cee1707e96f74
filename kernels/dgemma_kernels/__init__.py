"""Triton kernels of the denoising step, for inference, and the engine that runs them in CUDA graphs."""

try:
    import triton
except ModuleNotFoundError as error:
    raise ImportError(
        "dgemma_kernels needs Triton, which is not installed: pip install 'dgemma[kernels]', or use dgemma itself, "
        "which needs neither Triton nor a GPU."
    ) from error

from dgemma_kernels.engine import interpreter
from dgemma_kernels.engine.denoiser import FusedDenoiser, accelerate

if triton.knobs.runtime.interpret:  # these replace private functions of Triton that only its interpreter uses
    interpreter.accept_new_numpy()
    interpreter.round_float8()

__all__ = ["FusedDenoiser", "accelerate"]
