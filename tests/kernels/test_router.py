"""Routing and the sort by expert, against float64 and a sort by hand; `test_half_layer` has transformers' router."""

import pytest
import torch
import triton
from torch import Tensor

from dgemma_kernels.ops.router import kernel as router
from dgemma_kernels.ops.router import reference as router_reference
from kernel_inputs import NUM_EXPERTS, draw_routing

# (tokens, width, experts, active): one token; the published 8 of 128; ragged everywhere; every expert active.
# Widths are one block of the split depth, several blocks, and several with a ragged last block.
SHAPES = [(1, 64, 8, 2), (35, 256, 128, 8), (18, 512, 12, 3), (70, 600, 12, 3), (5, 72, 4, 4)]


def draw(tokens: int, width: int, experts: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens + experts)
    x = torch.randn(tokens, width, generator=generator) * width**-0.5
    proj = torch.randn(experts, width, generator=generator) * 2
    scale = torch.rand(experts, generator=generator) + 0.5
    return tuple(t.to(dtype).to(device) for t in (x, proj, scale))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_route_matches_float64(shape, device):
    tokens, width, experts, active = shape
    inputs = draw(tokens, width, experts, torch.float32, device)
    weights, index, counts = router.route(*inputs, active)
    want_weights, want_index, _ = router_reference.route(*(t.double() for t in inputs), active)
    assert torch.equal(index, want_index)
    assert counts.sum(0).tolist() == [index.eq(expert).sum().item() for expert in range(experts)]
    assert (weights - want_weights).norm() / want_weights.norm() < 1e-6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_route_in_float16_loses_at_most_rounding_in_the_score_of_its_experts(shape, device):
    tokens, width, experts, active = shape
    inputs = draw(tokens, width, experts, torch.float16, device)
    _, index, _ = router.route(*inputs, active)
    scores = inputs[0].double() @ inputs[1].double().T
    chosen = scores.gather(1, index.long()).sum(-1)
    best = scores.topk(active, dim=-1).values.sum(-1)
    # A float16 score is off by at most 2**-11. The i-th chosen expert can score two errors less than the i-th best.
    assert (best - chosen).max() <= 2 * active * scores.abs().max() * 2**-11
    assert all(len(set(row)) == active for row in index.tolist())


def test_a_token_routes_the_same_alone_and_in_any_batch(device):
    inputs = draw(70, 600, 12, torch.float16, device)
    weights, index, _ = router.route(*inputs, 3)
    alone = router.route(inputs[0][37:38], *inputs[1:], 3)
    assert torch.equal(weights[37:38], alone[0])
    assert torch.equal(index[37:38], alone[1])


@pytest.mark.slow
def test_many_tokens_are_routed_like_few(device, monkeypatch):
    inputs = draw(70, 600, 12, torch.float16, device)
    few = router.route(*inputs, 3)
    monkeypatch.setattr(router, "MANY_ROWS", 64)
    many, one_order = router.route(*inputs, 3), router.route(*inputs, 3, one_order=True)
    assert all(torch.equal(a, b) for a, b in zip(few, one_order, strict=True))
    # Their sums have another order, so a score may round differently, by 2**-11 of scores of about 6.
    assert (many[1] != few[1]).float().mean() < 0.01
    same = (many[1] == few[1]).all(1)
    torch.testing.assert_close(many[0][same], few[0][same], rtol=5e-3, atol=0)
    assert many[2].sum() == few[2].sum()


def test_the_lower_expert_wins_a_tie(device):
    x = torch.ones(3, 16, device=device)
    _, index, _ = router.route(x, torch.ones(20, 16, device=device), torch.ones(20, device=device), 5)
    assert index.tolist() == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.skipif(
    not torch.cuda.is_available() and not triton.__version__.startswith("3.6"),
    reason="later interpreters raise for a maximum over NaN only, which GPUs define",
)
def test_nan_scores_still_give_existing_experts(device):
    x = torch.full((2, 16), float("nan"), device=device)
    _, index, _ = router.route(x, torch.ones(20, 16, device=device), torch.ones(20, device=device), 5)
    assert index.min() >= 0
    assert index.max() < 20


def test_the_lower_expert_wins_among_zero_probabilities(device):
    # With scores of 0, 200, ..., 3,800 one expert has probability one and all others zero.
    proj = 200 * torch.arange(20.0, device=device)[:, None].expand(20, 16).contiguous() / 16
    weights, index, _ = router.route(torch.ones(2, 16, device=device), proj, torch.ones(20, device=device), 4)
    assert index.tolist() == [[19, 0, 1, 2]] * 2
    assert weights.tolist() == [[1, 0, 0, 0]] * 2


@pytest.mark.parametrize(("tokens", "experts"), [(100, 12), (330, 200)], ids=["two-rows", "more-than-1024-counts"])
def test_counts_match_the_tokens_of_their_row(tokens, experts, device):
    # Rows of 64 tokens, the last with fewer.
    _, index, counts = router.route(*draw(tokens, 16, experts, torch.float32, device), 3)
    chunks = [chunk.flatten().tolist() for chunk in index.split(64)]
    assert counts.tolist() == [[chunk.count(expert) for expert in range(experts)] for chunk in chunks]


ROUTINGS = {name: draw_routing(name) for name in ("one-token", "even", "two-experts-have-no-rows")}
ROUTINGS["all-to-one-expert"] = torch.full((600, 1), 5).int()  # 38 tiles of 16 rows; a program writes 32 at a time
ROUTINGS["several-counts"] = ROUTINGS["even"].repeat(4, 1)  # three rows of counts, the last with fewer tokens


@pytest.mark.parametrize("rows_per_tile", [16, 32])
@pytest.mark.parametrize("name", ROUTINGS)
def test_tiles_contain_every_pair_once_in_stable_order(name, rows_per_tile, device):
    index = ROUTINGS[name].to(device)
    counts = router_reference.count_pairs(index, NUM_EXPERTS)
    tiles = router.sort_by_expert(index, counts, rows_per_tile)
    by_hand = sorted(range(index.numel()), key=lambda pair: index.flatten()[pair].item())
    assert tiles.pairs.tolist() == by_hand
    used = [entry for entry in tiles.tiles.tolist() if entry[2]]
    assert tiles.tiles[len(used) :].eq(0).all()
    covered = [pair for _, first, rows in used for pair in tiles.pairs[first : first + rows].tolist()]
    assert covered == by_hand
    for expert, first, rows in used:
        assert 1 <= rows <= rows_per_tile
        assert (index.flatten()[tiles.pairs[first : first + rows].long()] == expert).all()
    # The fewest tiles with one expert per tile.
    assert len(used) == sum(-(-n // rows_per_tile) for n in index.flatten().bincount().tolist())
    want = router_reference.sort_by_expert(index, counts, rows_per_tile)
    assert torch.equal(tiles.pairs, want.pairs)
    assert torch.equal(tiles.tiles, want.tiles)
    assert torch.equal(tiles.finished, torch.zeros_like(tiles.tiles[:, 0]))
    assert tiles.queue.tolist() == [0, (tiles.tiles[:, 2] > 0).sum()]


def test_the_sort_does_not_depend_on_how_counts_are_loaded(monkeypatch, device):
    index = ROUTINGS["even"].repeat(14, 1).to(device)
    monkeypatch.setattr(router, "_COUNT_ROWS_PER_LOAD", 1)
    counts = router_reference.count_pairs(index, NUM_EXPERTS)
    assert len(counts) == 2
    tiles = router.sort_by_expert(index, counts, 16)
    assert tiles.pairs.tolist() == index.flatten().argsort(stable=True).tolist()
    assert torch.equal(tiles.tiles, router_reference.sort_by_expert(index, counts, 16).tiles)
