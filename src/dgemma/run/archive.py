"""Saving and loading of nested values and tensors in one safetensors file, without pickle.

Classes are stored as names and fields, booleans as bits.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dgemma.checks import show
from dgemma.files import open_tensors, parse_json, write_tensors
from dgemma.values import describe_value, rebuild_value

_HEADER = "dgemma"  # the metadata entry that holds everything but the tensors


def save(path: str | Path, content: Mapping[str, Any], *, kind: str) -> None:
    """Write `content` to `path` atomically: an interrupted save leaves the old file.

    content: nested values, as `dgemma.values.describe_value` takes them. A tensor is named by its path in `content`.

    Example: `save("run.safetensors", {"noise": UniformNoise(512), "seeds": torch.arange(2)}, kind="trajectory")`.
    """
    tensors: dict[str, Tensor] = {}
    header = {"kind": kind, "content": describe_value(dict(content), tensors)}
    write_tensors(path, tensors, metadata={_HEADER: json.dumps(header)})


def load(path: str | Path, *, kind: str, classes: Iterable[type] = ()) -> dict[str, Any]:
    """Read a file that `save` wrote. `dgemma.values.rebuild_value` lists the classes that can be built.

    Example: `load("run.safetensors", kind="trajectory")["noise"]`.
    """
    with open_tensors(path) as file:
        metadata = file.metadata() or {}
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    if _HEADER not in metadata:
        raise ValueError(f"{path} must be a {kind} file of dgemma, got another safetensors file.")
    header = parse_json(metadata[_HEADER], f"the header of {path}")
    if header.get("kind") != kind:
        raise ValueError(f"{path} must be a {kind} file, got {show(header.get('kind'))}.")
    try:
        content = rebuild_value(header.get("content"), tensors, classes)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a complete {kind} file of this version of dgemma: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a complete {kind} file of this version of dgemma.")
    return content
