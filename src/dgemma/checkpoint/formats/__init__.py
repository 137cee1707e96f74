"""Storage formats of published checkpoints: one file per family turns tensors in files into weights."""

import math
from collections.abc import Mapping
from typing import Any

from dgemma.checkpoint.formats import compressed_tensors, gptq, mlx, modelopt
from dgemma.checkpoint.formats.entry import FLOATS, Contents, Settings, Stored
from dgemma.checkpoint.names import AUDIO, our_names
from dgemma.quantization.memory import MemoryReport, summarize

_READERS = {
    "compressed-tensors": compressed_tensors.read_compressed,
    "modelopt": modelopt.read_modelopt,
    "gptq": gptq.read_gptq,
    "auto-round": gptq.read_gptq,
    "intel/auto-round": gptq.read_gptq,
}


def read_contents(published: Mapping[str, Any], stored: Mapping[str, Stored]) -> Contents:
    """Return the weights of a checkpoint by published name, from its config and headers. No weight is read.

    An unknown `quant_method`, or a setting that dgemma cannot run, is a ValueError.
    """
    config = Settings({} if published.get("quantization_config") is None else published["quantization_config"])
    if published.get("quantization") is not None and "quant_method" not in config:
        return mlx.read_mlx(Settings(published["quantization"], "quantization"), stored)
    if published.get("quantization_config") is not None:
        return _READERS[config.choose("quant_method", *_READERS)](config, stored)
    contents = Contents(stored)
    for name in stored:
        contents.add_plain(name, name)
    return contents


def report_files(contents: Contents) -> MemoryReport:
    """Return the format and the bytes of each part of a checkpoint's weights."""
    weights = [
        (
            our_names(name)[0],
            str(FLOATS.get(entry.format, entry.format)).removeprefix("torch."),
            math.prod(entry.shape),
            sum(contents.stored[tensor].num_bytes for tensor in entry.tensors.values()),
        )
        for name, entry in contents.entries.items()
        if not AUDIO.match(name)
    ]
    return summarize(weights)
