"""Quantisation of a checkpoint on disk: weights are read and quantised one by one, into compressed-tensors files."""

from collections.abc import Callable
from pathlib import Path

import torch

from dgemma.location import resolve
from dgemma.model.config import read_published
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.gptq import quantize_with_calibration
from dgemma.model.memory import MemoryReport
from dgemma.model.quantize import Quantization


def quantize_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    quantization: Quantization,
    *,
    device: torch.device | str = "cpu",
    run: Callable[[DiffusionGemma], object] | None = None,
) -> MemoryReport:
    """Write a quantised copy of a checkpoint, with its tokenizer, to a folder; return a report of its formats.

    The copy has the layout of the files published for vLLM. `from_pretrained` reads it. The memory of `device` holds
    the quantised weights and one unquantised weight. With `run`, which runs the model on calibration text, it holds
    the unquantised model first (see `quantize_with_calibration`).

    Example: `quantize_checkpoint("google/diffusiongemma-26B-A4B-it", "26b-int4", Quantization(), device="cuda")`.
    """
    folder, target = resolve(checkpoint), Path(out).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"quantize_checkpoint out must be a new or an empty folder, got {target}. Choose another one.")
    dtype = read_published(folder, "config.json").get("dtype")
    if run is None:
        model = DiffusionGemma.from_pretrained(folder, dtype=dtype, device=device, quantization=quantization)
    else:
        # Most CPUs compute bfloat16 slowly.
        is_cpu = torch.device(device).type == "cpu"
        model = DiffusionGemma.from_pretrained(folder, dtype=torch.float32 if is_cpu else dtype, device=device)
        quantize_with_calibration(model, quantization, run)
        model.to(getattr(torch, dtype) if isinstance(dtype, str) else model.dtype)
    model.save_pretrained(target)
    return model.memory_report()
