"""Choices grouped by expert, and their tiles."""

import pytest
import torch

from dgemma_kernels.ops.grouped import group_choices, reference


# 4 and 52 choices: less than one block of 256; 1,200: five blocks, the last not full.
@pytest.mark.parametrize("num_tokens", [1, 13, 300])
def test_choices_are_grouped_as_by_a_stable_sort(device, num_tokens):
    scores = torch.rand(num_tokens, 29, generator=torch.Generator().manual_seed(num_tokens))
    experts = scores.topk(4).indices.to(device)  # the last three experts are not chosen
    got, want = group_choices(experts, 32), reference.group_choices(experts, 32)
    for ours, theirs in zip(got[:3], want, strict=False):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


# Two experts with at most 144 rows on average have tiles of at most 160 rows; with more, of at most 288.
@pytest.mark.parametrize("sizes", [(1, 287), (0, 288), (1, 289), (161, 128), (320, 321), (545, 577), (3, 3000)])
def test_tiles_cover_the_rows_of_each_expert_as_the_reference(device, sizes):
    experts = torch.arange(2).repeat_interleave(torch.tensor(sizes)).to(device)
    experts = experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(1)).to(device)][:, None]
    tiles, want = group_choices(experts, 2)[3], reference.group_choices(experts, 2)[3]
    assert tiles[0, :2].tolist() == [len(want) - 1, 0]
    assert torch.equal(tiles[1 : len(want)], want[1:])
    most, row = (160 if sum(sizes) <= 288 else 288), 0
    for expert, first, num_rows in want[1:].tolist():
        assert first == row
        assert 0 < num_rows <= most
        row += num_rows
        assert row <= sum(sizes[: expert + 1])
    assert row == sum(sizes)
    assert len(want) - 1 == sum(-(-size // most) for size in sizes)  # as few as possible
