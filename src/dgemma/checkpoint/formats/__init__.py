"""Storage formats of published checkpoints: one file per family turns tensors in files into weights."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dgemma.checkpoint.formats import compressed_tensors, gptq, mlx, modelopt
from dgemma.checkpoint.formats.entry import FLOATS, Contents, Stored, plain_entry
from dgemma.checkpoint.names import VISION, our_names
from dgemma.model.config import read_published
from dgemma.model.memory import MemoryReport, summarize

_READERS = {
    "compressed-tensors": compressed_tensors.read_compressed,
    "modelopt": modelopt.read_modelopt,
    "gptq": gptq.read_gptq,
    "auto-round": gptq.read_gptq,
    "intel/auto-round": gptq.read_gptq,
}


def read_contents(folder: Path, published: Mapping[str, Any], stored: Mapping[str, Stored]) -> Contents:
    """Return the weights of a checkpoint by published name, from its config and headers. No weight is read.

    An unknown `quant_method`, or a setting that dgemma cannot run, is a ValueError.

    Example: `read_contents(folder, read_published(folder, "config.json"), read_headers(folder)).entries`.
    """
    config = published.get("quantization_config")
    if config is None and (folder / "hf_quant_config.json").is_file():
        config = {"quant_method": "modelopt", **read_published(folder, "hf_quant_config.json")}
    if "quantization" in published and (config is None or "quant_method" not in config):
        return mlx.read_mlx(_as_settings(published["quantization"]), stored)
    if config is None:
        return Contents(entries={name: plain_entry(name, tensor) for name, tensor in stored.items()})
    method = _as_settings(config).get("quant_method")
    if method not in _READERS:
        known = ", ".join(_READERS)
        raise ValueError(
            f"quantization_config.quant_method must be one of {known}, or absent for MLX, got {method!r}. "
            "Load a checkpoint in one of these formats."
        )
    return _READERS[method](config, stored)


def _as_settings(config: Any) -> Mapping[str, Any]:
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config must be a dictionary, got {config!r}. Download config.json again.")
    return config


def report_files(contents: Contents, stored: Mapping[str, Stored]) -> MemoryReport:
    """Return the format and the bytes of each part of a checkpoint's text weights.

    Example: `print(report_files(contents, read_headers(folder)))`.
    """
    weights = [
        (
            our_names(name)[0],
            str(FLOATS.get(entry.format, entry.format)).removeprefix("torch."),
            math.prod(entry.shape),
            sum(stored[tensor].num_bytes for tensor in entry.tensors.values()),
        )
        for name, entry in contents.entries.items()
        if not VISION.match(name)
    ]
    return summarize(weights)
