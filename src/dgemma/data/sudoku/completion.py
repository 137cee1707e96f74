"""Solving Sudokus with a model: the puzzle is the prompt, and its clues may be frozen on the canvas."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.checks import require, typed
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
from dgemma.data.sudoku.solver import read_digits
from dgemma.data.sudoku.symmetry import NUM_UNIFORMS, equivalents, originals
from dgemma.diffusion import draws
from dgemma.diffusion.noise import MaskNoise, Noise, UniformNoise
from dgemma.model.denoiser import Denoiser
from dgemma.run.generate import generate
from dgemma.run.options import learnt_noise
from dgemma.run.recorded.trajectory import Generation


@dataclass(frozen=True, kw_only=True)
class CompletedPuzzles:
    """A model's answers to B puzzles: grids (B, 81) of digits, and the last call of `generate`."""

    puzzles: Tensor  # (B, 81)
    grids: Tensor  # (B, 81)
    steps: Tensor  # (B,) forwards each puzzle took, over all attempts
    generation: Generation

    @property
    def solved(self) -> Tensor:
        """True for the grids that keep every rule and every clue, (B,) bool. Solutions are not needed."""
        return is_solution(self.puzzles, self.grids)

    def scores(self, solutions: Any) -> dict[str, float]:
        """Compare with solutions (B, 81): shares of exact grids, right blanks and right clues; mean and maximal steps.

        Example: `complete(model, test.puzzles).scores(test.solutions)["exact"]`.
        """
        solutions = torch.as_tensor(solutions).to(self.grids)
        same_shape = solutions.shape == self.grids.shape
        require(same_shape, "scores solutions", f"have shape {tuple(self.grids.shape)}", solutions)
        right = self.grids == solutions
        clue = self.puzzles > 0
        return {
            "exact": right.all(1).double().mean().item(),
            "cells": right[~clue].double().mean().item(),
            "clues": right[clue].double().mean().item(),
            "steps": self.steps.double().mean().item(),
            "most_steps": float(self.steps.max().item()),
        }


@typed
def is_solution(puzzles: Tensor, grids: Tensor) -> Tensor:
    """Return which grids (B, 81) have every digit once per row, column and box, and the puzzles' clues; (B,) bool.

    Example: `is_solution(completion.puzzles, completion.grids)`.
    """
    puzzles, grids = read_digits("is_solution puzzles", puzzles), read_digits("is_solution grids", grids)
    require(grids.dim() == 2 and puzzles.shape == grids.shape, "is_solution grids", "have the puzzles' shape", grids)
    cells = F.one_hot(grids.long(), 10)[..., 1:].unflatten(
        1, (3, 3, 3, 3)
    )  # (B, 3, 3, 3, 3, 9): band, row, stack, column
    units = (cells.sum((3, 4)), cells.sum((1, 2)), cells.sum((2, 4)))  # rows, columns, boxes; (B, 3, 3, 9) each
    keeps_rules = torch.stack([(unit == 1).flatten(1).all(1) for unit in units]).all(0)
    return keeps_rules & ((puzzles == 0) | (puzzles == grids)).all(1)


@typed
def sudoku_noise(kind: Literal["mask", "uniform"]) -> Noise:
    """Return the "mask" or "uniform" noise over Sudoku's vocabulary.

    Example: `sudoku_noise("mask").mask_token` is 4.
    """
    return MaskNoise(VOCAB_SIZE, mask_token_id=MASK_TOKEN) if kind == "mask" else UniformNoise(VOCAB_SIZE)


def complete(
    model: Denoiser, puzzles: Any, *, keep_clues: bool = True, noise: Noise | None = None, **options: Any
) -> CompletedPuzzles:
    """Let a model trained on `SudokuSource` solve puzzles: digits (B, 81) with 0 for a blank, or texts for `parse`.

    keep_clues: freeze the clues on the canvas; otherwise the model must copy them from the prompt. noise: by default
    the checkpoint's; if it names none, mask noise, unlike in `generate`. options: arguments of `generate`, such as
    steps, sampler, stop or seed.

    Example: `complete(model, "53..7..." + "." * 73, sampler=EntropyBound(bound=0.1, greedy=True)).grids`.
    """
    first = puzzles[0] if isinstance(puzzles, list | tuple) and puzzles else puzzles
    digits = read_digits("complete puzzles", parse(puzzles) if isinstance(first, str) else puzzles)
    puzzles, config = digits.to(model.device), model.config
    has_rows = puzzles.dim() == 2 and len(puzzles) > 0
    require(has_rows, "complete puzzles", "be (B, 81) digits of at least one puzzle", puzzles, "See `parse`.")
    sizes, fix = (config.vocab_size, config.canvas_length), "Load dgemma/sudoku, or train one on `SudokuSource`."
    is_solver = sizes == (VOCAB_SIZE, NUM_CELLS)
    rule = f"be a Sudoku solver, with {VOCAB_SIZE} tokens and canvas {NUM_CELLS}"
    require(is_solver, "complete model", rule, sizes, fix)
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
    grids = canvas_digits(generation.new_tokens)
    return CompletedPuzzles(puzzles=puzzles, grids=grids, steps=generation.steps[:, 0], generation=generation)


def retry(model: Denoiser, completion: CompletedPuzzles, *, moves_seed: int = 0, **options: Any) -> CompletedPuzzles:
    """Try unsolved puzzles again as equivalent ones, with permuted rows, columns and digits.

    A wrong model is usually confident, so sampling again hardly helps. Of 20 failures, resampling the cells of broken
    units repaired 1, and equivalent puzzles repaired half. Of 12 failures, starting over repaired none. `moves_seed`
    seeds the permutations; options are those of `complete`. The result's `generation` covers only the puzzles that were
    retried. If all puzzles are solved, the completion is returned unchanged.

    Example: `for attempt in range(3): done = retry(model, done, moves_seed=attempt)`.
    """
    rows = (~completion.solved).nonzero()[:, 0]
    if not len(rows):
        return completion
    u = draws.uniform(moves_seed + rows, torch.zeros_like(rows), torch.zeros_like(rows), NUM_UNIFORMS, "retry")
    again = complete(model, equivalents(completion.puzzles[rows], u), **options)
    return replace(
        completion,
        grids=completion.grids.index_copy(0, rows, originals(again.grids, u)),
        steps=completion.steps.index_add(0, rows, again.steps),
        generation=again.generation,
    )
