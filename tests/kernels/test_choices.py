"""The router's choices, their weights and the gradient against float64."""

import pytest
import torch

import dgemma
from dgemma.model import experts as experts_module
from dgemma_kernels.ops.choices import choose_experts, group_choices, reference, weigh_choices, weigh_choices_gradient
from dgemma_kernels.training import experts as fast_experts
from dgemma_kernels.training.experts import known

TOKENS, EXPERTS, CHOICES = 13, 32, 4  # tokens fill no whole number of programs


def draw(device):
    generator = torch.Generator().manual_seed(3)
    logits = (2 * torch.randn(TOKENS, EXPERTS, generator=generator)).to(device)
    return logits, (torch.rand(EXPERTS, generator=generator) + 0.5).to(device)


def test_the_most_likely_experts_are_chosen_with_their_weights(device):
    logits, scales = draw(device)
    probabilities, weights, experts = choose_experts(logits, scales, CHOICES)
    exact = reference.choose_experts(logits.double(), scales.double(), CHOICES)
    assert torch.equal(experts, exact[2])
    torch.testing.assert_close((probabilities.double(), weights.double()), exact[:2], rtol=1e-5, atol=1e-7)


def test_of_equal_experts_the_first_are_chosen(device):
    logits = torch.zeros(TOKENS, EXPERTS, device=device)
    experts = choose_experts(logits, torch.ones(EXPERTS, device=device), CHOICES)[2]
    assert torch.equal(experts, torch.arange(CHOICES, device=device).expand(TOKENS, -1))


def test_a_token_whose_logits_are_nan_gets_valid_experts_and_nan_weights(device):
    logits, scales = draw(device)
    logits[5, 3] = float("nan")
    probabilities, weights, experts = choose_experts(logits, scales, CHOICES)
    assert experts.min() >= 0
    assert experts.max() < EXPERTS
    assert probabilities[5].isnan().all()
    assert weights[5].isnan().all()
    others = torch.arange(TOKENS, device=device) != 5
    want = reference.choose_experts(logits[others].double(), scales.double(), CHOICES)
    torch.testing.assert_close(weights[others].double(), want[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("with_probabilities", [False, True])
def test_weights_of_known_choices_and_their_gradient_match_float64(device, with_probabilities):
    logits, scales = draw(device)
    generator = torch.Generator().manual_seed(4)
    experts = torch.rand(TOKENS, EXPERTS, generator=generator).topk(CHOICES).indices.to(device)  # not the likeliest
    results = weigh_choices(logits, experts, scales)
    exact = reference.weigh_choices(logits.double(), experts, scales.double())
    torch.testing.assert_close(tuple(x.double() for x in results), exact, rtol=1e-5, atol=1e-7)
    grads = [torch.randn(x.shape, generator=generator).to(device) for x in results]
    of_probabilities = grads[0] if with_probabilities else None
    got = weigh_choices_gradient(grads[1], of_probabilities, logits, experts, scales)
    want = reference.weigh_choices_gradient(
        grads[1].double(),
        None if of_probabilities is None else grads[0].double(),
        logits.double(),
        experts,
        scales.double(),
    )
    assert ((got.double() - want).norm() / want.norm()).item() < 1e-5


@pytest.mark.parametrize("is_known", [False, True])
def test_a_router_has_the_same_choices_and_gradients_with_the_kernels(device, is_known, monkeypatch):
    config = dgemma.presets.tiny().replace(num_experts=32, top_k_experts=CHOICES)
    router = experts_module.Router(config).to(device)
    generator = torch.Generator().manual_seed(5)
    torch.nn.init.normal_(router.proj.weight, generator=torch.Generator(device).manual_seed(6))
    router.per_expert_scale.data = (torch.rand(32, generator=generator) + 0.5).to(device)
    router.scale.requires_grad_(False)
    router.per_expert_scale.requires_grad_(False)
    x = torch.randn(TOKENS, config.hidden_size, generator=generator).to(device)
    chosen = torch.rand(TOKENS, 32, generator=generator).topk(CHOICES).indices.to(device) if is_known else None
    slopes = [torch.randn(TOKENS, size, generator=generator).to(device) for size in (32, CHOICES)]
    results = []
    for use in (False, True):
        routed = experts_module.router_input(x, router.scale, router.eps)
        monkeypatch.setattr(fast_experts, "runs_kernels", lambda _, use=use: use)
        with known(routed, chosen):
            routing = fast_experts.choose_experts(router.proj(routed), router.per_expert_scale, router.top_k)
        total = sum((value * slope).sum() for value, slope in zip(routing[:2], slopes, strict=True))
        results.append([*routing, *torch.autograd.grad(total, [router.proj.weight])])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# 4 and 52 choices: less than one block of 256; 1,200: five blocks, the last not full.
@pytest.mark.parametrize("num_tokens", [1, 13, 300])
def test_choices_are_grouped_as_by_a_stable_sort(device, num_tokens):
    scores = torch.rand(num_tokens, EXPERTS - 3, generator=torch.Generator().manual_seed(num_tokens))
    experts = scores.topk(CHOICES).indices.to(device)  # the last three experts are not chosen
    got, want = group_choices(experts, EXPERTS), reference.group_choices(experts, EXPERTS)
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


def test_other_numbers_of_experts_are_refused(device):
    with pytest.raises(ValueError, match="power of two"):
        choose_experts(torch.zeros(2, 12, device=device), torch.ones(12, device=device), 2)
