"""The state of a canvas during denoising. A step is a pure function of it.

Read it, change a field with `dataclasses.replace`, splice rows of one state into another, or save it. Its fields are
tensors or hold tensors, except the noise process: a frozen value that never changes within a canvas.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dgemma.checks import require, short_repr
from dgemma.diffusion import draws
from dgemma.diffusion.noise import Noise
from dgemma.diffusion.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class DenoiseState:
    """One batch of canvases in the middle of denoising. B rows, C positions.

    `open` marks positions that are still undecided. A permanently committed position is no longer open.
    A sampler that decides everything again at each step, like the published one, keeps all unfrozen positions open.
    `start_state` sets it, `settle` updates it, and `list_changes` computes it for a changed `canvas` or `frozen`.
    `frozen` positions never change. `noise_level` is 1 - α of the schedule before the step, `next_noise_level` after
    it. Some samplers keep a clock of their own: `sampler.noise_level(state)` is the level of the canvas.

    A step changes canvas, open, draft, done, self_cond, both memories, step, both noise levels and temperature. It
    copies every other field, including those of a subclass.

    Rules for all fields, also those of a subclass: a tensor in a field without a default keeps its dtype and shape.
    The metadata "shared" marks a field that is not simply one entry per row: `select` and `splice` treat it by name.
    The metadata "constant" marks a field that no callback may change. A subclass may define its own `draw` or `uniform`
    in pure tensor code.

    Example: `replace(state, frozen=state.frozen | certain)`.
    """

    canvas: Tensor  # (B, C) int64
    open: Tensor  # (B, C) bool
    frozen: Tensor  # (B, C) bool
    draft: Tensor  # (B, C) int64: the tokens to commit if the canvas ended now
    done: Tensor  # (B,) bool
    block: Tensor  # (B,) int64
    step: Tensor  # (B,) int64, counted up from 0
    num_steps: Tensor  # (B,) int64, the cap
    noise_level: Tensor  # (B,) float64
    next_noise_level: Tensor  # (B,) float64
    temperature: Tensor  # (B,) float32
    seeds: Tensor  # (B,) int64
    rows: Tensor = field(metadata={"constant": True})  # (B,) int64: row numbers in the whole batch
    noise: Noise = field(metadata={"constant": True, "shared": True})
    awaited: Tensor | None = None  # (B, C) bool: the canvas may end once these positions are finished; None means all
    # (B or 1, C or 1, V) bool: `noise.proposable`, so never the mask token; None allows everything
    allowed: Tensor | None = field(default=None, metadata={"shared": True})
    # a `Language` (see constraints): the texts that the canvas may become; None means all
    language: Any = field(default=None, metadata={"constant": True, "shared": True})
    self_cond: Prediction | Tensor | None = None  # condition of the next forward
    memory: Any = None  # of the sampler
    stop_memory: Any = None  # of the stop rule

    __repr__ = short_repr

    draw = staticmethod(draws.uniform)  # an engine may replace it by a faster one, but not the `draw` of a subclass

    @property
    def batch_size(self) -> int:
        return self.canvas.shape[0]

    @property
    def canvas_len(self) -> int:
        return self.canvas.shape[1]

    @property
    def device(self) -> torch.device:
        return self.canvas.device

    def select(self, rows: Tensor) -> "DenoiseState":
        """Select rows of the state: rows (R,) int64 → batch size R. Tensors in `memory` must be batch-first.

        Example: `state.select(torch.tensor([0, 2]))`.
        """
        values = tree_map(lambda x: x.index_select(0, rows) if isinstance(x, Tensor) else x, _row_fields(self))
        if self.language is not None:
            values["language"] = self.language.select(rows)
        if self.allowed is not None and self.allowed.shape[0] > 1:  # otherwise it is the same for every row
            values["allowed"] = self.allowed.index_select(0, rows)
        return replace(self, **values)

    def splice(self, rows: Tensor, donor: "DenoiseState") -> "DenoiseState":
        """Replace `rows` (R,) by the rows of a donor of batch size R, for example from another run.

        Seeds, step, noise levels, temperature, allowed tokens, language and memory come from the donor. The field
        `rows` stays.

        Example: `state.splice(torch.tensor([1]), other.select(torch.tensor([0])))`.
        """
        mine = {**_row_fields(self), **_tables_of_either(self, donor)}
        theirs = {**_row_fields(donor), **_tables_of_either(donor, self)}
        forms = [tree_map(torch.is_tensor, values) for values in (mine, theirs)]
        fits = type(donor) is type(self) and forms[0] == forms[1]
        fix = "Take both states after the same number of steps under the same sampler."
        require(fits, "DenoiseState.splice donor", "have the state's class and present fields", donor, fix)
        spliced = tree_map(
            lambda old, new: old.index_copy(0, rows, new.to(old.dtype)) if torch.is_tensor(old) else old, mine, theirs
        )
        language = self.language
        if language is not None and donor.language is not None and language.has_automaton_of(donor.language):
            language = language.splice(donor.language, rows)
        else:
            fix = "Start both rows in one run, with a list of constraints."
            require(language is donor.language, "DenoiseState.splice donor", "have the state's constraint", donor, fix)
        return replace(self, **{**spliced, "rows": self.rows, "language": language})

    def uniform(self, purpose: str) -> Tensor:
        """Draw one uniform in [0, 1) per position, (B, C) float64, from (seed, block, step, position, purpose)."""
        return self.draw(self.seeds, self.block, self.step, self.canvas_len, purpose)

    def row_uniform(self, purpose: str) -> Tensor:
        """Draw one uniform in [0, 1) per row, (B,) float64."""
        return self.draw(self.seeds, self.block, self.step, 1, purpose)[:, 0]


def split_fields(state: DenoiseState, mark: str) -> tuple[list[str], list[str]]:
    """Return the names of a state's fields without this mark in their metadata, and the names of those with it.

    Fields with `init=False` are in neither list, because `dataclasses.replace` computes them from the others.
    """
    declared = [f for f in fields(state) if f.init]
    marked = [f.name for f in declared if f.metadata.get(mark)]
    return [f.name for f in declared if f.name not in marked], marked


def _row_fields(state: DenoiseState) -> dict[str, Any]:
    """The fields whose tensors have one entry per row. A prediction is replaced by its tensors."""
    values = {name: getattr(state, name) for name in split_fields(state, "shared")[0]}
    if isinstance(state.self_cond, Prediction):
        values["self_cond"] = state.self_cond.as_self_cond()
    return values


def _tables_of_either(state: DenoiseState, other: DenoiseState) -> dict[str, Tensor]:
    """The state's tables of awaited positions and allowed tokens, if one of the two states has them; by default all."""
    tables = {}
    if state.awaited is not None or other.awaited is not None:
        tables["awaited"] = torch.ones_like(state.frozen) if state.awaited is None else state.awaited
    if state.allowed is not None or other.allowed is not None:
        every = torch.ones(1, 1, state.noise.vocab_size, dtype=torch.bool, device=state.device)
        allowed, theirs = (every if table is None else table for table in (state.allowed, other.allowed))
        tables["allowed"] = allowed.expand(state.batch_size, max(allowed.shape[1], theirs.shape[1]), -1)
    return tables


def watch(*tensors: Tensor) -> Callable[[], bool]:
    """Return a function that returns True once a tensor has been changed in place. Nothing runs on the device.

    Tensors made under `torch.inference_mode` do not count changes, so the result for them is always True.

    Example: `is_edited = watch(state.done); state.done.fill_(True); is_edited()` is True.
    """
    if any(tensor.is_inference() for tensor in tensors):
        return lambda: True
    before = [tensor._version for tensor in tensors]
    return lambda: [tensor._version for tensor in tensors] != before
