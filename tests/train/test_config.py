"""Impossible settings are refused; the description of a run differs between runs and agrees between processes."""

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from dgemma.data.sudoku import SudokuSource, generate_puzzles
from dgemma.train.checkpoints import describe_optimizer
from dgemma.train.config import TrainConfig
from dgemma.values import identify


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch_size": 10**9}, "batch_size must be <= 1048576, got 1000000000"),
        ({"steps": None}, "steps must be None exactly if minutes is set, got None"),
        ({"minutes": 3}, "steps must be None exactly if minutes is set, got 5"),
        *(
            ({"steps": None, "minutes": minutes}, "TrainConfig.minutes must be")
            for minutes in (0, -1, math.nan, math.inf, 1e307)
        ),
    ],
)
def test_an_impossible_configuration_is_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        TrainConfig(**({"steps": 5, "batch_size": 2} | changes))


@dataclass
class Holder:
    content: object


class Silent:
    """An object whose repr shows only its address."""


class Printed:
    """An object identified by its fingerprint."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint


def values() -> list[object]:
    array = np.arange(6, dtype=np.int32)
    return [
        *(None, "text", 3, 0.5, Path("a"), (1,), [1, 2], {"a": 1}, {"b", "a", "c"}, torch.float32),
        *(array, array.astype(np.int64), array.reshape(2, 3), array[::-1]),
        *(torch.arange(6.0), torch.arange(6.0).bfloat16(), torch.tensor(2.5), [torch.arange(3), torch.arange(4)]),
        *("long " * 1000, list(range(5000)), [*map(str, range(5000))]),
        *(values, Silent(), Printed("one"), Printed("two"), Holder, Holder(3), functools.partial(Silent, 4)),
        *(functools.partial(values, 3), functools.partial(values, 4), functools.partial(values, 4, key=5)),
    ]


def test_different_values_have_different_descriptions_and_equal_values_the_same():
    first, second = ([identify(Holder(value)) for value in values()] for _ in range(2))
    assert first == second
    lines = list(map(json.dumps, first))
    assert len(set(lines)) == len(lines)
    assert all(len(line) < 1100 and " at 0x" not in line for line in lines)


def test_the_order_of_a_set_does_not_matter():
    one, other = (
        {0, 8},
        {8, 0},
    )  # 0 and 8 have the same hash slot, so the order of insertion matters; for strings, the order differs per process
    assert list(one) != list(other)
    assert identify([one, {"key": one}]) == identify([other, {"key": other}])
    assert identify(functools.partial(print, one, end=one)) == identify(functools.partial(print, other, end=other))


def test_a_change_of_one_element_changes_the_description_of_an_array():
    data = np.zeros(100_000, dtype=np.float32)
    before = identify(Holder([data]))
    data[70_000] = 1e-30
    assert identify(Holder([data])) != before


def test_functions_and_objects_without_a_repr_are_described_by_name_alone():
    def define(text):
        space = {}
        exec(text, space)
        return space["source"]

    one, other = define("def source(step, rows): return 1"), define("def source(step, rows, seed=3): return 2")
    assert identify(one) == identify(other) == "source"
    assert identify(one) != identify(values)
    assert identify(Holder("text").__eq__) == "Holder.__eq__"
    silent = Silent()
    silent.seed = 3
    assert identify(silent) == identify(Silent()) == "Silent"
    # A partial function adds its arguments.
    assert identify(functools.partial(one, seed=3)) != identify(functools.partial(one, seed=4))


def test_sources_are_described_by_their_settings_and_data():
    pools = [generate_puzzles(2, givens=60, seed=seed) for seed in (0, 1)]
    described = [identify(SudokuSource(pool=pool, seed=seed)) for pool in pools for seed in (0, 1)]
    assert len(set(map(json.dumps, described))) == 4
    assert described[0]["pool"]["puzzles"].startswith("int8 (2, 81) crc32 ")


def test_an_optimizer_is_described_by_the_settings_that_change_its_update():
    weight = torch.nn.Parameter(torch.zeros(2))
    adam, sgd = functools.partial(torch.optim.AdamW, [weight]), functools.partial(torch.optim.SGD, [weight])
    described = [describe_optimizer(o) for o in (adam(lr=0.1), adam(lr=0.2), adam(lr=0.1, eps=1e-6), sgd(lr=0.1))]
    assert len(set(map(json.dumps, described))) == 4
    assert describe_optimizer(adam(lr=0.1, foreach=True)) == described[0]
    assert describe_optimizer(adam(lr=torch.tensor(0.5), foreach=False)) == describe_optimizer(adam(lr=0.5))
