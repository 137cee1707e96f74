"""A model solves Sudokus: the puzzle as prompt, its clues frozen on the canvas or not, the rest by `generate`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dgemma.data.sudoku.encoding import (
    DIGIT_TOKENS,
    EOS_TOKEN,
    MASK_TOKEN,
    NUM_CELLS,
    VOCAB_SIZE,
    canvas_digits,
    canvas_tokens,
    prompt_tokens,
)
from dgemma.data.sudoku.puzzles import parse
from dgemma.generate import Denoiser, Generation, generate
from dgemma.noise import MaskNoise, Noise, UniformNoise, learnt_noise


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a model made of B puzzles: grids (B, 81) of digits, and the run they come from."""

    puzzles: Tensor  # (B, 81)
    grids: Tensor  # (B, 81)
    generation: Generation

    @property
    def steps(self) -> Tensor:
        """Forwards each puzzle took, (B,)."""
        return self.generation.steps[:, 0]

    def scores(self, solutions: Any) -> dict[str, float]:
        """Against solutions (B, 81): shares of exact grids, right blanks and clues preserved; mean and most steps.

        Example: `complete(model, test.puzzles).scores(test.solutions)["exact"]`.
        """
        right = self.grids == torch.as_tensor(solutions).to(self.grids)
        clue = self.puzzles > 0
        return {
            "exact": right.all(1).double().mean().item(),
            "cells": right[~clue].double().mean().item(),
            "clues": right[clue].double().mean().item(),
            "steps": self.steps.double().mean().item(),
            "most_steps": float(self.steps.max().item()),
        }


def sudoku_noise(kind: str) -> Noise:
    """The process over Sudoku's vocabulary: "mask" or "uniform"."""
    if kind not in ("mask", "uniform"):
        raise ValueError(f"sudoku_noise kind must be 'mask' or 'uniform', got {kind!r}.")
    return MaskNoise(VOCAB_SIZE, mask_token_id=MASK_TOKEN) if kind == "mask" else UniformNoise(VOCAB_SIZE)


def complete(
    model: Denoiser, puzzles: Any, *, keep_clues: bool = True, noise: Noise | None = None, **options: Any
) -> Completion:
    """Let a model trained on `SudokuSource` solve puzzles: digits (B, 81) with 0 for a blank, or texts for `parse`.

    keep_clues freezes them on the canvas; otherwise the model must copy them from the prompt itself. noise: what the
    checkpoint says it learnt, else masks. options: any of `generate`'s, such as steps, sampler, stop, seed, record.

    Example: `complete(model, "53..7..." + "." * 73, sampler=EntropyBound(bound=0.1, greedy=True)).grids`.
    """
    is_text = isinstance(puzzles, str) or (isinstance(puzzles, list | tuple) and isinstance(puzzles[0], str))
    puzzles = torch.as_tensor(parse(puzzles) if is_text else puzzles).to(model.device).long()
    if puzzles.dim() != 2 or puzzles.shape[1] != NUM_CELLS:
        raise ValueError(f"complete puzzles must be (B, 81) digits, got shape {tuple(puzzles.shape)}. See `parse`.")
    if keep_clues:
        options |= {"canvas": canvas_tokens(puzzles), "frozen": puzzles > 0}
    generation = generate(
        model,
        prompt_tokens(puzzles),
        max_new_tokens=NUM_CELLS,
        noise=noise or (sudoku_noise("mask") if model.generation.noise is None else learnt_noise(model)),
        allowed=list(DIGIT_TOKENS),
        eos_token_ids=[EOS_TOKEN],
        **options,
    )
    return Completion(puzzles=puzzles, grids=canvas_digits(generation.new_tokens), generation=generation)
