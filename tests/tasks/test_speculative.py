"""Self-speculation has the law of the causal mode, whatever its drafts are."""

import itertools

import pytest
import torch

import dgemma
import next_token
from dgemma.tasks import speculative
from dgemma.tasks.speculative import generate_speculative
from learning_toy import HEAT, small_model

PROMPTS = torch.tensor([[2, 9, 17, 5], [2, 30, 11, 8], [3, 3, 3, 3]])


@pytest.mark.parametrize("draft_steps", [1, 2])
def test_its_law_is_the_causal_one(monkeypatch, draft_steps):
    """The uniforms that give a text fill a box, whose sides are the causal probabilities. Both corners of every box."""
    model = small_model(vocab_size=4, canvas_length=3)
    texts = torch.tensor(list(itertools.product(range(4), repeat=3)))
    prompts = torch.tensor([[1, 2]]).expand(len(texts), -1)
    causal = (model.causal_logits(torch.cat((prompts, texts), 1))[:, 1:-1].double() / HEAT).softmax(-1).detach()
    high = causal.cumsum(-1).gather(-1, texts[..., None])[..., 0]
    low = high - causal.gather(-1, texts[..., None])[..., 0]
    assert float((high - low).prod(1).sum()) == pytest.approx(1.0, abs=1e-12)  # the boxes fill the cube
    uniforms = torch.cat((low + 1e-6, high - 1e-6))
    monkeypatch.setattr(speculative, "_uniforms", lambda seeds, numbers: uniforms)
    options = {"max_new_tokens": 3, "temperature": HEAT, "eos_token_ids": [], "draft_steps": draft_steps}
    assert torch.equal(generate_speculative(model, prompts.repeat(2, 1), **options).new_tokens, texts.repeat(2, 1))


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 1}, {"temperature": 0.5, "top_p": 0.8}, {"eos_token_ids": [7, 8]}, {"max_new_tokens": 5}],
    ids=str,
)
@pytest.mark.parametrize("kind", ["uniform", "mask"])
def test_its_tokens_are_those_of_generate_causal(options, kind):
    model = next_token.model(torch.float64)
    if kind == "mask":
        noise = {"kind": "mask", "mask_token_id": 4}
        model.generation = dgemma.GenerationDefaults(max_new_tokens=20, noise=noise)
    options = {"max_new_tokens": 20, "seed": 3, "eos_token_ids": [], **options}
    got = generate_speculative(model, PROMPTS, **options)
    assert torch.equal(got.new_tokens, dgemma.generate_causal(model, PROMPTS, **options))
    assert (got.forwards <= 2 * (options["max_new_tokens"] + model.config.canvas_length)).all()


def test_a_good_draft_saves_forwards(monkeypatch):
    """If the draft is what the causal mode draws, one verification keeps the whole canvas."""
    model = next_token.model(torch.float64)
    options = {"max_new_tokens": 8, "top_k": 1, "eos_token_ids": []}
    text = dgemma.generate_causal(model, PROMPTS, **options)
    known = torch.cat((PROMPTS[:, -1:], text[:, :-1]), 1)
    logits = torch.nn.functional.one_hot(known, next_token.VOCAB).double() * 50
    monkeypatch.setattr(model, "denoise", lambda canvas, cache, self_cond=None: dgemma.Prediction(logits))
    got = generate_speculative(model, PROMPTS, **options)
    assert torch.equal(got.new_tokens, text)
    assert got.forwards.tolist() == [2, 2, 2]
