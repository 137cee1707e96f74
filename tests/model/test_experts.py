"""Routing among few experts finds the order of choices by comparing and counting, not by sorting."""

import pytest
import torch

from dgemma.model import presets
from dgemma.model.experts import Experts, _choose_among_few, group_by_expert


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_choosing_among_few_experts_equals_topk_in_values_and_gradients(top_k):
    scores, scales = torch.randn(50, 5, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    scores[:5, :2] = scores[:5, :1]  # two equal experts
    probabilities = scores.softmax(-1).requires_grad_()
    scales.requires_grad_()
    weights, scale, experts = _choose_among_few(probabilities, scales.expand(50, 5), top_k)
    expected, _ = probabilities.topk(top_k)
    assert torch.equal(weights, expected)
    assert torch.equal(probabilities.gather(1, experts), expected)
    assert torch.equal(scale, scales[experts])
    assert all(len(set(chosen)) == top_k for chosen in experts.tolist())
    probe = torch.randn_like(weights)
    ours = torch.autograd.grad((weights * scale * probe).sum(), (probabilities, scales))
    by_index = probabilities.gather(1, experts) * scales[experts] * probe
    torch.testing.assert_close(ours, torch.autograd.grad(by_index.sum(), (probabilities, scales)))


@pytest.mark.parametrize("num_experts", [1, 4, 17])  # 1: nothing to sort; 4: by counting; 17: by sorting
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_choices_are_grouped_by_expert_in_their_order(num_experts, num_tokens):
    experts = torch.randint(num_experts, (num_tokens, 2))
    groups = group_by_expert(experts, num_experts)
    chosen = experts.flatten().tolist()
    order = sorted(range(len(chosen)), key=chosen.__getitem__)
    assert groups.order.tolist() == order
    assert groups.order[groups.back].flatten().tolist() == list(range(len(chosen)))
    assert groups.ends.tolist() == [sum(c <= expert for c in chosen) for expert in range(num_experts)]
    assert groups.ends.dtype == torch.int32


def test_experts_wait_for_the_host_only_if_torch_has_no_grouped_product_for_them():
    config = presets.tiny().replace(hidden_size=16, moe_intermediate_size=4, num_experts=2, top_k_experts=1)
    narrow = Experts(config)
    assert not narrow.waits(torch.float32)
    assert narrow.waits(torch.bfloat16)  # rows of 8 bytes
    assert narrow.waits(torch.float64)
    assert not Experts(config.replace(num_experts=1)).waits(torch.float64)
