"""Products of tokens with the weights and adapters of their experts, against float64."""

import pytest
import torch

from dgemma.model.experts import group_by_expert
from dgemma.model.layers import gated_gelu
from dgemma_kernels.ops.grouped import contract_and_outer, group_choices, multiply_rows, multiply_tokens, reference

EXPERTS, TOKENS, CHOICES, WIDTH = 6, 40, 2, 128


@pytest.fixture
def groups(device):
    """Choices of five of six experts, so that one group is empty."""
    scores = torch.rand(TOKENS, EXPERTS - 1, generator=torch.Generator().manual_seed(1))
    return group_by_expert(scores.topk(CHOICES).indices.to(device), EXPERTS)


@pytest.mark.parametrize("rank", [8, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_tokens_match_float64(device, groups, rank, transposed):
    generator = torch.Generator().manual_seed(rank)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device, torch.float16)

    x, narrow = draw(TOKENS, WIDTH), draw(TOKENS * CHOICES, rank)
    weights, b = draw(EXPERTS, 144, WIDTH), draw(EXPERTS, 144, rank)
    if transposed:
        weights, b = draw(EXPERTS, WIDTH, 144).transpose(1, 2), draw(EXPERTS, rank, 144).transpose(1, 2)
    inputs = x, weights, narrow, b
    got = multiply_tokens(*inputs, groups.order, groups.ends)
    want = reference.multiply_tokens(*(each.double() for each in inputs), groups.order, groups.ends)
    assert ((got.double() - want).norm() / want.norm()).item() < 2e-3
    if not transposed:
        got = multiply_tokens(*inputs, groups.order, groups.ends, gated=True)
        want = gated_gelu(*want.chunk(2, dim=-1))
        assert ((got.double() - want).norm() / want.norm()).item() < 2e-3


@pytest.mark.parametrize("num_out", [8, 144, 272])  # one thin tile; no narrower last tile; a narrower last tile
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_products_of_grouped_rows_match_float64(device, groups, num_out, transposed, adapted):
    generator = torch.Generator().manual_seed(4)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device, torch.float16)

    rows, narrow = draw(TOKENS * CHOICES, WIDTH), draw(TOKENS * CHOICES, 8)
    weights, b = draw(EXPERTS, num_out, WIDTH), draw(EXPERTS, num_out, 8)
    if transposed:
        weights, b = draw(EXPERTS, WIDTH, num_out).transpose(1, 2), draw(EXPERTS, 8, num_out).transpose(1, 2)
    adapters = (narrow, b) if adapted else ()
    got = multiply_rows(rows, weights, groups.ends, *adapters)
    want = reference.multiply_rows(rows.double(), weights.double(), groups.ends, *(x.double() for x in adapters))
    assert ((got.double() - want).norm() / want.norm()).item() < 2e-3


def test_products_of_grouped_rows_are_scaled_by_a_number_and_by_row(device, groups):
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(TOKENS * CHOICES, WIDTH, generator=generator).to(device, torch.float16)
    weights = torch.randn(EXPERTS, 8, WIDTH, generator=generator).to(device, torch.float16)
    by_row = torch.rand(TOKENS * CHOICES, generator=generator).to(device)
    got = multiply_rows(rows, weights, groups.ends, scale=0.3, by_row=by_row)
    want = reference.multiply_rows(rows.double(), weights.double(), groups.ends, scale=0.3, by_row=by_row.double())
    assert ((got.double() - want).norm() / want.norm()).item() < 2e-3


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_both_gradients_of_an_adapter_match_float64(device, groups, transposed, weighted):
    generator = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device, torch.float16)

    rows, narrow = draw(TOKENS * CHOICES, 192), draw(TOKENS * CHOICES, 8)  # a second block of columns, partly filled
    weights = draw(EXPERTS, 8, 192).mT if transposed else draw(EXPERTS, 192, 8)
    by_row = torch.rand(TOKENS * CHOICES, generator=generator).to(device) if weighted else None
    got = contract_and_outer(rows, narrow, weights, groups.ends, scale=0.3, by_row=by_row)
    exact = rows.double(), narrow.double(), weights.double()
    want = reference.contract_and_outer(
        *exact, groups.ends, scale=0.3, by_row=None if by_row is None else by_row.double()
    )
    for ours, theirs in zip(got, want, strict=True):
        assert ((ours.double() - theirs).norm() / theirs.norm()).item() < 2e-3
    assert got[1].stride() == weights.stride()


def test_other_widths_are_refused(device, groups):
    x, narrow = torch.zeros(TOKENS, 96, device=device), torch.zeros(TOKENS * CHOICES, 8, device=device)
    with pytest.raises(ValueError, match="inputs in multiples of 64"):
        multiply_tokens(
            x,
            torch.zeros(EXPERTS, 16, 96, device=device),
            narrow,
            torch.zeros(EXPERTS, 16, 8, device=device),
            groups.order,
            groups.ends,
        )


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
