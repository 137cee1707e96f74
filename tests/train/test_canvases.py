"""Canvases before any noise: their positions, their fill, and whether rows are aligned."""

import pytest
import torch
from torch import Tensor

from dgemma.train import TrainBatch
from dgemma.train.canvases import Canvases, cut_canvases


def cut(
    prompt_len: list[int], length: list[int], *, choose: list[float] | None = None, documents: Tensor | None = None
) -> Canvases:
    tokens = torch.arange(5, 5 + 20).expand(len(length), -1)
    lengths = {"prompt_len": torch.tensor(prompt_len), "length": torch.tensor(length)}
    return cut_canvases(
        TrainBatch(tokens=tokens, documents=documents, **lengths),
        canvas_len=4,
        fill_token=1,
        choose=None if choose is None else torch.tensor(choose),
        truncated="scored",
        causal_scope=None,
    )


@pytest.mark.parametrize(
    ("prompt_len", "length", "aligned"),
    [
        ([6, 6], [10, 7], True),  # one canvas each, at 6
        ([0, 0], [4, 1], True),
        ([6, 6], [10, 11], False),  # a second canvas, at 10
        ([6, 5], [10, 9], False),
        ([6, 2], [10, 2], False),  # a row without an answer still starts at 2
        ([6, 6], [6, 6], False),  # no canvas at all
    ],
)
def test_rows_are_aligned_if_each_has_one_canvas_right_after_the_prefix(prompt_len, length, aligned):
    assert cut(prompt_len, length).aligned is aligned


def test_the_fill_belongs_to_the_document_before_it():
    documents = torch.tensor([[7] * 5 + [8] * 4 + [3] * 11])
    canvases = cut([1], [9], documents=documents)  # canvases at 1 and 5, then nothing
    assert canvases.documents[0].tolist() == [[7] * 5 + [8] * 4]
    shorter = cut([1], [7], documents=documents)
    assert shorter.documents[1][0, 1].tolist() == [8] * 4
    padded = cut([1], [6], documents=torch.tensor([[7] * 5 + [8] + [3] * 14]))
    assert padded.documents[1][0, 1].tolist() == [8] * 4
