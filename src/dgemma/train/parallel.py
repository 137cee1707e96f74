"""The contract between the training loop and the machines it runs on: one process here, many in `distributed.py`.

The training loop uses parallelism only through this class. A subclass must follow these rules:

- Every process runs the same loop over its own `rows` of the global batch; nothing else differs between processes.
- A loss is this process's *part* of the global loss, so gradients are **summed** over processes, never averaged.
- State is a flat dictionary of named tensors (`model.…`, `optimizer.…`, `ema.…`), which may be DTensors. All processes
  call `save` with the same names. `state_files.load_state` must be able to read it with any number of processes.
- Only the main process makes folders, renames them and writes text, between two barriers.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from dgemma.train.lora import is_adapted, save_lora
from dgemma.train.state_files import save_whole

Model = TypeVar("Model", bound=nn.Module)
Result = TypeVar("Result")

ADAPTERS_FILE = "adapters.safetensors"


class Parallel:
    """One process with the whole model: the default of `train`."""

    rank = 0
    world_size = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def prepare(self, model: Model, *, mixed: bool) -> Model:
        """Return the model as this process trains it, with the same parameter names.

        Called once, before the optimizer is made and before layers are compiled. mixed: products of
        float32 weights are in bfloat16. The loop's autocast casts whole weights; a subclass that shards them may cast
        while gathering.
        """
        return model

    def rows(self, batch_size: int) -> range:
        """Return this process's share of the rows of the global batch.

        Example: process 1 of 2 has `rows(8) == range(4, 8)`.
        """
        if batch_size % self.world_size:
            raise ValueError(
                f"TrainConfig.batch_size must be a multiple of the {self.world_size} processes, got {batch_size}. "
                f"Use {batch_size // self.world_size * self.world_size or self.world_size}."
            )
        share = batch_size // self.world_size
        return range(self.rank * share, (self.rank + 1) * share)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, on each of them."""
        return tensor

    def agree(self, flag: bool) -> bool:
        """Return True if any process raised its flag; called after every step."""
        return flag

    def barrier(self) -> None:
        """Wait for all processes."""

    def collect(self, named: Mapping[str, Result]) -> dict[str, Result]:
        """Return the entries of all processes, on each of them; names differ between processes."""
        return dict(named)

    def forward(self, model: nn.Module, run: Callable[[], Result]) -> Result:
        """Run the objective of one micro-batch, which may call any method of the model and read its weights.

        Between two such runs the weights may be spread over processes.

        Example: `terms = parallel.forward(model, lambda: objective(model, batch, seeds=seeds))`.
        """
        return run()

    def before_backward(self, model: nn.Module, *, last: bool) -> None:
        """Prepare the backward of a micro-batch; only after the `last` one must gradients be complete."""

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Scale the gradients to a joint norm of at most `max_norm`; return the norm before, () on the device."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def save(self, folder: Path, state: Mapping[str, Tensor]) -> list[Path]:
        """Write named tensors into an existing, empty folder; return the files that this process wrote."""
        return save_whole(folder, state)

    def save_pretrained(self, model: nn.Module, folder: Path) -> None:
        """Write the whole model with its own `save_pretrained`, once. If the model has adapters, write only those."""
        if is_adapted(model):
            folder.mkdir(exist_ok=True)
            save_lora(model, folder / ADAPTERS_FILE)  # type: ignore[arg-type]
        else:
            model.save_pretrained(folder)  # type: ignore[operator]
