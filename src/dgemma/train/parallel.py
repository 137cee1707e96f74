"""What the training loop asks of the machines it runs on; here one process, in `distributed.py` many.

The loop knows no more about parallelism than this class. Its contract, for whoever derives from it:

- Every process runs the same loop over its own `rows` of the global batch; nothing else differs between them.
- A loss is this process's *part* of the global one, so gradients are **summed** over processes, never averaged.
- State is a flat dictionary of named tensors (`model.…`, `optimizer.…`, `ema.…`), which may be DTensors. `save` and
  `load` are called by all processes with the same names; what N processes save, M can load.
- The loop makes folders, renames them and writes text on the main process alone, between two barriers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dgemma.checkpoint.weights import write_tensors
from dgemma.train.lora import is_adapted, save_lora

Model = TypeVar("Model", bound=nn.Module)
Result = TypeVar("Result")

STATE_FILE = "state.safetensors"
ADAPTERS_FILE = "adapters.safetensors"


def require_shapes(state: Mapping[str, Tensor], stored: Mapping[str, Sequence[int]]) -> None:
    """ValueError where a tensor has another shape than the one stored under its name."""
    for name, tensor in state.items():
        if tuple(stored[name]) != tuple(tensor.shape):
            raise ValueError(f"{name} has shape {tuple(stored[name])}, the model's is {tuple(tensor.shape)}")


class Parallel:
    """One process with the whole model: the default of `train`."""

    rank = 0
    world_size = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def prepare(self, model: Model, *, mixed: bool) -> Model:
        """The model as this process trains it, its parameters' names unchanged. Called once, before the optimizer is
        made and before layers are compiled.

        mixed: float32 weights computed with in bfloat16. The loop's autocast does that for weights that are whole; who
        shards them may do it while gathering.
        """
        return model

    def rows(self, batch_size: int) -> range:
        """This process's share of the global batch's rows.

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
        """The sum of a tensor over all processes, on each of them."""
        return tensor

    def agree(self, flag: bool) -> bool:
        """Whether any process raised its flag; asked after every step."""
        return flag

    def barrier(self) -> None:
        """Wait for all processes."""

    def collect(self, named: Mapping[str, Result]) -> dict[str, Result]:
        """What all processes name, together, on each of them; names differ between processes."""
        return dict(named)

    def forward(self, model: nn.Module, run: Callable[[], Result]) -> Result:
        """Run one micro-batch's objective, which calls the model's methods and reads its weights as it likes; between
        two such runs the weights may be spread over processes.

        Example: `terms = parallel.forward(model, lambda: objective(model, batch, seeds=seeds))`.
        """
        return run()

    def before_backward(self, model: nn.Module, *, last: bool) -> None:
        """Told before the backward of each micro-batch; only after the `last` are gradients needed whole."""

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Scale the gradients down to a joint norm of at most `max_norm`; the norm they had, () on the device."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def save(self, folder: Path, state: Mapping[str, Tensor]) -> list[Path]:
        """Write named tensors into an existing, empty folder; the files that this process wrote."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        write_tensors(folder / STATE_FILE, tensors)
        return [folder / STATE_FILE]

    def names(self, folder: Path) -> set[str]:
        """The tensors that `save` wrote there; ValueError where the files are not whole."""
        if not (folder / STATE_FILE).exists():  # many processes wrote it, or nobody
            from dgemma.train.sharded_state import sharded_names

            return sharded_names(folder)
        try:
            with safe_open(str(folder / STATE_FILE), framework="pt") as file:
                return set(file.keys())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder / STATE_FILE} cannot be read ({error})") from error

    def load(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Overwrite these tensors, in place, with what was saved under their names; ValueError, and none of them is
        touched, where a shape differs. Other names stay unread."""
        if not (folder / STATE_FILE).exists():
            from dgemma.train.sharded_state import load_sharded

            load_sharded(folder, state)
            return
        with safe_open(str(folder / STATE_FILE), framework="pt") as file, torch.no_grad():
            require_shapes(state, {name: file.get_slice(name).get_shape() for name in state})
            for name, tensor in state.items():
                tensor.copy_(file.get_tensor(name))

    def save_pretrained(self, model: nn.Module, folder: Path) -> None:
        """Write the whole model with its own `save_pretrained`, once; of an adapted one the adapters."""
        if is_adapted(model):
            folder.mkdir(exist_ok=True)
            save_lora(model, folder / ADAPTERS_FILE)  # type: ignore[arg-type]
        else:
            model.save_pretrained(folder)  # type: ignore[operator]
