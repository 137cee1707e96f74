"""Prompts with answers, for learning from runs: a source of batches in which each row is one prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import Count, Words, check_types, require, require_field, typed
from dgemma.diffusion import draws
from dgemma.files import read_json_lines
from dgemma.train.batch import TrainBatch, row_seeds


@dataclass(frozen=True, kw_only=True, eq=False)
class Problems:
    """Prompts and their answers: a `BatchSource` whose rows are prompts, in a new order every epoch.

    With `updates` above 1, so many steps in a row get the same prompts: the runs of the first step serve them all. Row
    r of the global batch is prompt number n = batch_size · (step // updates) + r of the endless sequence, and
    `TrainBatch.text` holds n.

    Example: `Problems(prompts=[tokenizer.encode("2+3=")], answers=[5], batch_size=1)(0, range(1)).tokens`.
    """

    prompts: Sequence[Sequence[int]]  # token ids
    answers: Sequence[Any]
    batch_size: Count
    updates: Count = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        require_field(len(self.prompts) > 0, self, "prompts", "hold at least one prompt")
        has_answers = len(self.answers) == len(self.prompts)
        require_field(has_answers, self, "answers", f"have one entry for each of the {len(self.prompts)} prompts")

    @classmethod
    @typed
    def read(
        cls, path: str | Path, tokenizer: Tokenizer, *, batch_size: int, updates: int = 1, seed: int = 0
    ) -> "Problems":
        """Read a file of JSON lines, each with "prompt" (a text) or "messages" (a chat), and "answer".

        Example: `Problems.read("sums.jsonl", tokenizer, batch_size=16)`.
        """
        prompts, answers = [], []
        for place, line in read_json_lines(path):
            fields = line if isinstance(line, dict) else {}
            is_text, is_chat = isinstance(fields.get("prompt"), str), isinstance(fields.get("messages"), list)
            rule = 'be an object with "answer" and either "prompt" or "messages"'
            require("answer" in fields and is_text != is_chat, place, rule, line)
            try:
                prompts.append(tokenizer.encode(line["prompt"]) if is_text else tokenizer.chat(line["messages"]))
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
            answers.append(line["answer"])
        require(bool(prompts), str(path), "hold prompts and answers", Words("no line"))
        return cls(prompts=prompts, answers=answers, batch_size=batch_size, updates=updates, seed=seed)

    def __call__(self, step: int, rows: range) -> TrainBatch:
        rule = f"equal TrainConfig.batch_size, with row {rows.stop - 1} requested"
        require_field(rows.stop <= self.batch_size, self, "batch_size", rule)
        numbers = self.batch_size * (step // self.updates) + torch.arange(rows.start, rows.stop)
        prompts = [self.prompts[place] for place in self.places(numbers)]
        return TrainBatch.of_rows(prompts, [len(prompt) for prompt in prompts], 0, text=numbers)

    def places(self, numbers: Tensor) -> list[int]:
        """Return the places in `prompts` of numbers (B,) of the endless sequence."""
        count = len(self.prompts)
        return [_order(self.seed, count, number // count)[number % count] for number in numbers.tolist()]

    def run_seeds(self, numbers: Tensor, group: int) -> Tensor:
        """Return the seeds (B, group) of the runs of prompts with these numbers (B,)."""
        return row_seeds(self.seed, numbers[:, None], range(group), "run")


@lru_cache(maxsize=8)
def _order(seed: int, count: int, epoch: int) -> list[int]:
    key, block, step = (torch.tensor([number]) for number in (seed, 0, epoch))
    return draws.uniform(key, block, step, count, "order")[0].argsort(stable=True).tolist()
