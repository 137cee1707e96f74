"""The auxiliary loss that keeps experts at work: its gradient, its effect, and nothing left behind."""

from dataclasses import replace

import torch

from dgemma.model import presets
from dgemma.model.experts import Router
from dgemma.train import balanced_routers


def make_router() -> Router:
    torch.manual_seed(0)
    return Router(replace(presets.tiny(), hidden_size=16, num_experts=4, top_k_experts=2)).double()


def test_the_gradient_is_that_of_the_auxiliary_loss():
    router, x = make_router(), torch.randn(50, 16, dtype=torch.float64)
    with balanced_routers(router, 0.3):
        (router(x).weights.sum() * 0).backward()
    found = router.proj.weight.grad.clone()
    router.zero_grad()
    routing = router(x)
    share = torch.nn.functional.one_hot(routing.experts, 4).double().mean((0, 1))
    (0.3 * 4 * (share * routing.probabilities.mean(0)).sum()).backward()
    torch.testing.assert_close(found, router.proj.weight.grad)


def test_the_forward_pass_does_not_change_and_nothing_is_left_behind():
    router, x = make_router(), torch.randn(50, 16, dtype=torch.float64)
    plain = router(x)
    with balanced_routers(router, 0.3):
        balanced = router(x)
        assert len(router._forward_hooks) == 1
    for name in plain._fields:
        assert torch.equal(getattr(plain, name), getattr(balanced, name))
    assert not router._forward_hooks
    with balanced_routers(router, 0.0):
        assert not router._forward_hooks
