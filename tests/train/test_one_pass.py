"""All canvases in one pass equal the loop that defines them: `encode` the text before each, then `denoise` it."""

import pytest
import torch
from torch import Tensor

import dgemma
from dgemma import DiffusionGemma
from dgemma.model.config import Conventions
from dgemma.train.one_pass import canvas_masks, predict_canvases, read_clean

CANVAS_LEN = 6
# Rows start at different positions. The last canvases are far beyond the window of 7, so sliding layers must forget.
STARTS = torch.tensor([[5, 11, 17, 23], [0, 6, 12, 18], [9, 15, 21, 27]])
TEXT_LEN = 30


def make_model(**options) -> DiffusionGemma:
    config = dgemma.presets.tiny().replace(vocab_size=80, canvas_length=CANVAS_LEN, sliding_window=7, num_experts=4)
    model = DiffusionGemma(config, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # far from the identity, so that a wrong mask changes the result
        for layer in model.layers:  # so that the two modes differ
            layer.layer_scalar.fill_(0.9)
            layer.causal_layer_scalar.fill_(0.6)
    return model


def make_inputs() -> tuple[Tensor, Tensor]:
    return torch.randint(5, 80, (3, TEXT_LEN)), torch.randint(5, 80, (*STARTS.shape, CANVAS_LEN))


def looped(model: DiffusionGemma, tokens: Tensor, canvases: Tensor, signal: Tensor | None = None) -> Tensor:
    """Return the logits (B, K, C, V) of each canvas alone, by `encode` and `denoise`."""
    rows = []
    for row in range(tokens.shape[0]):
        logits = []
        for k, start in enumerate(STARTS[row].tolist()):
            cache = model.encode(tokens[row : row + 1, :start])
            self_cond = None if signal is None else signal[row : row + 1, k]
            logits.append(model.denoise(canvases[row : row + 1, k], cache, self_cond=self_cond).logits)
        rows.append(torch.stack(logits, dim=1))
    return torch.cat(rows)


def packed(model: DiffusionGemma, tokens: Tensor, canvases: Tensor, signal: Tensor | None = None) -> Tensor:
    soft = None if signal is None else model.soft_embedding(signal.flatten(1, 2)).unflatten(1, signal.shape[1:3])
    hidden = predict_canvases(model, canvases, STARTS, read_clean(model, tokens), signal=soft)
    return (hidden @ model.embed_tokens.weight.T / 30).tanh() * 30


@pytest.mark.parametrize(
    ("sliding_prefix", "with_signal"), [("window - 1", False), ("window", True)], ids=["plain", "self-conditioned"]
)
def test_one_pass_equals_the_loop_over_canvases_in_values_and_gradients(sliding_prefix, with_signal):
    model = make_model(conventions=Conventions(sliding_prefix=sliding_prefix), dtype=torch.float64)
    tokens, canvases = make_inputs()
    signal = torch.randn(*canvases.shape, 80, dtype=torch.float64) if with_signal else None
    probe = torch.randn(*canvases.shape, 80)
    actual, expected = packed(model, tokens, canvases, signal), looped(model, tokens, canvases, signal)
    # The tolerance allows for float64 sums in another order, through three layers.
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    names = [name for name, _ in model.named_parameters()]
    weights = list(model.parameters())
    of_packed = torch.autograd.grad((actual * probe).sum(), weights, allow_unused=True)
    of_loop = torch.autograd.grad((expected * probe).sum(), weights, allow_unused=True)
    for name, ours, theirs in zip(names, of_packed, of_loop, strict=True):
        if ours is None and theirs is None:  # self-conditioning without a signal
            continue
        error = (ours - theirs).norm() / theirs.norm().clamp(min=1e-6)
        assert error < 1e-9, (name, error)  # relative to the size of the gradient


@pytest.mark.parametrize("length", [7, 8], ids=["inside-the-window", "past-the-window"])
def test_a_text_shorter_than_the_window_needs_no_mask(length):
    model = make_model(dtype=torch.float64)
    tokens = make_inputs()[0][:, :length]
    masked = read_clean(model, tokens, documents=torch.zeros_like(tokens))
    plain = read_clean(model, tokens)
    torch.testing.assert_close(plain.hidden, masked.hidden, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("start", [0, 6, 7, 20], ids=["no-prefix", "just-inside", "just-past", "past-the-window"])
def test_aligned_rows_need_no_mask(start):
    model = make_model()
    tokens, canvases = make_inputs()
    clean = read_clean(model, tokens).first(start)
    starts = torch.full((3, 1), start)
    masked = predict_canvases(model, canvases[:, :1], starts, clean)
    masks = canvas_masks(model, starts, CANVAS_LEN, start, aligned=True)
    aligned = predict_canvases(model, canvases[:, :1], starts, clean, masks)
    torch.testing.assert_close(aligned, masked, atol=1e-5, rtol=1e-5)
    looped = model.denoise(canvases[:, 0], model.encode(tokens[:, :start])).logits
    logits = (aligned[:, 0] @ model.embed_tokens.weight.T / 30).tanh() * 30
    torch.testing.assert_close(logits, looped, atol=2e-4, rtol=2e-4)
