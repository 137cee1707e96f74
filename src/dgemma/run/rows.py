"""The rows of a run in progress: their tokens, the states of their language, and which of them have ended.

For every block a driver calls `encode` (the text that is new), `start` (the next canvas), denoises the canvas, and
calls `commit`. After the last block it calls `encode` once more, because the cache of a result has the whole text.
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
        # (R,) the rows in the batch. A row that ends leaves it in `encode`, when its last block is in the cache.
        self.present = torch.arange(plan.batch_size, device=plan.seeds.device)
        self.commits: list[BlockCommit] = []
        self.ended = False  # all rows have ended, or all blocks are written
        self.uncached: Tensor = plan.prompt_tokens  # (R, n) tokens that are not in the cache
        self.uncached_mask: Tensor | None = plan.attention_mask
        self.uncached_images = plan.images
        self._states = None if plan.language is None else plan.language.start  # (R,) of the constraint
        self._leaving: list[bool] = []  # of the present rows: True for those that ended in the last block
        self._retired: list[tuple[Tensor, Cache]] = []  # rows that left, and their cache

    @property
    def block(self) -> int:
        """The number of the next block in the plan."""
        return len(self.commits)

    def encode(self, model: Denoiser, cache: Cache | None = None) -> Cache:
        """Extend the cache by the prompt or the last block. Rows that ended then leave; `output` joins them again."""
        cache = model.encode_with(join_images(self.uncached_images), self.uncached, cache, self.uncached_mask)
        if any(self._leaving):
            leaving = torch.tensor(self._leaving)
            ends, goes_on = (flags.nonzero()[:, 0].to(self.present.device) for flags in (leaving, ~leaving))
            self._retired.append((self.present[ends], cache.select(ends)))
            self.present, cache = self.present[goes_on], cache.select(goes_on)
            self._states = None if self._states is None else self._states[goes_on]
            self._leaving = []
        return cache

    def start(self, model: Denoiser, knobs: Knobs) -> DenoiseState:
        """Return the state of the next canvas before its first step."""
        plan, block = self.plan, self.block
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
        """Commit the finished canvases (R, C), which took `steps` and `forwards` (R,)."""
        plan, block, present = self.plan, self.block, self.present
        if plan.language is not None and self._states is not None:
            self._states = plan.language.advance(self._states, drafts.to(self._states.device))
        is_text, ends = plan.find_text(drafts, block, present)
        # The host waits for the device here, unless no token can end a row.
        self._leaving = ends.tolist() if plan.eos_token_ids else [False] * len(drafts)
        self.uncached, self.uncached_mask, self.uncached_images = drafts, None, None
        if any(self._leaving) or plan.text_len is not None:  # otherwise all tokens are text
            self.uncached, self.uncached_mask = torch.where(is_text, drafts, plan.pad_token_id), is_text
        self.ended = all(self._leaving) or block + 1 == plan.num_blocks

        def spread(values: Tensor, fill: int | bool) -> Tensor:
            """Values (R, ...) of the present rows over the whole batch, (B, ...)."""
            if len(present) == plan.batch_size:
                return values
            return values.new_full((plan.batch_size, *values.shape[1:]), fill).index_copy(0, present, values)

        self.commits.append(
            BlockCommit(
                block=block,
                tokens=spread(self.uncached, plan.pad_token_id),
                finished=spread(ends, True),
                steps=spread(steps, 0),
                forwards=spread(forwards, 0),
            )
        )
        return self.commits[-1]

    def repeat(self, commit: BlockCommit) -> None:
        """Commit a block of a recorded run again."""
        values = (commit.tokens, commit.steps, commit.forwards)
        self.commit(*(value.to(self.present.device)[self.present] for value in values))

    @property
    def new_tokens(self) -> Tensor:
        """The tokens of all finished blocks, (B, N), padded after the stop tokens."""
        return torch.cat([commit.tokens for commit in self.commits], dim=1)

    @property
    def steps(self) -> Tensor:
        """The steps of each row in each block, (B, blocks)."""
        return torch.stack([commit.steps for commit in self.commits], dim=1)

    def output(self, cache: Cache) -> Output:
        """Return the result of the run. `cache` is that of the rows that have not ended."""
        if self._retired:
            parts = [*self._retired, (self.present, cache)]
            first = torch.zeros(self.plan.batch_size, dtype=torch.int64, device=self.present.device)
            cache = parts[0][1].select(first)  # every row is then replaced by its own
            for rows, part in parts:
                cache.splice(rows, part)
        new_tokens = self.new_tokens
        return Output(
            tokens=torch.cat((self.plan.prompt_tokens, new_tokens), dim=1),
            new_tokens=new_tokens,
            steps=self.steps,
            tokens_per_forward=self.plan.count_tokens(new_tokens) / sum(commit.forwards for commit in self.commits),
            cache=cache,
        )
