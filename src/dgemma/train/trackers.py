"""Trackers that show a run while it trains: TensorBoard, Weights & Biases and trackio, next to `log.jsonl`."""

import importlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from dgemma.printing import install_command

Send = Callable[[dict[str, Any], int], object]  # numbers and texts by name, and their step


@contextmanager
def tracking(names: Sequence[str], out: Path, step: int, settings: Mapping[str, Any]) -> Iterator[Callable[..., None]]:
    """Yield a function that sends a line of the log to the trackers. The run continues after `step`."""
    with ExitStack() as stack:
        trackers = [stack.enter_context(TRACKERS[name](out.resolve(), step, settings)) for name in names]

        def send(line: Mapping[str, Any]) -> None:
            values = {name: value for name, value in line.items() if isinstance(value, int | float | str)}
            del values["step"]
            for tracker in trackers:
                tracker(values, line["step"])

        yield send


@contextmanager
def _tensorboard(out: Path, step: int, settings: Mapping[str, Any]) -> Iterator[Send]:
    # A resumed run repeats the steps after its last checkpoint. TensorBoard hides what they sent before.
    with _import("torch.utils.tensorboard").SummaryWriter(out / "tensorboard", purge_step=step + 1) as writer:

        def send(values: dict[str, Any], at: int) -> None:
            for name, value in values.items():
                (writer.add_text if isinstance(value, str) else writer.add_scalar)(name, value, at)

        yield send


@contextmanager
def _of_module(module: str, out: Path, step: int, settings: Mapping[str, Any]) -> Iterator[Send]:
    """Open a run of Weights & Biases, or of trackio, which has the same functions. The folder identifies the run."""
    name = f"{out.name}-{zlib.crc32(str(out).encode()):08x}"
    own = {"id": name, "dir": out} if module == "wandb" else {}
    run = _import(module).init(project="dgemma", name=name, config=dict(settings), resume="allow", **own)
    try:
        yield lambda values, at: run.log(values, step=at)
    except BaseException:
        run.finish(**({"exit_code": 1} if module == "wandb" else {}))  # so the run does not look finished
        raise
    run.finish()


TRACKERS: dict[str, Callable[..., AbstractContextManager[Send]]] = {
    "tensorboard": _tensorboard,
    "wandb": partial(_of_module, "wandb"),
    "trackio": partial(_of_module, "trackio"),
}


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"train trackers: {error}. The extra has all three: {install_command('track')}") from None
