"""Rows and their seeds: the same however the batch is cut."""

import multiprocessing
import os
from dataclasses import replace

import pytest
import torch

from dgemma.train.feed import feed, row_seeds
from next_token import counting


def test_a_rows_seed_depends_on_run_step_and_row_alone():
    whole = row_seeds(3, 7, range(8))
    assert torch.equal(torch.cat((row_seeds(3, 7, range(3)), row_seeds(3, 7, range(3, 8)))), whole)
    others = [row_seeds(3, 8, range(8)), row_seeds(4, 7, range(8)), row_seeds(3, 7, range(8, 16))]
    assert len(torch.cat([whole, *others]).unique()) == 32
    assert (whole >= 0).all()


CUT = {"seed": 0, "rows": range(2, 7), "micro_batch_size": 2, "device": torch.device("cpu")}


@pytest.mark.parametrize("in_process", [False, True])
def test_micro_batches_together_are_the_process_share_of_the_step(in_process):
    steps = list(feed(counting, **CUT, steps=range(3, 6), in_process=in_process))
    assert [[part.batch.batch_size for part in step.parts] for step in steps] == [[2, 2, 1]] * 3
    for number, step in zip(range(3, 6), steps, strict=True):
        expected = counting(number, range(2, 7))
        assert torch.equal(torch.cat([part.batch.tokens for part in step.parts]), expected.tokens)
        assert step.num_tokens == int(expected.length.sum())
        assert torch.equal(torch.cat([part.seeds for part in step.parts]), row_seeds(0, number, range(2, 7)))


@pytest.mark.parametrize("in_process", [False, True])
def test_who_makes_the_rows_and_that_the_global_generator_stays(in_process):
    def source(step, rows):
        return replace(counting(step, rows), text=torch.full((len(rows),), os.getpid()))

    before = torch.get_rng_state()
    inputs = feed(source, **CUT, steps=range(10**9), in_process=in_process)
    makers = torch.cat([next(inputs).parts[0].batch.text for _ in range(3)])
    inputs.close()
    assert torch.equal(torch.get_rng_state(), before)
    assert (makers == makers[0]).all()
    assert (makers[0] != os.getpid()) == in_process
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("in_process", [False, True])
def test_a_source_that_fails_is_heard_of(in_process):
    def source(step, rows):
        raise KeyError("no such text")

    with pytest.raises(KeyError, match="no such text"):
        next(feed(source, **CUT, steps=range(3), in_process=in_process))
