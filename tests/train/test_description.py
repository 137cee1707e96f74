"""What is said of a run tells it from every other, and is the same in the next process."""

import datetime
import functools
import os
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from dgemma.data.markov import MarkovChain, MarkovSource
from dgemma.data.sudoku import SudokuSource, generate_puzzles
from dgemma.diffusion.noise import HybridNoise, MaskNoise
from dgemma.train.description import describe, describe_optimizer
from dgemma.train.objective import Objective


@dataclass
class Holder:
    held: object


class Pair(NamedTuple):
    first: object
    second: object


class Rows(list[object]):
    """A list of its own kind."""


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
        functools.partial(small, 4),
        functools.partial(small, 4, key=5),
        functools.partial(Silent, 4),
        Holder,
        np.array([Silent(), "a", {1}], dtype=object),
        np.array([Silent(), "b", {1}], dtype=object),
        np.array({"b", "a"}, dtype=object),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array(["2020-01-02"], dtype="datetime64[D]"),
        np.array([("2020-01-01",)], dtype=[("day", "datetime64[D]")]),
        np.array([("2020-01-02",)], dtype=[("day", "datetime64[D]")]),
        np.zeros(2, dtype="V0"),
        np.longdouble(1.25),
        datetime.date(2020, 1, 1),
        Rows([1, 2]),
        Pair(1, Silent()),
        deque([1, 2]),
        deque([1, 2], maxlen=2),
        SimpleNamespace(a=1, b=Silent()),
        torch.eye(3).to_sparse(),
        torch.eye(3).mul(2).to_sparse(),
        torch.eye(4).to_sparse_csr(),
        torch.eye(4).to_sparse_csc(),
        torch.eye(4).to_sparse_bsr((2, 2)),
        torch.empty(3, device="meta"),
        torch.empty((), device="meta"),
        torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)]),
        torch.tensor([1j, 2]).conj(),
        [*map(str, range(5000))],
        torch.float32,
    ]


@pytest.mark.filterwarnings("ignore:.*(beta|prototype) sta")
def test_values_are_told_apart_and_named_alike_whenever_they_are_made():
    first, second = ([describe(Holder(value)) for value in small()] for _ in range(2))
    assert first == second
    assert len(set(first)) == len(first)
    assert all(len(line) < 1100 and " at 0x" not in line for line in first)


def test_sets_are_told_in_one_order_wherever_they_lie():
    words = """{"alpha", "beta", "gamma", "delta", "epsilon"}"""
    program = f"""if True:
        from collections import deque, namedtuple
        from types import SimpleNamespace
        import functools, numpy as np
        from dgemma.train.description import describe
        words, Rows, Pair = {words}, type("Rows", (list,), {{}}), namedtuple("Pair", "a b")
        array = np.array([words, 1], dtype=object)
        print(describe([Pair(words, 1), Rows([words]), deque([words]), SimpleNamespace(a=words), array,
                        functools.partial(print, words, end=words)]))
    """
    lines = {
        subprocess.check_output([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, text=True)
        for seed in ("1", "2")
    }
    assert len(lines) == 1


def test_a_text_is_no_address():
    assert describe("seen at 0x1") == "'seen at 0x1'"


def test_one_number_or_word_of_a_long_list_is_noticed():
    for data, other in ([*range(5000)], -1), ([*map(str, range(5000))], "word"), ([0.5] * 5000, np.float64(0.25)):
        changed = [*data]
        changed[4000] = other
        assert describe(data) != describe(changed)
        assert describe(data).startswith(repr(data)[:60])


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
