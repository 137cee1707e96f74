"""What is said of a run tells it from every other, and is the same in the next process."""

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from dgemma.data.markov import MarkovChain, MarkovSource
from dgemma.data.sudoku import SudokuSource, generate_puzzles
from dgemma.noise import HybridNoise, MaskNoise
from dgemma.train.description import describe, describe_optimizer
from dgemma.train.objective import Objective


@dataclass
class Holder:
    held: object


class Silent:
    """Says nothing of itself."""


def small() -> list[object]:
    array = np.arange(6, dtype=np.int32)
    return [
        None,
        "text",
        3,
        0.5,
        Path("a"),
        (1,),
        [1, 2],
        {"a": 1},
        {"b", "a", "c"},
        array,
        array.astype(np.int64),
        array.reshape(2, 3),
        array[::-1],
        torch.arange(6.0),
        torch.arange(6.0).bfloat16(),
        torch.tensor(2.5),
        [torch.arange(3), torch.arange(4)],
        "long " * 1000,
        list(range(5000)),
        small,
        Silent(),
        functools.partial(small, 3),
        torch.float32,
    ]


def test_values_are_told_apart_and_named_alike_whenever_they_are_made():
    first, second = ([describe(Holder(value)) for value in small()] for _ in range(2))
    assert first == second
    assert len(set(first)) == len(first)
    assert all(len(line) < 1100 and " at 0x" not in line for line in first)


def test_one_element_of_the_data_is_noticed():
    data = np.zeros(100_000, dtype=np.float32)
    before = describe(Holder([data]))
    data[70_000] = 1e-30
    assert describe(Holder([data])) != before


@pytest.mark.parametrize(
    "objective",
    [
        Objective(noise=MaskNoise(512, mask_token_id=4), canvas_len=8, allowed=(5, 6)),
        Objective(noise=HybridNoise(512, mask_token_id=4), canvas_len=8, decoder_loss="nelbo"),
    ],
)
def test_an_objective_is_described_as_runs_always_did(objective):
    assert describe(objective) == repr(objective)


def test_sources_are_described_by_their_settings_and_data():
    pools = [generate_puzzles(2, givens=60, seed=seed) for seed in (0, 1)]
    chains = [MarkovChain.random(num_states=8, num_successors=3, seed=seed) for seed in (0, 1)]
    sources = [
        *(SudokuSource(pool=pool, seed=seed) for pool in pools for seed in (0, 1)),
        *(MarkovSource(chain=chain, length=length) for chain in chains for length in (5, 6)),
    ]
    lines = [describe(source) for source in sources]
    assert len(set(lines)) == 8
    assert lines[0].startswith("SudokuSource(pool=Puzzles(puzzles=int8 (2, 81) crc32 ")


def test_an_optimizer_is_described_by_what_decides_its_update():
    weight = torch.nn.Parameter(torch.zeros(2))
    adam, sgd = functools.partial(torch.optim.AdamW, [weight]), functools.partial(torch.optim.SGD, [weight])
    lines = [describe_optimizer(o) for o in (adam(lr=0.1), adam(lr=0.2), adam(lr=0.1, eps=1e-6), sgd(lr=0.1))]
    assert len(set(lines)) == 4
    assert describe_optimizer(adam(lr=0.1, foreach=True)) == lines[0]
    assert describe_optimizer(adam(lr=torch.tensor(0.5), foreach=False)) == describe_optimizer(adam(lr=0.5))
