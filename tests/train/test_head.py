"""The sliced head equals torch's cross-entropy of the whole logits, and never allocates them."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import dgemma
from dgemma import DiffusionGemma
from dgemma.diffusion.prediction import Prediction, SoftCap
from dgemma.model.config import Conventions
from dgemma.train import head

CAP = 3.0  # low, so that the cap changes these logits


def capped(hidden: Tensor, weight: Tensor) -> Tensor:
    return CAP * torch.tanh(hidden @ weight.T / CAP)


def inputs(num_tokens: int, vocab: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(num_tokens, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, 8, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(0, vocab, (num_tokens,))


@pytest.fixture
def slices(monkeypatch):
    """Return a function that sets the number of logits of a slice."""
    return lambda elements: monkeypatch.setattr(head, "_SLICE_ELEMENTS", elements)


class LargestFloat(TorchDispatchMode):
    """Records the size of the largest floating-point tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.elements = max(self.elements, leaf.numel())
        return out


@pytest.mark.parametrize("num_tokens", [1, 12, 13], ids=["one", "whole-slices", "ragged"])
@pytest.mark.parametrize("banned", [None, 4])
@pytest.mark.parametrize("with_evidence", [False, True])
def test_value_and_gradient_are_those_of_the_plain_formula(slices, num_tokens, banned, with_evidence):
    slices(4 * 11)
    hidden, weight, targets = inputs(num_tokens, 11)
    targets = torch.where(targets == 4, 5, targets)
    observed, evidence, logits = None, None, capped(hidden, weight)
    if with_evidence:
        observed, evidence = torch.randint(0, 11, (num_tokens,)), 3 * torch.rand(num_tokens, dtype=torch.float64)
        logits = logits + F.one_hot(observed, 11) * evidence[:, None]
    if banned is not None:
        logits = logits.masked_fill(F.one_hot(torch.tensor(banned), 11).bool(), -torch.inf)
    expected = F.cross_entropy(logits, targets, reduction="none")
    options = {"cap": CAP, "observed": observed, "evidence": evidence, "banned": banned}
    results = [head.cross_entropy(hidden, weight, targets, **options)]
    if banned is None and not with_evidence:  # the same loss as a function of the logits
        plain = functools.partial(F.cross_entropy, reduction="none")
        results.append(head.map_logits(plain, hidden, weight, targets, cap=CAP))
    scale = torch.randn(num_tokens, dtype=torch.float64)  # a different weight for the gradient of every token
    gradients = torch.autograd.grad((expected * scale).sum(), (hidden, weight))
    for actual in results:
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
        found = torch.autograd.grad((actual * scale).sum(), (hidden, weight))
        torch.testing.assert_close(found, gradients, atol=1e-12, rtol=1e-12)


def test_a_frozen_head_gets_no_gradient_and_hidden_states_get_theirs(slices):
    slices(4 * 9)
    hidden, weight, targets = inputs(6, 9)
    scale = torch.randn(6, dtype=torch.float64)  # a different weight for the gradient of every token
    expected = (F.cross_entropy(capped(hidden, weight), targets, reduction="none") * scale).sum()
    loss = (head.cross_entropy(hidden, weight.detach(), targets, cap=CAP) * scale).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], torch.autograd.grad(expected, hidden)[0])


def entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.distributions.Categorical(logits=logits, validate_args=False).entropy()


@pytest.mark.parametrize("run", [head.cross_entropy, functools.partial(head.map_logits, entropy)])
def test_no_tensor_of_tokens_by_vocabulary_exists(slices, run):
    num_tokens, vocab = 64, 512
    hidden, weight, targets = inputs(num_tokens, vocab, torch.float32)
    slices(4 * vocab)
    with LargestFloat() as sliced:
        run(hidden, weight, targets, cap=CAP).sum().backward()
    # Four tokens per slice. The gradient of the weight, (V, D), is the largest tensor that is needed.
    assert sliced.elements <= max(4 * vocab, vocab * 8)
    assert sliced.elements <= num_tokens * vocab // 8
    slices(num_tokens * vocab)
    with LargestFloat() as whole:  # the recorder does see whole logits
        run(hidden, weight, targets, cap=CAP).sum().backward()
    assert whole.elements == num_tokens * vocab


def test_under_autocast_the_products_are_in_bfloat16_and_the_loss_in_float32():
    hidden, weight, targets = inputs(40, 30, torch.float32)
    expected = head.cross_entropy(hidden.bfloat16().float(), weight.bfloat16().float(), targets, cap=CAP)
    with torch.autocast("cpu", torch.bfloat16):
        actual = head.cross_entropy(hidden, weight, targets, cap=CAP)
    assert actual.dtype == torch.float32
    # The same inputs; the product is rounded to 8 bits, logits here reach 10 before the cap.
    torch.testing.assert_close(actual, expected, atol=0.05, rtol=0)
    actual.sum().backward()
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("self_cond_logits", ["rounded", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("allowed", [None, torch.arange(512) % 7 == 3], ids=["all tokens", "some"])
@pytest.mark.parametrize("num_rows", [4, 30], ids=["slices", "one-slice"])
def test_the_soft_embedding_is_the_models_and_trains_the_embedding_alone(
    slices, self_cond_logits, dtype, allowed, num_rows
):
    slices(num_rows * 512)
    conventions = Conventions(self_cond_logits=self_cond_logits)
    model = DiffusionGemma(dgemma.presets.tiny(), dtype=dtype, conventions=conventions)
    hidden = torch.randn(2, 3, 5, 64, dtype=dtype, requires_grad=True)
    actual = head.soft_embedding(model, hidden, allowed=allowed)
    raw = (hidden @ model.embed_tokens.weight.T).detach()
    prediction = Prediction(raw.flatten(0, 1), (SoftCap(30.0),)).shaped(allowed=allowed)
    expected = model.soft_embedding(prediction).unflatten(0, (2, 3))
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(actual, expected, **tolerance)
    probe = torch.randn_like(actual)
    (actual * probe).sum().backward()
    assert hidden.grad is None
    theirs = torch.autograd.grad((expected * probe).sum(), model.embed_tokens.weight)[0]
    assert (model.embed_tokens.weight.grad - theirs).norm() < tolerance["rtol"] * theirs.norm()
