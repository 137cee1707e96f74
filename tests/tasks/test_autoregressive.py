"""Autoregressive generation draws every token from the distribution given the whole text before it."""

import itertools
from pathlib import Path

import pytest
import torch

import dgemma
import next_token

PROMPTS = torch.tensor([[2, 9, 17, 5], [2, 30, 11, 8]])


@pytest.fixture(scope="module")
def model():
    return next_token.model()


def from_scratch(model, tokens):
    """The next token's probabilities, computed without a cache, one row at a time; (B, V)."""
    rows = [model.causal_logits(row[None])[0, -1] for row in tokens]
    return torch.stack(rows).softmax(-1)


def test_greedy_generation_takes_the_argmax_at_every_token(model):
    written = dgemma.generate_causal(model, PROMPTS, max_new_tokens=40, top_k=1, eos_token_ids=[])
    assert written.shape == (2, 40)  # longer than the sliding window
    text = PROMPTS
    for token in written.T:
        assert torch.equal(token, from_scratch(model, text).argmax(-1))
        text = torch.cat([text, token[:, None]], dim=1)


def test_tokens_are_drawn_with_their_probabilities(model):
    count = 4000
    prompts = PROMPTS[:1].expand(count, -1)
    written = dgemma.generate_causal(model, prompts, max_new_tokens=2, temperature=0.7, eos_token_ids=[])
    first = from_scratch(model, PROMPTS[:1])[0].pow(1 / 0.7)
    first /= first.sum()
    # 4 standard deviations of a frequency; 32 tokens are compared
    found = written[:, 0].bincount(minlength=next_token.VOCAB) / count
    assert ((found - first).abs() <= 4 * (first * (1 - first) / count).sqrt()).all()
    likeliest = int(first.argmax())
    second = from_scratch(model, torch.cat([PROMPTS[:1], torch.tensor([[likeliest]])], dim=1))[0].pow(1 / 0.7)
    second /= second.sum()
    after = written[written[:, 0] == likeliest, 1]
    found = after.bincount(minlength=next_token.VOCAB) / len(after)
    assert ((found - second).abs() <= 4 * (second * (1 - second) / len(after)).sqrt()).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_does_not_depend_on_its_batch(model, side):
    short = PROMPTS[1:, :2]
    alone = dgemma.generate_causal(model, short, max_new_tokens=8, seed=[5], eos_token_ids=[])
    padding = (2, 0) if side == "left" else (0, 2)
    padded = torch.cat([PROMPTS[:1], torch.nn.functional.pad(short, padding)])
    mask = torch.cat([torch.ones(1, 4), torch.nn.functional.pad(torch.ones(1, 2), padding)]).long()
    batch = dgemma.generate_causal(model, padded, attention_mask=mask, max_new_tokens=8, seed=[4, 5], eos_token_ids=[])
    assert torch.equal(batch[1:], alone)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{}, {"top_k": 1}, {"top_p": 0.9}], ids=["all", "top-k", "top-p"])
def test_nan_logits_stop_the_run_at_the_token_where_they_appear(monkeypatch, value, options):
    model, num_calls = next_token.model(), itertools.count()
    read = model.causal_logits

    def overflow(*args):
        logits = read(*args)
        if next(num_calls) == 2:
            logits[1] = value
        return logits

    monkeypatch.setattr(model, "causal_logits", overflow)
    sentence = r"^Prediction\.entropy must be a number, got NaN at token 2, row 1\. Check the weights"
    with pytest.raises(FloatingPointError, match=sentence):
        dgemma.generate_causal(model, PROMPTS, max_new_tokens=3, eos_token_ids=[], **options)


def test_a_row_is_padded_after_its_stop_token_whatever_is_predicted_there(monkeypatch):
    model = next_token.model()
    free = dgemma.generate_causal(model, PROMPTS, max_new_tokens=12, seed=3, eos_token_ids=[])
    read, stop = model.causal_logits, int(free[0, 4])
    assert stop not in free[0, :4]

    def overflow(*args):
        logits = read(*args)
        if args[0].shape[1] == 1:
            logits[args[0][:, 0] == model.generation.pad_token_id] = torch.nan
        return logits

    monkeypatch.setattr(model, "causal_logits", overflow)
    stopped = dgemma.generate_causal(model, PROMPTS[:1], max_new_tokens=12, seed=3, eos_token_ids=stop)
    assert torch.equal(stopped, free[:1, :5])  # the only row has ended
    both = dgemma.generate_causal(model, PROMPTS, max_new_tokens=12, seed=3, eos_token_ids=stop)
    assert torch.equal(both[0, :5], free[0, :5])
    assert (both[0, 5:] == model.generation.pad_token_id).all()


def test_the_shipped_page_of_samples_equals_the_checkpoints_output():
    model = dgemma.DiffusionGemma.from_pretrained("dgemma/text", dtype=torch.float32)
    tokenizer = dgemma.Tokenizer.from_pretrained("dgemma/text")
    page = (Path(dgemma.__file__).parent / "assets" / "text" / "samples.md").read_text()
    prompt, mask = tokenizer.encode_batch(["It was a dark night, and the old captain"])
    written = dgemma.generate_causal(model, prompt, attention_mask=mask, max_new_tokens=16, temperature=0.8)
    assert f"**It was a dark night, and the old captain**{tokenizer.decode(written[0])}" in page
