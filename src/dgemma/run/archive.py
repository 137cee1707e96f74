"""Saving and loading of nested values and tensors in one safetensors file, without pickle.

Classes are stored as names and fields, booleans as bits.
"""

import json
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dgemma import values
from dgemma.checkpoint.weights import write_tensors

_HEADER = "dgemma"  # the metadata entry that holds everything but the tensors


def save(path: str | Path, content: Mapping[str, Any], *, kind: str) -> None:
    """Write `content` to `path` atomically: an interrupted save leaves the old file.

    content: nested values, as `dgemma.values.describe_value` takes them. A tensor is named by its path in `content`.

    Example: `save("run.safetensors", {"noise": UniformNoise(512), "seeds": torch.arange(2)}, kind="trajectory")`.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: its folder does not exist. Create {path.parent} first.")
    tensors: dict[str, Tensor] = {}
    header = {"kind": kind, "content": values.describe_value(dict(content), tensors)}
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex}.new")
    try:
        write_tensors(new, tensors, metadata={_HEADER: json.dumps(header)})
        with new.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def load(path: str | Path, *, kind: str, classes: Iterable[type] = ()) -> dict[str, Any]:
    """Read a file that `save` wrote. `dgemma.values.rebuild_value` lists the classes that can be built.

    Example: `load("run.safetensors", kind="trajectory")["noise"]`.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist. Save a {kind} there first.")
    try:
        with safe_open(str(path), framework="pt") as file:
            header = json.loads((file.metadata() or {})[_HEADER])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        found = header["kind"]
        content = values.rebuild_value(header["content"], tensors, classes)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a complete {kind} file of this version of dgemma: {error}.") from error
    if found != kind:
        raise ValueError(f"{path} must be a {kind} file, got a {found} file.")
    return content
