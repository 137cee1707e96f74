"""From a source to the device: the next steps' rows are made and pinned by a thread while this step computes."""

from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgemma.diffusion import draws
from dgemma.train.batch import BatchSource, TrainBatch

_DEPTH = 2  # steps made ahead


class Part(NamedTuple):
    """A micro-batch: some rows of a step, and the seed of each row's noise (B,)."""

    batch: TrainBatch
    seeds: Tensor

    def to(self, device: torch.device) -> "Part":
        return Part(self.batch.to(device), self.seeds.to(device, non_blocking=True))


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
    source: BatchSource, *, seed: int, rows: range, micro_batch_size: int, steps: range, device: torch.device
) -> Generator[StepInput, None, None]:
    """For each of `steps`, this process's `rows` in micro-batches, on `device`."""

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
            parts.append(_pin(Part(batch, row_seeds(seed, step, some)), device))
        return StepInput(parts, sum(int(part.batch.length.sum()) for part in parts))

    with ThreadPoolExecutor(1, thread_name_prefix="dgemma-feed") as pool:
        ahead = deque(pool.submit(make, step) for step in steps[:_DEPTH])
        try:
            for step in steps:
                made = ahead.popleft().result()
                if step + _DEPTH in steps:
                    ahead.append(pool.submit(make, step + _DEPTH))
                yield StepInput([part.to(device) for part in made.parts], made.num_tokens)
        finally:
            pool.shutdown(cancel_futures=True)


def _pin(part: Part, device: torch.device) -> Part:
    """Page-locked memory, from which a copy to the GPU need not be waited for."""
    if device.type != "cuda":
        return part
    names = [field.name for field in fields(part.batch)]
    on_host = [name for name in names if isinstance(t := getattr(part.batch, name), Tensor) and not t.is_cuda]
    pinned: dict[str, Any] = {name: getattr(part.batch, name).pin_memory() for name in on_host}
    return Part(replace(part.batch, **pinned), part.seeds.pin_memory())
