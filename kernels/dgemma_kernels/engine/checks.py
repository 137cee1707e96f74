"""Checks of what `accelerate` can run: its options, the model and the machine."""

import torch
import triton

from dgemma.model.diffusion import DiffusionGemma
from dgemma.train.lora import is_adapted
from dgemma_kernels.formats import ENCODERS


def check_weights(weights: str, *, release: bool) -> None:
    """Raise for a format of the experts that is unknown, or from which nothing can be released."""
    if weights not in ENCODERS:
        raise ValueError(f"accelerate weights must be one of {', '.join(ENCODERS)}, got {weights!r}.")
    if weights == "bf16" and release:
        raise ValueError('accelerate release must be False for weights="bf16", which are the model\'s own.')


def check_model(model: DiffusionGemma) -> None:
    """Raise for a model that the kernels cannot run."""
    config = model.config
    for name in ("head_dim", "global_head_dim"):
        size = getattr(config, name)
        if size < 16 or size & (size - 1):
            raise ValueError(f"ModelConfig.{name} must be a power of two >= 16 for the kernels, got {size}.")
    if config.num_experts > 256:
        raise ValueError(f"ModelConfig.num_experts must be at most 256 for the kernels, got {config.num_experts}.")
    if config.noise_conditioning:
        raise ValueError(
            "ModelConfig.noise_conditioning must be False for the kernels, got True. Use the model itself."
        )
    if is_adapted(model):
        raise ValueError("accelerate model must have its adapters merged. Call dgemma.train.merge_lora(model) first.")


def require_gpu(model: DiffusionGemma, *, float8: bool) -> None:
    """Raise if the model is on a device that cannot run the kernels, or its float8 products."""
    if model.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(
            f"accelerate needs the model on a CUDA GPU, got {model.device}. Move it there, or use the model itself, "
            "which runs anywhere."
        )
    if float8 and model.device.type == "cuda":
        capability = torch.cuda.get_device_capability(model.device)
        if capability < (8, 9):
            raise ValueError(
                "accelerate float8 products need a GPU of compute capability 8.9 or higher, got "
                f'{capability[0]}.{capability[1]}. Use weights="bf16" and precision="exact".'
            )
