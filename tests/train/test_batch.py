"""Impossible batches are refused; spans follow the lengths; rows and seeds do not depend on how a batch is cut."""

from dataclasses import replace

import pytest
import torch

from dgemma.train.batch import TrainBatch, feed, row_seeds
from next_token import counting


def make(prompt_len: list[int], length: list[int], num_tokens: int = 9) -> TrainBatch:
    tokens = torch.arange(len(length) * num_tokens).view(len(length), num_tokens)
    return TrainBatch(tokens=tokens, prompt_len=torch.tensor(prompt_len), length=torch.tensor(length))


@pytest.mark.parametrize(
    ("prompt_len", "length", "named"),
    [
        ([1, 1], [9, 10], r"got \(1, 10\)"),  # row 1 has only 9 tokens
        ([4, 1], [3, 9], r"got \(4, 3\)"),
        ([-1, 1], [9, 9], r"got \(-1, 9\)"),
        ([1], [9, 9], r"prompt_len must be torch.int64 of shape \(2,\) on cpu, got torch.int64 of shape \(1,\)"),
        ([], [], r"tokens must .*, got torch.int64 of shape \(0, 9\)"),
    ],
)
def test_an_impossible_batch_is_refused(prompt_len, length, named):
    with pytest.raises(ValueError, match=named):
        make(prompt_len, length)


def test_a_row_may_be_all_prompt_or_all_answer_or_empty():
    assert make([9, 0, 0], [9, 9, 0]).spans == ((9, 9), (0, 9), (0, 0))


def test_spans_follow_the_lengths_and_are_not_read_from_the_device():
    batch = make([1, 2, 3], [9, 8, 7])
    shorter = replace(batch, length=torch.tensor([1, 2, 3]))
    assert shorter.spans == ((1, 1), (2, 2), (3, 3))
    assert batch.select(torch.tensor([2, 0])).spans == ((3, 7), (1, 9))
    with_text = replace(batch, images=(None, None, None), text=torch.arange(3)).select(
        torch.tensor([False, True, True])
    )
    assert (with_text.spans, with_text.text.tolist(), len(with_text.images)) == (((2, 8), (3, 7)), [1, 2], 2)
    frozen = replace(batch, frozen=torch.ones_like(batch.tokens, dtype=torch.bool)).to("meta")
    assert (frozen.spans, frozen.host_frozen.all()) == (batch.spans, True)  # meta tensors have no values to read
    assert replace(frozen, frozen=frozen.frozen.clone()).host_frozen is None


def test_a_rows_seed_depends_on_run_step_and_row_alone():
    whole = row_seeds(3, 7, range(8))
    assert torch.equal(torch.cat((row_seeds(3, 7, range(3)), row_seeds(3, 7, range(3, 8)))), whole)
    others = [row_seeds(3, 8, range(8)), row_seeds(4, 7, range(8)), row_seeds(3, 7, range(8, 16))]
    assert len(torch.cat([whole, *others]).unique()) == 32
    assert (whole >= 0).all()


def test_micro_batches_add_up_to_the_rows_of_the_process():
    steps = list(
        feed(
            counting,
            seed=0,
            rows=range(2, 7),
            micro_batch_size=2,
            steps=range(3, 6),
            vocab_size=1000,
            device=torch.device("cpu"),
        )
    )
    assert [[part.batch.batch_size for part in step] for step in steps] == [[2, 2, 1]] * 3
    for number, step in zip(range(3, 6), steps, strict=True):
        expected = counting(number, range(2, 7))
        assert torch.equal(torch.cat([part.batch.tokens for part in step]), expected.tokens)
        assert torch.equal(torch.cat([part.seeds for part in step]), row_seeds(0, number, range(2, 7)))
