"""Canvases that are denoised together: the one place that takes steps and waits for their verdict.

Every form of a run uses it: `denoise_canvas` for rows that start together, `Batch` for rows at their own canvases.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from dgemma.diffusion.prediction import refuse_nan
from dgemma.diffusion.state import DenoiseState, watch
from dgemma.model.cache import Cache
from dgemma.model.denoiser import Denoiser
from dgemma.run.changes import Changes, apply_changes
from dgemma.run.knobs import Knobs
from dgemma.run.records import StepRecord
from dgemma.run.step import judge, step


@dataclass
class Denoising:
    """The state of some rows, their cache, and the knobs of their next step."""

    model: Denoiser
    state: DenoiseState
    cache: Cache
    knobs: Knobs
    _record: StepRecord = field(init=False, repr=False)  # of the last step
    # Whether the caller has written into tensors of the state since the last step: the step's verdict is then stale.
    _is_edited: Callable[[], bool] = field(init=False, repr=False)

    def take_step(self) -> StepRecord:
        """Take a step without waiting for the device: `step`, or the engine's own."""
        take = self.model.step or partial(step, self.model)
        self.state, self._record = take(self.state, cache=self.cache, knobs=self.knobs)
        state = self.state
        self._is_edited = watch(state.done, state.step, state.num_steps, state.canvas)
        return self._record

    def finish_step(self, changes: Changes = None, *, expects_more: bool = True) -> list[int]:
        """Apply changes, wait for the device, and return the steps that each row has left, 0 if it is done.

        expects_more: True if another step is likely, see `Denoiser.read_ahead`.
        """
        record = self._record
        is_stale = changes is not None or self._is_edited()
        self.state, self.knobs = apply_changes(changes, self.state, self.knobs)
        verdict = judge(record.prediction, self.state) if is_stale else record.verdict
        # The host waits for the device here.
        steps_left, broken, stray = self.model.read_ahead(verdict) if expects_more else verdict.tolist()
        if any(broken) or any(stray):
            _refuse_step(record, broken, stray)
        return steps_left

    def select(self, places: list[int]) -> "Denoising":
        """The canvases at some places."""
        rows = self.index(places)
        return replace(self, state=self.state.select(rows), cache=self.cache.select(rows))

    def splice(self, places: list[int], donor: "Denoising") -> None:
        """Replace the canvases at some places by those of a donor."""
        rows = self.index(places)
        self.state = self.state.splice(rows, donor.state)
        self.cache.splice(rows, donor.cache)

    def index(self, places: list[int]) -> Tensor:
        """The places as a tensor on the device, (n,) int64."""
        return torch.tensor(places, dtype=torch.int64, device=self.state.device)


def _refuse_step(record: StepRecord, broken: list[int], stray: list[int]) -> NoReturn:
    """Raise for NaN or for ids outside the vocabulary. The message names the block, step, row and cause."""
    row = (broken if any(broken) else stray).index(1)
    where = f"at block {int(record.block[row])}, step {int(record.step[row])}, row {int(record.rows[row])}"
    if any(broken):
        refuse_nan(where)
    canvas, vocab_size = record.state.canvas[row], record.state.noise.vocab_size
    by_callback = not record.verdict[2, row]  # the step itself wrote only tokens of the vocabulary
    writer = "A change between two steps" if by_callback else type(record.knobs.sampler).__name__
    got = f"got {int(canvas.min())}..{int(canvas.max())} {where}"
    raise ValueError(f"{writer} must write tokens in [0, {vocab_size}), {got}. Take them from the prediction.")
