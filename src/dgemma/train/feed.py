"""From a source to the device: the next steps' rows are made while this step computes, by a thread or a process.

Python runs one thread at a time, so a thread that calls many small operations holds up the loop, which does so too:
such a source should have a process of its own.
"""

import io
import pickle
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dgemma import draws
from dgemma.train.batch import BatchSource, TrainBatch

_DEPTH = 2  # steps made ahead


class Part(NamedTuple):
    """A micro-batch: some rows of a step, and the seed of each row's noise (B,)."""

    batch: TrainBatch
    seeds: Tensor

    def to(self, device: torch.device) -> "Part":
        return Part(self.batch.to(device), self.seeds.to(device, non_blocking=True))

    def pin_memory(self) -> "Part":
        return Part(self.batch.pin_memory(), self.seeds.pin_memory())


class StepInput(NamedTuple):
    """A step's micro-batches on this process, and how many tokens they hold, padding left out."""

    parts: list[Part]
    num_tokens: int


def row_seeds(seed: int, step: int, rows: range) -> Tensor:
    """A seed for each row (B,) of a step's global batch: a function of the run's seed, the step and the row alone.

    Example: `row_seeds(0, 7, range(4, 8))` is the second half of `row_seeds(0, 7, range(8))`.
    """
    row = torch.arange(rows.start, rows.stop)
    words = draws.philox(
        torch.tensor(seed), row, torch.tensor(step), torch.tensor(0), torch.tensor(draws.purpose_word("row"))
    )
    return (words[0] >> 1 << 32) | words[1]


def feed(
    source: BatchSource,
    *,
    seed: int,
    rows: range,
    micro_batch_size: int,
    steps: range,
    device: torch.device,
    in_process: bool = False,
) -> Generator[StepInput, None, None]:
    """For each of `steps`, this process's `rows` in micro-batches, on `device`.

    in_process: whether they are made by a process of their own, a fork of this one, which cannot use a GPU.
    """

    def make(step: int) -> StepInput:
        parts = []
        for start in range(rows.start, rows.stop, micro_batch_size):
            some = range(start, min(start + micro_batch_size, rows.stop))
            batch = source(step, some)
            if batch.batch_size != len(some):
                raise ValueError(
                    f"train source must give a row for each of rows {some.start}..{some.stop - 1} it is asked for, "
                    f"got {batch.batch_size}."
                )
            parts.append(Part(batch, row_seeds(seed, step, some)))
        return StepInput(parts, sum(int(part.batch.length.sum()) for part in parts))

    by = _by_process if in_process else _by_thread
    for made in by(make, steps, pin=device.type == "cuda"):
        yield StepInput([part.to(device) for part in made.parts], made.num_tokens)


def _by_thread(make: Callable[[int], StepInput], steps: range, *, pin: bool) -> Generator[StepInput, None, None]:
    def make_one(step: int) -> StepInput:
        parts, num_tokens = make(step)
        return StepInput([part.pin_memory() for part in parts] if pin else parts, num_tokens)

    with ThreadPoolExecutor(1, thread_name_prefix="dgemma-feed") as pool:
        ahead = deque(pool.submit(make_one, step) for step in steps[:_DEPTH])
        try:
            for step in steps:
                made = ahead.popleft().result()
                if step + _DEPTH in steps:
                    ahead.append(pool.submit(make_one, step + _DEPTH))
                yield made
        finally:
            pool.shutdown(cancel_futures=True)


def _by_process(make: Callable[[int], StepInput], steps: range, *, pin: bool) -> Generator[StepInput, None, None]:
    packed = DataLoader(
        _Steps(make),
        batch_size=None,
        sampler=steps,
        collate_fn=_pack,
        num_workers=1,
        prefetch_factor=_DEPTH,
        multiprocessing_context="fork",  # sources need not be picklable
        generator=torch.Generator(),  # else the loader draws a seed from the global one
    )
    for one in packed:
        parts, num_tokens = pickle.loads(one)
        yield StepInput([part.pin_memory() for part in parts] if pin else parts, num_tokens)


class _Steps(Dataset[StepInput]):
    def __init__(self, make: Callable[[int], StepInput]) -> None:
        self.make = make

    def __getitem__(self, step: int) -> StepInput:
        return self.make(step)


def _pack(made: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(made)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Tensors as their numbers: torch would share each one's memory over a connection of its own, which is slower."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.numpy(),)) if isinstance(value, Tensor) else NotImplemented
