"""Named tensors, whole or spread over processes, in a folder: `torch.distributed.checkpoint`.

What N processes wrote M can read, with other meshes and placements, and so can one process without a process group.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from dgemma.train.parallel import require_shapes

_METADATA_FILE = ".metadata"


def save_sharded(folder: Path, state: Mapping[str, Tensor]) -> list[Path]:
    """Each process writes its part of the DTensors; the other tensors, alike on all, are written once.

    Returns the files that this process wrote: `__RANK_NUMBER.distcp`, and on the first the table of contents.
    """
    tensors = {name: tensor.detach() for name, tensor in state.items()}
    with _ordinary_errors():
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder))
    rank = dist.get_rank()
    return [*folder.glob(f"__{rank}_*.distcp"), *([folder / _METADATA_FILE] if rank == 0 else [])]


def sharded_names(folder: Path) -> set[str]:
    """The tensors in the folder; ValueError where its table of contents cannot be read."""
    return set(_sizes(folder))


def load_sharded(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Overwrite these tensors, in place, each process its own part."""
    require_shapes(state, _sizes(folder))
    tensors = {name: tensor.detach() for name, tensor in state.items()}
    with _ordinary_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")  # so be it
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder))


def load_parts(file: Path, state: Mapping[str, Tensor]) -> None:
    """The same from a safetensors file of whole tensors, of which each process reads its part."""
    with safe_open(str(file), framework="pt") as stored, torch.no_grad():
        require_shapes(state, {name: stored.get_slice(name).get_shape() for name in state})
        for name, tensor in state.items():
            whole = stored.get_slice(name)
            if not isinstance(tensor, DTensor):
                tensor.copy_(stored.get_tensor(name))
                continue
            for chunk in tensor.__create_chunk_list__():  # one, or none where there were fewer rows than processes
                where = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
                tensor.to_local().copy_(whole[where])


def _sizes(folder: Path) -> dict[str, torch.Size]:
    try:
        contents = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # a damaged pickle fails in many ways
        raise ValueError(f"{folder / _METADATA_FILE} cannot be read ({error})") from error
    return {name: entry.size for name, entry in contents.items() if isinstance(entry, TensorStorageMetadata)}


@contextmanager
def _ordinary_errors() -> Iterator[None]:
    """torch's CheckpointException is no Exception, so nobody catches it; it says what went wrong on which process."""
    try:
        yield
    except dcp.CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        raise OSError(f"process {rank} could not read or write its files ({first})") from error
