"""A checkpoint before its weights are read: its configs, and the headers of its files."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dgemma.checkpoint.formats import read_contents
from dgemma.checkpoint.formats.entry import Contents, Stored
from dgemma.checkpoint.formats.gguf import find_gguf, read_gguf
from dgemma.checkpoint.plan import first
from dgemma.checks import require
from dgemma.files import open_tensors
from dgemma.location import CHECKPOINT_FILES, INDEX_FILE, SINGLE_FILE, resolve, stored_folder
from dgemma.model.published import OWN_DEFAULTS, read_published

_CONFIGS = ("config.json", "generation_config.json", "hf_quant_config.json")


class Checkpoint(NamedTuple):
    """A checkpoint before its weights are read."""

    folder: Path
    published: dict[str, Any]  # its config.json
    contents: Contents  # its tensors and weights
    generation: dict[str, Any]  # its generation_config.json, with the defaults that config.json stores


def read_checkpoint(path_or_repo: str | Path, files: Sequence[str] = CHECKPOINT_FILES) -> Checkpoint:
    """Read the configs and the headers of a checkpoint folder, a hub id or a GGUF file. No weight is read.

    If only the config was downloaded, there are no tensors.
    """
    file = find_gguf(path_or_repo)
    if file is not None:
        return Checkpoint(file.parent, *read_gguf(file), generation={})
    folder = resolve(path_or_repo, files)
    published, generation, modelopt = (_read_config(folder, name) for name in _CONFIGS)
    generation |= {name: published[name] for name in OWN_DEFAULTS if published.get(name) is not None}
    if modelopt and published.get("quantization_config") is None:  # older versions of ModelOpt
        published["quantization_config"] = {"quant_method": "modelopt", **modelopt}
    if files != CHECKPOINT_FILES and not any(stored_folder(folder).glob("*.safetensors")):
        return Checkpoint(folder, published, Contents({}), generation)
    return Checkpoint(folder, published, read_contents(published, read_headers(folder)), generation)


def _read_config(folder: Path, name: str) -> dict[str, Any]:
    """Return a JSON file of a checkpoint. Only config.json must exist."""
    return read_published(folder, name) if name == "config.json" or (folder / name).is_file() else {}


def read_headers(folder: Path) -> dict[str, Stored]:
    """Return the header of every tensor of a checkpoint folder, by its published name. No weight is read."""
    folder = stored_folder(folder)
    weight_map = _read_index(folder)
    stored: dict[str, Stored] = {}
    for name in sorted(set(weight_map.values())) or [SINGLE_FILE]:
        file = folder / name
        with open_tensors(file) as tensors:
            for tensor in sorted(tensors.keys()):
                if tensor in stored:
                    raise ValueError(f"{file} repeats {tensor}, which {stored[tensor].file.name} holds too.")
                entry = tensors.get_slice(tensor)
                shape, dtype = tuple(entry.get_shape()), entry.get_dtype()
                bits = re.search(r"\d+", dtype)  # of F32, BF16, U8, F8_E4M3, ...; BOOL has none
                stored[tensor] = Stored(file, shape, dtype, math.prod(shape) * (int(bits[0]) if bits else 8) // 8)
    misplaced = [f"{t} in {f}" for t, f in weight_map.items() if t not in stored or stored[t].file.name != f]
    if misplaced:
        raise ValueError(f"{folder / INDEX_FILE} names tensors that are not there: {', '.join(first(misplaced))}.")
    return stored


def _read_index(folder: Path) -> dict[str, str]:
    """Return the shard of each tensor; empty for a single file, which takes precedence, as in transformers."""
    if (folder / SINGLE_FILE).is_file():
        return {}
    if not (folder / INDEX_FILE).is_file():
        raise FileNotFoundError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}. Only safetensors are read, never pickles."
        )
    weight_map, owner = read_published(folder / INDEX_FILE, INDEX_FILE).get("weight_map"), f"{folder / INDEX_FILE}"
    fits = isinstance(weight_map, dict) and len(weight_map) > 0
    require(fits, owner, "map tensors to files under 'weight_map'", weight_map, "Download it again.")
    assert isinstance(weight_map, dict)
    files = set(map(str, weight_map.values()))
    outside = sorted(file for file in files if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", file))
    require(not outside, owner, "name safetensors files of its own folder", outside)
    absent = sorted(file for file in files if not (folder / file).is_file())
    if absent:
        raise FileNotFoundError(f"{folder} lacks the shards {', '.join(first(absent))}. Download them again.")
    return weight_map
