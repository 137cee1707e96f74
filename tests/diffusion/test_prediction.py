"""Every statistic of a prediction against torch.distributions or arithmetic by hand."""

import numpy as np
import pytest
import torch
from torch.distributions import Categorical

from dgemma import Prediction
from dgemma.diffusion.prediction import SoftCap


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(2, 5, 37, generator=torch.Generator().manual_seed(0)) * 3


def test_statistics_equal_those_of_torch_distributions(logits):
    prediction, reference = Prediction(logits), Categorical(logits=logits)
    torch.testing.assert_close(prediction.entropy, reference.entropy())
    assert torch.equal(prediction.argmax, reference.probs.argmax(-1))
    best = reference.probs.sort(-1, descending=True).values
    torch.testing.assert_close(prediction.confidence, best[..., 0])
    torch.testing.assert_close(prediction.margin, best[..., 0] - best[..., 1])
    tokens = torch.randint(0, 37, (2, 5))
    torch.testing.assert_close(prediction.log_prob(tokens), reference.log_prob(tokens))
    several = torch.randint(0, 37, (2, 5, 3))
    expected = torch.stack([reference.log_prob(several[..., i]) for i in range(3)], dim=-1)
    torch.testing.assert_close(prediction.log_prob(several), expected)
    top = prediction.top(4)
    torch.testing.assert_close(top.probabilities, best[..., :4])
    torch.testing.assert_close(reference.probs.gather(-1, top.tokens), best[..., :4])


def test_reading_positions_in_slices_gives_the_same_statistics(logits, monkeypatch):
    whole = Prediction(logits).shaped(temperature=torch.tensor([0.5, 2.0]))
    expected = (whole.entropy, whole.argmax, whole.sample(torch.full((2, 5), 0.3)), whole.top(3).tokens)
    monkeypatch.setattr("dgemma.diffusion.prediction._SLICE_ELEMENTS", 2 * 37 * 2)  # two positions at a time
    sliced = Prediction(logits).shaped(temperature=torch.tensor([0.5, 2.0]))
    assert len(sliced._slices()) == 3
    found = (sliced.entropy, sliced.argmax, sliced.sample(torch.full((2, 5), 0.3)), sliced.top(3).tokens)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


# A small vocabulary is one slice; a vocabulary of 262,144 tokens has one slice per position.
@pytest.mark.parametrize(("slice_elements", "times"), [(1 << 24, 1), (2 * 37, 3)], ids=["small", "large"])
def test_a_small_prediction_is_shaped_once_and_a_large_one_never_kept(logits, monkeypatch, slice_elements, times):
    monkeypatch.setattr("dgemma.diffusion.prediction._SLICE_ELEMENTS", slice_elements)
    seen = []

    def count(piece: torch.Tensor, positions: slice) -> torch.Tensor:
        seen.append(piece.numel())
        return piece + 0

    prediction = Prediction(logits, (count,))
    assert prediction.entropy.shape == prediction.sample(torch.rand(2, 5)).shape
    assert sum(piece.numel() for piece in prediction.pieces()) == logits.numel()
    assert sum(seen) == times * logits.numel()


def test_the_entropy_of_a_nearly_certain_position_keeps_its_digits():
    logits = torch.zeros(1, 1, 50)
    logits[..., 7] = 25.3  # h = 1.3e-8 nats, a hundredth of the float32 spacing of logits near 25
    exact = Categorical(logits=logits.double()).entropy()
    torch.testing.assert_close(Prediction(logits).entropy.double(), exact, rtol=1e-5, atol=0)


def test_temperature_is_per_row_and_divides(logits):
    shaped = Prediction(logits).shaped(temperature=torch.tensor([0.5, 2.0]))
    torch.testing.assert_close(shaped.logits[0], logits[0] / 0.5)
    torch.testing.assert_close(shaped.logits[1], logits[1] / 2.0)
    assert shaped.shape == logits.shape
    torch.testing.assert_close(shaped.shaped(temperature=3.0).logits[0], logits[0] / 1.5)


@pytest.mark.parametrize("form", ["vocab", "positions", "rows"])
def test_forbidden_tokens_have_no_probability_and_no_entropy(logits, form):
    allowed = torch.zeros(37, dtype=torch.bool)
    allowed[[3, 4, 9]] = True
    mask = {"vocab": allowed, "positions": allowed.expand(5, 37), "rows": allowed.expand(2, 5, 37)}[form]
    shaped = Prediction(logits).shaped(allowed=mask)
    reference = Categorical(logits=logits[..., [3, 4, 9]])
    torch.testing.assert_close(shaped.entropy, reference.entropy())
    assert torch.isin(shaped.argmax, torch.tensor([3, 4, 9])).all()
    assert torch.isin(shaped.sample(torch.rand(2, 5)), torch.tensor([3, 4, 9])).all()
    single = torch.zeros(37, dtype=torch.bool)
    single[7] = True
    assert (Prediction(logits).shaped(allowed=single).entropy == 0).all()


def test_top_k_and_top_p_keep_the_smallest_set_that_reaches_the_mass():
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])
    prediction = Prediction(probabilities.log()[None, None])
    assert torch.isfinite(prediction.shaped(top_k=2).logits).sum() == 2
    # 0.4 + 0.3 < 0.75 <= 0.4 + 0.3 + 0.2, so three tokens
    kept = prediction.shaped(top_p=0.75)
    torch.testing.assert_close(kept.logits.softmax(-1)[0, 0, :3], torch.tensor([0.4, 0.3, 0.2]) / 0.9)
    assert torch.isfinite(kept.logits).sum() == 3
    assert torch.isfinite(prediction.shaped(top_p=1e-6).logits).sum() == 1
    with pytest.raises(ValueError, match="top_p must be in"):
        prediction.shaped(top_p=0.0)
    with pytest.raises(ValueError, match="top_k must be >= 1"):
        prediction.shaped(top_k=0)


# Under one chunk of the two-level sum, exactly one, one more, and several.
@pytest.mark.parametrize("vocab", [7, 1024, 1025, 5000])
def test_sampling_is_the_inverse_cdf_in_vocabulary_order(vocab):
    logits = torch.randn(1, 3, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    cells = np.cumsum(torch.softmax(logits.double(), -1).numpy(), axis=-1)
    for u in (0.0, 0.1, 0.5, 0.9, 0.999999, np.nextafter(1.0, 0.0)):
        expected = [min(int(np.searchsorted(row, u, side="right")), vocab - 1) for row in cells[0]]
        assert Prediction(logits.double()).sample(torch.full((1, 3), u, dtype=torch.float64))[0].tolist() == expected


def test_a_uniform_at_the_upper_end_never_leaves_the_support():
    logits = torch.full((1, 1, 3000), -torch.inf)
    logits[..., 5] = 1.0
    assert Prediction(logits).sample(torch.tensor([[1.0 - 2**-53]], dtype=torch.float64)).item() == 5
    assert Prediction(logits).sample(torch.zeros(1, 1, dtype=torch.float64)).item() == 5


def test_ties_go_to_the_lowest_id():
    assert Prediction(torch.zeros(1, 1, 9)).argmax.item() == 0


def test_the_soft_cap_is_applied_before_any_shaping():
    raw = torch.tensor([[[100.0, 0.0, -40.0]]])
    shaped = Prediction(raw, (SoftCap(30.0),)).shaped(temperature=0.5)
    expected = 30.0 * np.tanh(np.array([100.0, 0.0, -40.0]) / 30.0) / 0.5
    np.testing.assert_allclose(shaped.logits[0, 0].numpy(), expected, rtol=1e-6)


def test_low_precision_logits_are_described_in_float32(logits):
    half = logits.bfloat16()
    assert Prediction(half).entropy.dtype == torch.float32
    torch.testing.assert_close(Prediction(half).entropy, Categorical(logits=half.float()).entropy())


def test_reading_without_gradients_does_not_remove_later_gradients(logits):
    tokens = torch.zeros(2, 5, dtype=torch.long)

    def gradient(look: bool) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        prediction = Prediction(leaf).shaped(temperature=0.7)
        if look:
            with torch.no_grad():
                assert prediction.entropy.shape == prediction.logits.shape[:2]
        (prediction.log_prob(tokens).sum() + prediction.logits.square().sum()).backward()
        return leaf.grad

    torch.testing.assert_close(gradient(look=True), gradient(look=False))


def test_gradients_of_the_statistics_equal_those_of_torch_distributions(logits):
    """The entropy has a large weight, as in a ranking of positions: no gradient of a forbidden token may overflow."""
    allowed = torch.arange(37) % 4 > 0
    ours, theirs = (logits.double().requires_grad_() for _ in range(2))
    shaped = Prediction(ours).shaped(allowed=allowed, temperature=0.7)
    reference = Categorical(logits=theirs[..., allowed] / 0.7)
    best = reference.probs.sort(-1, descending=True).values
    (20 * shaped.entropy + shaped.confidence + 2 * shaped.margin).sum().backward()
    (20 * reference.entropy() + best[..., 0] + 2 * (best[..., 0] - best[..., 1])).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_not_positive_and_finite_is_refused(temperature):
    with pytest.raises(ValueError, match=r"Prediction\.shaped temperature must be finite and > 0, got .* Use \.argmax"):
        Prediction(torch.randn(1, 2, 5)).shaped(temperature=temperature)
