"""Sudoku: puzzles have one solution, symmetries and splits are exact, and models read and write the right tokens."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import dgemma
from dgemma.data import sudoku
from dgemma.data.sudoku.encoding import SudokuTokenizer
from dgemma.data.sudoku.puzzles import SPLITS, dig, full_grids
from dgemma.sampling import Confidence
from dgemma.train.batch import TrainBatch

# From Wikipedia's article on Sudoku, which prints the solution too.
PUZZLE = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"
SOLUTION = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
# Peter Norvig's "hardest": naked and hidden singles do not suffice, so it needs search.
HARD = "4.....8.5.3..........7......2.....6.....8.4......1.......6.3.7.5..2.....1.4......"


def brute_force(puzzle: np.ndarray, limit: int = 2) -> list[np.ndarray]:
    """Solutions by plain backtracking, cell by cell, each digit checked against row, column and box."""
    grid, found = puzzle.reshape(9, 9).copy(), []

    def fits(r, c, d):
        box = grid[r // 3 * 3 : r // 3 * 3 + 3, c // 3 * 3 : c // 3 * 3 + 3]
        return d not in grid[r] and d not in grid[:, c] and d not in box

    def fill():
        blanks = [(sum(fits(r, c, d) for d in range(1, 10)), r, c) for r, c in zip(*np.nonzero(grid == 0), strict=True)]
        if not blanks:
            found.append(grid.flatten().copy())
            return
        _, r, c = min(blanks)
        for d in range(1, 10):
            if len(found) < limit and fits(r, c, d):
                grid[r, c] = d
                fill()
                grid[r, c] = 0

    for r, c in zip(*np.nonzero(grid), strict=True):
        digit, grid[r, c] = grid[r, c], 0
        if not fits(r, c, digit):
            return []
        grid[r, c] = digit
    fill()
    return found


def is_solved(grid: np.ndarray) -> bool:
    square = grid.reshape(9, 9)
    boxes = square.reshape(3, 3, 3, 3).transpose(0, 2, 1, 3).reshape(9, 9)
    return all(sorted(line) == list(range(1, 10)) for lines in (square, square.T, boxes) for line in lines)


@pytest.fixture(scope="module")
def some() -> sudoku.Puzzles:
    return sudoku.generate_puzzles(12, givens=(26, 37), seed=5)


@pytest.mark.parametrize("puzzle", [PUZZLE, HARD], ids=["printed", "hard"])
def test_solver_finds_the_only_solution_also_where_singles_do_not_suffice(puzzle):
    found = sudoku.solve(sudoku.parse(puzzle))
    assert found.counts.tolist() == [1]
    assert is_solved(found.grids[0])
    assert puzzle == HARD or sudoku.to_text(found.grids) == [SOLUTION]


def test_solver_counts_as_many_solutions_as_brute_force(some):
    """Puzzles with one solution, then with two clues removed (several solutions) or one changed (mostly none)."""
    rng = np.random.default_rng(0)
    fewer, wrong = some.puzzles[:2].copy(), some.puzzles[:2].copy()
    for row in range(2):
        clues = np.flatnonzero(some.puzzles[row])
        fewer[row, rng.choice(clues, 2, replace=False)] = 0
        wrong[row, rng.choice(clues)] = rng.integers(1, 10)
    puzzles = np.concatenate([some.puzzles[:2], fewer, wrong])
    expected = [len(brute_force(puzzle)) for puzzle in puzzles]
    assert sudoku.solve(puzzles).counts.tolist() == expected
    assert set(expected) == {0, 1, 2}  # all cases occur


def test_generated_puzzles_have_one_solution_by_brute_force(some):
    for puzzle, solution in zip(some.puzzles[:4], some.solutions[:4], strict=True):
        found = brute_force(puzzle)
        assert len(found) == 1
        assert (found[0] == solution).all()
    assert all(is_solved(grid) for grid in some.solutions)
    assert ((some.puzzles == 0) | (some.puzzles == some.solutions)).all()


def test_digging_without_a_limit_leaves_no_removable_clue():
    rng = np.random.default_rng(3)
    minimal = dig(rng, full_grids(rng, 2), 0)
    assert (sudoku.solve(minimal.puzzles).counts == 1).all()
    for row, puzzle in enumerate(minimal.puzzles):
        clues = np.flatnonzero(puzzle)
        assert 17 <= len(clues) <= 40  # no Sudoku has fewer than 17
        without = np.repeat(puzzle[None], len(clues), 0)
        without[np.arange(len(clues)), clues] = 0
        assert (sudoku.solve(without).counts == 2).all(), row


@pytest.mark.slow
def test_puzzles_do_not_depend_on_the_number_of_workers(monkeypatch):
    monkeypatch.setattr("dgemma.data.sudoku.puzzles._CHUNK", 3)

    class InThisProcess:
        def __init__(self, *args, **options): ...
        def __enter__(self):
            return self

        def __exit__(self, *error): ...
        def map(self, function, *arguments):
            return reversed([function(*task) for task in reversed(list(zip(*arguments, strict=True)))])

    monkeypatch.setattr("dgemma.data.sudoku.puzzles.ProcessPoolExecutor", InThisProcess)
    alone, shared = (sudoku.generate_puzzles(7, givens=40, seed=2, workers=workers) for workers in (1, 4))
    assert (alone.puzzles == shared.puzzles).all()
    assert (alone.puzzles != sudoku.generate_puzzles(7, givens=40, seed=3).puzzles).any()


def test_puzzles_are_cached_separately_per_arguments(tmp_path, monkeypatch):
    made = sudoku.generate_puzzles(3, givens=45, folder=tmp_path / "kept")
    other = sudoku.generate_puzzles(3, givens=45, split="test", folder=tmp_path / "kept")
    monkeypatch.setattr("dgemma.data.sudoku.puzzles._generate_chunk", None)  # generating would now raise
    again = sudoku.generate_puzzles(3, givens=45, workers=2, folder=tmp_path / "kept")
    assert (again.puzzles == made.puzzles).all()
    assert (again.solutions == made.solutions).all()
    assert (again.solutions != other.solutions).any()
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_equivalents_are_puzzles_with_the_equivalent_solution(some):
    both = torch.stack([torch.from_numpy(some.puzzles), torch.from_numpy(some.solutions)], dim=1)
    moved = sudoku.equivalents(both, torch.rand(12, 34, generator=torch.Generator().manual_seed(0))).numpy()
    found = sudoku.solve(moved[:, 0])
    assert (found.counts == 1).all()
    assert (found.grids == moved[:, 1]).all()
    assert ((moved[:, 0] > 0).sum(1) == some.givens).all()
    assert (moved[:, 1] != some.solutions).any(1).all()


def test_equivalent_grids_share_their_class_and_split():
    rng = np.random.default_rng(1)
    grids = full_grids(rng, 40)
    u = torch.rand(200, 34, generator=torch.Generator().manual_seed(2))
    moved = sudoku.equivalents(torch.from_numpy(grids).repeat(5, 1), u).numpy()
    keys = sudoku.class_keys(grids)
    assert (sudoku.class_keys(moved) == np.tile(keys, 5)).all()
    assert (sudoku.split_of(moved) == np.tile(sudoku.split_of(grids), 5)).all()
    assert len(set(keys.tolist())) == 40  # random grids have different keys


@pytest.mark.parametrize("split", SPLITS)
def test_splits_share_no_class_of_grids(split, some):
    made = sudoku.generate_puzzles(2, givens=45, split=split, seed=9)
    assert (sudoku.split_of(made.solutions) == SPLITS.index(split)).all()
    if split != "train":
        assert not set(sudoku.class_keys(made.solutions)) & set(sudoku.class_keys(some.solutions))


def test_batches_are_equivalents_with_added_clues_and_one_solution(some):
    source = sudoku.SudokuSource(pool=some, seed=3, givens=(38, 45), frozen_share=0.5)
    batch = source(4, range(32))
    clues = batch.tokens[:, :81] - 14 - 10 * torch.arange(81)
    solution = sudoku.canvas_digits(batch.tokens[:, 81:])
    found = sudoku.solve(clues.numpy())
    assert (found.counts == 1).all()
    assert (found.grids == solution.numpy()).all()
    assert set((clues > 0).sum(1).tolist()) <= set(range(38, 46))
    keys = set(sudoku.class_keys(some.solutions).tolist())
    assert set(sudoku.class_keys(solution.numpy()).tolist()) <= keys
    assert not batch.frozen[:, :81].any()
    frozen = batch.frozen[:, 81:]
    assert set(frozen.any(1).tolist()) == {True, False}
    assert (frozen == ((clues > 0) & frozen.any(1, keepdim=True))).all()


def test_batches_depend_on_step_and_row_alone(some):
    source = sudoku.SudokuSource(pool=some, seed=3)
    whole, part = source(7, range(12)), source(7, range(5, 9))
    assert isinstance(part, TrainBatch)
    assert (whole.tokens[5:9] == part.tokens).all()
    assert (whole.frozen[5:9] == part.frozen).all()
    assert (source(8, range(5, 9)).tokens != part.tokens).any(1).all()


def test_skew_prefers_few_clues(some):
    few, even = (
        sudoku.SudokuSource(pool=some[some.givens < 30], givens=(30, 50), skew=skew).sample(0, range(400)).puzzle
        for skew in (3.0, 1.0)
    )
    # The mean of 30 + floor(21 u^s) is near 30 + 21 / (s + 1) - 1/2: 34.75 and 40.
    assert abs((few > 0).sum(1).double().mean() - 34.75) < 1
    assert abs((even > 0).sum(1).double().mean() - 40) < 1


class Oracle(dgemma.Denoiser):
    """A denoiser that predicts the solutions, with the same confidence for every cell."""

    def __init__(self, solutions):
        self.config = dgemma.presets.tiny().replace(vocab_size=sudoku.VOCAB_SIZE, canvas_length=81)
        self.generation, self.device = dgemma.GenerationDefaults(), torch.device("cpu")
        self.model = dgemma.DiffusionGemma(self.config)
        self.targets = sudoku.canvas_tokens(solutions)

    def encode(self, tokens, cache=None, attention_mask=None):
        return self.model.encode(tokens, cache, attention_mask)

    def denoise(self, canvas, cache, self_cond=None):
        return dgemma.Prediction(20 * torch.nn.functional.one_hot(self.targets, sudoku.VOCAB_SIZE).float())


@pytest.mark.parametrize("keep_clues", [True, False])
def test_completion_writes_what_the_model_knows(some, keep_clues):
    oracle = Oracle(some.solutions)
    sampler = Confidence(greedy=True)
    done = sudoku.complete(oracle, some.puzzles, keep_clues=keep_clues, sampler=sampler, steps=2, stop=None)
    scores = done.scores(some.solutions)
    assert scores == {"exact": 1.0, "cells": 1.0, "clues": 1.0, "steps": 2.0, "most_steps": 2.0}


def test_a_puzzle_may_be_given_as_text(some):
    texts = sudoku.to_text(some.puzzles)
    for puzzles, solutions in ((texts, some.solutions), (texts[0], some.solutions[:1])):
        done = sudoku.complete(Oracle(solutions), puzzles, sampler=Confidence(greedy=True), steps=1, stop=None)
        assert done.scores(solutions)["exact"] == 1.0
    with pytest.raises(ValueError, match="a puzzle must have 81 characters"):
        sudoku.complete(Oracle(some.solutions[:1]), "530")


def test_symmetries_refuse_what_is_no_grid(some):
    grids = torch.as_tensor(some.solutions)
    assert (sudoku.class_keys(grids) == sudoku.class_keys(some.solutions)).all()
    for wrong, rule in (("x", r"be digits"), (some.puzzles, r"have no blanks"), (grids[0], r"be \(N, 81\)")):
        with pytest.raises(ValueError, match=rf"^class_keys grids must {rule}"):
            sudoku.split_of(wrong)
    with pytest.raises(ValueError, match=r"^equivalents u must be Tensor"):
        sudoku.equivalents(grids, 4)


def test_a_checkpoint_that_learnt_uniform_noise_completes_under_it(some):
    oracle, seen = Oracle(some.solutions), []
    oracle.generation = dgemma.GenerationDefaults(noise={"kind": "uniform"})
    sudoku.complete(oracle, some.puzzles, steps=1, on_step=seen.append)
    assert seen[0].state.noise == dgemma.UniformNoise(sudoku.VOCAB_SIZE)


def test_scores_count_grids_cells_and_clues_separately(some):
    """The model writes the solution of row 0 in every row, so other rows have right clues only if these are frozen."""
    oracle = Oracle(np.repeat(some.solutions[:1], len(some), 0))
    options = {"sampler": Confidence(greedy=True), "steps": 1, "stop": None}
    kept = sudoku.complete(oracle, some.puzzles, **options).scores(some.solutions)
    lost = sudoku.complete(oracle, some.puzzles, keep_clues=False, **options).scores(some.solutions)
    assert kept["exact"] == lost["exact"] == pytest.approx(1 / len(some))
    assert kept["clues"] == 1.0
    assert lost["clues"] < 0.5
    assert kept["cells"] == lost["cells"] < 0.5


class Stuck(Oracle):
    """A denoiser that solves every puzzle except the given ones, where it writes only ones."""

    def __init__(self, puzzles):
        super().__init__(puzzles)
        self.stuck = set(sudoku.to_text(puzzles))

    def encode(self, tokens, cache=None, attention_mask=None):
        if cache is None:  # the prompt
            puzzles = ((tokens - 14) % 10).numpy().astype(np.int8)
            known = [text not in self.stuck for text in sudoku.to_text(puzzles)]
            self.targets = sudoku.canvas_tokens(np.where(np.array(known)[:, None], sudoku.solve(puzzles).grids, 1))
        return super().encode(tokens, cache, attention_mask)


def test_a_retry_solves_equivalent_puzzles_and_keeps_the_rest(some):
    options = {"sampler": Confidence(greedy=True), "steps": 2, "stop": None}
    model = Stuck(some.puzzles[1:3])
    first = sudoku.complete(model, some.puzzles, **options)
    assert first.solved.tolist() == [row not in (1, 2) for row in range(len(some))]
    again = sudoku.retry(model, first, **options)
    assert again.scores(some.solutions)["exact"] == 1.0
    assert again.steps.tolist() == [4 if row in (1, 2) else 2 for row in range(len(some))]
    assert again.generation.new_tokens.shape == (2, 81)
    assert sudoku.retry(model, again, **options) is again


def test_originals_inverts_a_transformation(some):
    u = torch.rand(len(some), 34, generator=torch.Generator().manual_seed(0))
    for digits in map(torch.from_numpy, (some.puzzles, some.solutions)):
        moved = sudoku.equivalents(digits, u)
        assert not torch.equal(moved, digits)
        assert torch.equal(sudoku.originals(moved, u), digits)


def test_a_solution_keeps_rows_columns_boxes_and_clues(some):
    puzzles, right = torch.from_numpy(some.puzzles), torch.from_numpy(some.solutions)
    assert sudoku.is_solution(puzzles, right).all()
    y, x = torch.arange(9)[:, None], torch.arange(9)
    blank = torch.zeros(1, 81, dtype=torch.long)
    wrong = {
        "boxes": (x + y) % 9 + 1,
        "columns": (x + 0 * y) % 9 + 1,
        "rows": (y + 0 * x) % 9 + 1,
        "holes": right[0].long().reshape(9, 9) * (x + y > 0),
    }
    for name, grid in wrong.items():
        assert not sudoku.is_solution(blank, grid.reshape(1, 81)), name
    relabelled = torch.where(right == 1, 2, torch.where(right == 2, 1, right))
    assert sudoku.is_solution(blank.expand_as(right), relabelled).all()
    assert not sudoku.is_solution(puzzles, relabelled).any(), "keeps every rule, but not the clues"


def text_sudoku():
    return runpy.run_path(str(Path(__file__).parents[2] / "examples" / "11_finetune_sudoku.py"))["TextSudoku"]


def test_a_row_as_text_is_a_start_the_puzzle_and_the_solution_with_a_letter_before_each_row(some):
    tokenizer = dgemma.Tokenizer.from_pretrained("dgemma/text")
    source = sudoku.SudokuSource(pool=some, frozen_share=1.0)
    text, sample = text_sudoku()(source, tokenizer), source.sample(3, range(5))
    batch = text(3, range(5))

    def board(cells):
        return "".join(name + cells[9 * row : 9 * row + 9] for row, name in enumerate("ABCDEFGHI"))

    puzzles, solutions = (map(board, sudoku.to_text(digits.numpy())) for digits in (sample.puzzle, sample.solution))
    wanted = [tokenizer.encode(puzzle + solution) for puzzle, solution in zip(puzzles, solutions, strict=True)]
    assert batch.tokens.tolist() == wanted
    assert batch.prompt_len.tolist() == [91] * 5
    assert batch.length.tolist() == [181] * 5
    assert batch.frozen is None  # the model writes the clues as well
    assert torch.equal(batch.tokens[:, :91], text.prompt_tokens(sample.puzzle))
    assert torch.equal(text.canvas_digits(batch.tokens[:, 91:]), sample.solution)


def test_puzzles_and_solutions_are_texts_of_81_characters_each():
    tokenizer = SudokuTokenizer()
    puzzle, solution = "53..7" + "." * 76, "534678912" * 9
    assert tokenizer.encode(puzzle) == sudoku.prompt_tokens([[5, 3, 0, 0, 7] + [0] * 76])[0].tolist()
    whole = tokenizer.encode(f"{puzzle} {solution}")
    assert tokenizer.decode(whole[81:]) == solution
    assert tokenizer.fits(dgemma.presets.sudoku())
    with pytest.raises(ValueError, match=r"must be 81 clues, with \. for a blank, and then the digits of a solution"):
        tokenizer.encode("hello")
