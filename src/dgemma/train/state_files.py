"""Files of named tensors in a folder: one safetensors file, or parts that several processes wrote.

Parts are in the format of `torch.distributed.checkpoint`, which is imported where it is used because that takes
seconds. N processes can write a state and M can read it, with other meshes and placements or with no process group.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dgemma.files import write_tensors

STATE_FILE = "state.safetensors"
_METADATA_FILE = ".metadata"


def save_whole(folder: Path, state: Mapping[str, Tensor]) -> list[Path]:
    """Write whole tensors to one file; return its path.

    Example: `save_whole(folder, {"model.norm.weight": weight})`.
    """
    write_tensors(folder / STATE_FILE, state)
    return [folder / STATE_FILE]


def save_sharded(folder: Path, state: Mapping[str, Tensor]) -> list[Path]:
    """Let each process write its part of the DTensors; other tensors, equal on all processes, are written once.

    Returns the files of this process: `__RANK_NUMBER.distcp`, and on the first process the table of contents.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    tensors = {name: tensor.detach() for name, tensor in state.items()}
    with _ordinary_errors():
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder))
    rank = dist.get_rank()
    return [*folder.glob(f"__{rank}_*.distcp"), *([folder / _METADATA_FILE] if rank == 0 else [])]


def stored_names(folder: Path) -> set[str]:
    """Return the names of the tensors in a folder; raise ValueError if its files cannot be read."""
    if not (folder / STATE_FILE).exists():
        return set(_sharded_shapes(folder))
    try:
        with safe_open(str(folder / STATE_FILE), framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder / STATE_FILE} cannot be read ({error})") from error


def load_state(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Overwrite these tensors, in place, with the stored ones; each process reads its own parts.

    Raises ValueError, and changes no tensor, if a shape differs.
    """
    if not (folder / STATE_FILE).exists():
        _load_sharded(folder, state)
        return
    with safe_open(str(folder / STATE_FILE), framework="pt") as file, torch.no_grad():
        _require_shapes(state, {name: file.get_slice(name).get_shape() for name in state})
        for name, tensor in state.items():
            if not hasattr(tensor, "__create_chunk_list__"):
                tensor.copy_(file.get_tensor(name))
                continue
            whole = file.get_slice(name)
            # A DTensor has one chunk here, or none if there were fewer rows than processes.
            for chunk in tensor.__create_chunk_list__():
                where = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
                tensor.to_local().copy_(whole[where])  # type: ignore[attr-defined]


def _load_sharded(folder: Path, state: Mapping[str, Tensor]) -> None:
    import torch.distributed.checkpoint as dcp

    _require_shapes(state, _sharded_shapes(folder))
    tensors = {name: tensor.detach() for name, tensor in state.items()}
    with _ordinary_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder))


def _sharded_shapes(folder: Path) -> dict[str, torch.Size]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        contents = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{folder / _METADATA_FILE} cannot be read ({error})") from error
    return {name: entry.size for name, entry in contents.items() if isinstance(entry, TensorStorageMetadata)}


def _require_shapes(state: Mapping[str, Tensor], stored: Mapping[str, Sequence[int]]) -> None:
    for name, tensor in state.items():
        if tuple(stored[name]) != tuple(tensor.shape):
            raise ValueError(f"{name} has shape {tuple(stored[name])}, the model's is {tuple(tensor.shape)}")


@contextmanager
def _ordinary_errors() -> Iterator[None]:
    """Turn torch's CheckpointException, which `except Exception` misses, into an OSError that names the process."""
    import torch.distributed.checkpoint as dcp

    try:
        yield
    except dcp.CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        raise OSError(f"process {rank} could not read or write its files ({first})") from error
