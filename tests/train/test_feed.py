"""Rows and their seeds: the same however the batch is cut."""

import torch

from dgemma.train.feed import feed, row_seeds
from next_token import counting


def test_a_rows_seed_depends_on_run_step_and_row_alone():
    whole = row_seeds(3, 7, range(8))
    assert torch.equal(torch.cat((row_seeds(3, 7, range(3)), row_seeds(3, 7, range(3, 8)))), whole)
    others = [row_seeds(3, 8, range(8)), row_seeds(4, 7, range(8)), row_seeds(3, 7, range(8, 16))]
    assert len(torch.cat([whole, *others]).unique()) == 32
    assert (whole >= 0).all()


def test_micro_batches_together_are_the_process_share_of_the_step():
    steps = list(
        feed(counting, seed=0, rows=range(2, 7), micro_batch_size=2, steps=range(3, 6), device=torch.device("cpu"))
    )
    assert [[part.batch.batch_size for part in step.parts] for step in steps] == [[2, 2, 1]] * 3
    for number, step in zip(range(3, 6), steps, strict=True):
        expected = counting(number, range(2, 7))
        assert torch.equal(torch.cat([part.batch.tokens for part in step.parts]), expected.tokens)
        assert step.num_tokens == int(expected.length.sum())
        assert torch.equal(torch.cat([part.seeds for part in step.parts]), row_seeds(0, number, range(2, 7)))
