"""The contract between the training loop and its processes, and the files of tensors that these write.

This file has the code for one process, `distributed.py` the code for many. The rules of a subclass of `Parallel`:

- Every process runs the same loop over its own `rows` of the global batch; nothing else differs between processes.
- A loss is this process's *part* of the global loss, so gradients are **summed** over processes, never averaged.
- State is a flat dictionary of named tensors, which may be DTensors. All processes save the same names.
- Only the main process makes folders, renames them and writes text, between two barriers.

Each process writes its parts of a state to one safetensors file. N processes can write a state and M can read it.
Nothing is unpickled: the place of each part in its tensor is JSON in the file's metadata.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from dgemma.checks import require, show
from dgemma.files import open_tensors, parse_json, write_tensors
from dgemma.train.adapter_files import save_lora
from dgemma.train.lora import is_adapted

Model = TypeVar("Model", bound=nn.Module)
Result = TypeVar("Result")

ADAPTERS = "adapters"  # a folder in that of the result
_PARTS = "parts"  # the metadata entry with the place of each part


class Parallel:
    """One process with the whole model: the default of `train`."""

    rank = 0
    world_size = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def prepare(self, model: Model, *, mixed: bool) -> Model:
        """Return the model as this process trains it, with the same parameter names. Called once, before all else.

        mixed: products of float32 weights are in bfloat16, by autocast, or cast while shards are gathered.
        """
        return model

    def rows(self, batch_size: int) -> range:
        """Return this process's share of the rows of the global batch."""
        share, rest = divmod(batch_size, self.world_size)
        rule = f"be a multiple of the {self.world_size} processes"
        require(not rest, "TrainConfig.batch_size", rule, batch_size, f"Use {(share or 1) * self.world_size}.")
        return range(self.rank * share, (self.rank + 1) * share)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, on each of them."""
        return tensor

    def any(self, flag: bool) -> bool:
        """Return True on all processes if any of them raised its flag; called after every step."""
        return flag

    def barrier(self) -> None:
        """Wait for all processes."""

    def collect(self, named: Mapping[str, Result]) -> dict[str, Result]:
        """Return the entries of all processes, on each of them; names differ between processes."""
        return dict(named)

    def forward(self, model: nn.Module, run: Callable[[], Result]) -> Result:
        """Run a function that needs whole weights; between two runs they may be spread over processes."""
        return run()

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Scale the gradients to a joint norm of at most `max_norm`; return the norm before scaling, shape ()."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def save_pretrained(self, model: nn.Module, folder: Path) -> None:
        """Write the whole model with its own `save_pretrained`, once. If the model has adapters, write only those."""
        if is_adapted(model):
            save_lora(model, folder / ADAPTERS)  # type: ignore[arg-type]
        else:
            model.save_pretrained(folder)  # type: ignore[operator]


class TensorPart(NamedTuple):
    """A block of a tensor in one file: the tensor's shape, the first index of the block, and the block's shape."""

    file: Path
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def save_parts(folder: Path, state: Mapping[str, Tensor], *, rank: int, world_size: int) -> Path:
    """Write the parts of DTensors that no earlier process holds, and in the first process all other tensors."""
    tensors: dict[str, Tensor] = {}
    places: dict[str, dict[str, list[int]]] = {}
    for name, tensor in state.items():
        tensor = tensor.detach()
        if not hasattr(tensor, "__create_chunk_list__"):
            if rank == 0:
                tensors[name] = tensor
        elif _is_first_copy(tensor):
            for chunk in tensor.__create_chunk_list__():  # one, or none if there were fewer rows than processes
                tensors[name] = tensor.to_local()  # type: ignore[attr-defined]
                places[name] = {"whole": list(tensor.shape), "offset": list(chunk.offsets)}
    path = folder / _part_name(rank, world_size)
    write_tensors(path, tensors, metadata={_PARTS: json.dumps(places)})
    return path


def _part_name(rank: int, world_size: int) -> str:
    return f"state-{rank:05d}-of-{world_size:05d}.safetensors"


def stored_names(folder: Path) -> set[str]:
    """Return the names of the tensors in a folder; raise ValueError if its files cannot be read."""
    return set(_read_parts(folder))


def load_state(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Overwrite these tensors with the stored ones, or raise ValueError and change none if a shape or dtype differs."""
    stored = _read_parts(folder)
    for name, tensor in state.items():
        first = stored[name][0]
        if first.whole != tuple(tensor.shape):
            raise ValueError(f"{name} has shape {first.whole}, the model's is {tuple(tensor.shape)}")
        if first.dtype != tensor.dtype:
            raise ValueError(f"{name} has dtype {first.dtype}, the model's is {tensor.dtype}")
    wanted = [(name, part) for name in state for part in stored[name]]
    for path in sorted({part.file for _, part in wanted}):
        with open_tensors(path) as file, torch.no_grad():
            for name, part in wanted:
                for offset, target in _local_parts(state[name]) if part.file == path else ():
                    _copy(file, name, part, offset, target)


def _read_parts(folder: Path) -> dict[str, list[TensorPart]]:
    """Return the parts of every stored tensor, after checking that they fill it."""
    paths = sorted(folder.glob("state-*.safetensors"))
    if not paths or [path.name for path in paths] != [_part_name(rank, len(paths)) for rank in range(len(paths))]:
        raise ValueError("the file of some process is missing")
    stored: dict[str, list[TensorPart]] = {}
    for path in paths:
        with open_tensors(path) as file:
            places = parse_json((file.metadata() or {}).get(_PARTS, "{}"), f"the places of parts in {path.name}")
            for name in file.keys():  # noqa: SIM118 (no mapping)
                stored.setdefault(name, []).append(_read_part(path, file, name, places.get(name)))
    for name, parts in stored.items():
        size = sum(math.prod(part.shape) for part in parts)
        if len({(part.whole, part.dtype) for part in parts}) > 1 or size != math.prod(parts[0].whole):
            raise ValueError(f"the parts of {name} do not fill it")
    return stored


def _read_part(path: Path, file: Any, name: str, place: Any) -> TensorPart:
    entry = file.get_slice(name)
    shape = tuple(entry.get_shape())
    dtype = entry[:0].dtype if shape else file.get_tensor(name).dtype
    place = {"whole": shape, "offset": [0] * len(shape)} if place is None else place  # the whole tensor
    try:
        whole, offset = (tuple(map(index, place[key])) for key in ("whole", "offset"))
        fits = all(o >= 0 and o + s <= w for w, o, s in zip(whole, offset, shape, strict=True))
    except (TypeError, KeyError, ValueError):
        fits = False
    if not fits:
        raise ValueError(f"the place of {name} in {path.name} cannot be {show(place)}")
    return TensorPart(path, whole, offset, shape, dtype)


def _local_parts(tensor: Tensor) -> list[tuple[Sequence[int], Tensor]]:
    """Return the parts of a tensor on this process, each with the index of its first element."""
    if not hasattr(tensor, "__create_chunk_list__"):
        return [((0,) * tensor.dim(), tensor.detach())]
    # A DTensor has one chunk here, or none if there were fewer rows than processes.
    return [(tuple(chunk.offsets), tensor.to_local()) for chunk in tensor.__create_chunk_list__()]  # type: ignore[attr-defined]


def _copy(file: Any, name: str, part: TensorPart, offset: Sequence[int], target: Tensor) -> None:
    """Copy the elements that a stored part and a part of this process share."""
    if part.shape == part.whole == tuple(target.shape):
        target.copy_(file.get_tensor(name))
        return
    first = [max(a, b) for a, b in zip(part.offset, offset, strict=True)]
    last = [min(a + n, b + m) for a, n, b, m in zip(part.offset, part.shape, offset, target.shape, strict=True)]
    if all(a < b for a, b in zip(first, last, strict=True)):
        there = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, part.offset, strict=True))
        here = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, offset, strict=True))
        target[here].copy_(file.get_slice(name)[there])


def _is_first_copy(tensor: Any) -> bool:
    """Return True unless another process earlier in the mesh holds the same part of a DTensor."""
    copies = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return all(index == 0 for index, placement in copies if placement.is_replicate())
