"""Choices of experts and their groups, in plain PyTorch and in training."""

import pytest
import torch

from dgemma.doors import plain
from dgemma.model import presets
from dgemma.model.attention import attend
from dgemma.model.experts import Experts, choose_experts, group_by_expert, grouped_product, weigh_choices
from dgemma_kernels.training import experts as training
from dgemma_kernels.training.attention import attend_by_products


@pytest.mark.parametrize("is_compiling", [False, True])
@pytest.mark.parametrize("top_k", [1, 3])
def test_choices_in_training_equal_the_plain_ones_in_values_and_gradients(top_k, is_compiling, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)  # compiled layers compare instead of topk
    logits = torch.randn(50, 5, dtype=torch.float64, requires_grad=True)
    scales = torch.rand(5, dtype=torch.float64, requires_grad=True)
    ours, theirs = (choose(logits, scales, top_k) for choose in (training.choose_experts, plain(choose_experts)))
    assert torch.equal(ours.experts, theirs.experts)
    probes = [torch.randn_like(value) for value in theirs[:2]]
    found = []
    for routing in (ours, theirs):
        total = sum((value * probe).sum() for value, probe in zip(routing[:2], probes, strict=True))
        found.append((routing[:2], torch.autograd.grad(total, (logits, scales))))
    torch.testing.assert_close(*found)


def test_a_router_weighs_the_experts_that_an_earlier_pass_chose():
    logits, chosen = torch.randn(7, 5), torch.rand(7, 5).topk(2).indices
    with training.known(torch.empty(7, 3), chosen):
        routing = training.choose_experts(logits, torch.ones(5), 2)
    assert torch.equal(routing.experts, chosen)
    torch.testing.assert_close(routing, weigh_choices(logits.softmax(-1), torch.ones(5), chosen))


@pytest.mark.parametrize("num_experts", [1, 4, 17])  # 1: nothing to sort; 4: by counting; 17: by sorting
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
@pytest.mark.parametrize("group", [group_by_expert, training.group_by_expert], ids=["plain", "training"])
def test_choices_are_grouped_by_expert_in_their_order(group, num_experts, num_tokens):
    experts = torch.randint(num_experts, (num_tokens, 2))
    groups = group(experts, num_experts)
    chosen = experts.flatten().tolist()
    order = sorted(range(len(chosen)), key=chosen.__getitem__)
    assert groups.order.tolist() == order
    assert groups.order[groups.back].flatten().tolist() == list(range(len(chosen)))
    assert groups.ends.tolist() == [sum(c <= expert for c in chosen) for expert in range(num_experts)]
    assert groups.ends.dtype == torch.int32


def test_experts_wait_for_the_host_only_if_torch_has_no_grouped_product_for_them():
    config = presets.tiny().replace(hidden_size=16, moe_intermediate_size=4, num_experts=2, top_k_experts=1)
    narrow = Experts(config)
    assert not training.waits(narrow, torch.float32)
    assert training.waits(narrow, torch.bfloat16)  # rows of 8 bytes
    assert training.waits(narrow, torch.float64)
    assert not training.waits(Experts(config.replace(num_experts=1)), torch.float64)


@pytest.mark.parametrize(("num_queries", "mask"), [(7, "causal"), (5, None)], ids=["causal", "all"])
def test_attention_by_products_equals_torchs_forward_and_backward(num_queries, mask):
    generator = torch.Generator().manual_seed(4)
    shapes = (2, num_queries, 6, 16), (2, 2, 7, 16), (2, 2, 7, 16)  # six query heads share two key heads
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes)
    expected, out = attend(q, k, v, mask), attend_by_products(q, k, v, causal=mask == "causal")
    torch.testing.assert_close(out, expected)
    seen = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    gradients = (torch.autograd.grad(x, (q, k, v), seen) for x in (out, expected))
    torch.testing.assert_close(*gradients)


def test_frozen_experts_cost_no_gradient_of_their_weights(monkeypatch):
    monkeypatch.setattr(training, "grouped_outer", lambda *_: pytest.fail("computed the gradient of frozen weights"))
    rows, weights = torch.randn(9, 8, requires_grad=True), torch.randn(4, 12, 8)
    ends = torch.tensor([3, 3, 8, 9], dtype=torch.int32)
    for product in (training.product_by_group, grouped_product):
        grad = torch.autograd.grad(product(rows, weights, ends).sum(), rows)[0]
        torch.testing.assert_close(grad[3:8], weights[2].sum(0).expand(5, -1))
