"""The rows of a run in progress: their tokens, the states of their language, and which of them have ended.

A driver repeats four calls for every block: `encode` (what is new), `start` (the next canvas), then it denoises
the canvas, then `commit`.
"""

import torch
from torch import Tensor

from dgemma.diffusion.state import DenoiseState
from dgemma.model.cache import Cache
from dgemma.model.denoiser import Denoiser
from dgemma.model.vision.places import join_images
from dgemma.run.knobs import Knobs
from dgemma.run.plan import Plan
from dgemma.run.records import BlockCommit, Output
from dgemma.run.step import start_state


class Rows:
    """The rows of a plan, which start together and are committed block by block.

    `generate` runs one `Rows` for its batch. The `Batch` of many prompts has one per prompt.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.present = torch.arange(plan.batch_size, device=plan.seeds.device)  # (R,) the rows that have not ended
        self.blocks: list[Tensor] = []  # (B, C) each
        self.steps: list[Tensor] = []  # (B,) each
        self.forwards: list[Tensor] = []  # (B,) each
        self.ended = False
        self.uncached: Tensor = plan.prompt_tokens  # (R, n) tokens that are not in the cache
        self.uncached_mask: Tensor | None = plan.attention_mask
        self.uncached_images = plan.images
        self._states = None if plan.language is None else plan.language.start  # (R,) of the constraint
        self._leaving: list[bool] = []
        self._retired: list[tuple[Tensor, Cache]] = []

    def encode(self, model: Denoiser, cache: Cache | None = None) -> Cache:
        """Encode the uncached tokens, and return the cache of the rows that go on. Rows that ended keep their cache."""
        cache = model.encode_with(join_images(self.uncached_images), self.uncached, cache, self.uncached_mask)
        if any(self._leaving):
            leaving = torch.tensor(self._leaving)  # of the last commit; their last block is now in the cache, too
            ends, goes_on = (flags.nonzero()[:, 0].to(self.present.device) for flags in (leaving, ~leaving))
            self._retired.append((self.present[ends], cache.select(ends)))
            self.present, cache = self.present[goes_on], cache.select(goes_on)
            self._states = None if self._states is None else self._states[goes_on]
            self._leaving = []
        return cache

    def start(self, model: Denoiser, knobs: Knobs) -> DenoiseState:
        """Return the state of the next canvas before its first step."""
        return self._start(model, len(self.blocks), knobs)

    def _start(self, model: Denoiser, block: int, knobs: Knobs) -> DenoiseState:
        """Start a block of the plan. A subclass whose plan is for one canvas starts block 0 of it each time."""
        plan = self.plan
        return start_state(
            knobs,
            plan.noise,
            seeds=plan.seeds[block, self.present],
            canvas_len=plan.canvas_len,
            num_steps=plan.num_steps,
            block=plan.first_block + block,
            rows=self.present,
            uniform=model.uniform,
            **plan.part(block, self.present, self._states),
        )

    def commit(self, drafts: Tensor, steps: Tensor, forwards: Tensor) -> BlockCommit:
        """Commit the finished canvases (R, C), which took `steps` and `forwards` (R,). Call `encode` after it."""
        plan, block, present = self.plan, len(self.blocks), self.present
        if plan.language is not None and self._states is not None:
            self._states = plan.language.advance(self._states, drafts.to(self._states.device))
        self.uncached, self.uncached_mask, self._leaving = plan.end_rows(drafts, block, present)
        self.uncached_images = None
        self.blocks.append(_spread(self.uncached, present, plan.batch_size, plan.pad_token_id))
        self.steps.append(_spread(steps, present, plan.batch_size, 0))
        self.forwards.append(_spread(forwards, present, plan.batch_size, 0))
        self.ended = all(self._leaving) or block + 1 == plan.num_blocks
        ends = torch.zeros_like(present, dtype=torch.bool)  # a copy from the host would wait for the device
        if any(self._leaving):
            ends = torch.tensor(self._leaving, device=present.device)
        return BlockCommit(
            block=block,
            tokens=self.blocks[-1],
            finished=_spread(ends, present, plan.batch_size, True),
            steps=self.steps[-1],
            forwards=self.forwards[-1],
        )

    def repeat(self, commit: BlockCommit) -> None:
        """Commit a block of a recorded run again."""
        steps = commit.steps
        forwards = steps if commit.forwards is None else commit.forwards
        self.commit(*(values.to(self.present.device)[self.present] for values in (commit.tokens, steps, forwards)))

    @property
    def new_tokens(self) -> Tensor:
        """The tokens of all finished blocks, (B, N), padded after the stop tokens."""
        return torch.cat(self.blocks, dim=1)

    @property
    def tokens_per_forward(self) -> Tensor:
        """New tokens without padding, divided by forwards, (B,)."""
        return self.plan.count_tokens(self.new_tokens) / torch.stack(self.forwards).sum(0)

    def output(self, cache: Cache) -> Output:
        """Return the result of the run. `cache` is that of the rows that have not ended."""
        if self._retired:
            parts = [*self._retired, (self.present, cache)]
            first = torch.zeros(self.plan.batch_size, dtype=torch.int64, device=self.present.device)
            cache = parts[0][1].select(first)  # every row is then replaced by its own
            for rows, part in parts:
                cache.splice(rows, part)
        return Output(
            tokens=torch.cat((self.plan.prompt_tokens, self.new_tokens), dim=1),
            new_tokens=self.new_tokens,
            steps=torch.stack(self.steps, dim=1),
            tokens_per_forward=self.tokens_per_forward,
            cache=cache,
        )


def _spread(values: Tensor, rows: Tensor, batch_size: int, fill: int | bool) -> Tensor:
    """Spread the values (R, ...) of some rows over the batch, (B, ...), with `fill` in the other rows."""
    if len(rows) == batch_size:
        return values
    return values.new_full((batch_size, *values.shape[1:]), fill).index_copy(0, rows, values)
