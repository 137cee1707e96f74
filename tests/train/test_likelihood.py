"""The likelihood of texts equals the loop over canvases and the exact integral; intervals hold as often as stated."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import dgemma
from dgemma.diffusion.noise import HybridNoise, MaskNoise, UniformNoise
from dgemma.intervals import half_width
from dgemma.train import nelbo
from dgemma.train.batch import TrainBatch
from dgemma.train.estimates import mean_of_rows
from dgemma.train.likelihood import evaluate

VOCAB, MASK = 16, 15
CONFIG = dgemma.presets.tiny().replace(
    vocab_size=VOCAB,
    canvas_length=4,
    sliding_window=6,
    eos_token_id=1,
    num_hidden_layers=2,
    layer_types=("sliding_attention", "full_attention"),
    num_experts=4,
)
NOISES = {
    "mask": MaskNoise(VOCAB, mask_token_id=MASK),
    "uniform": UniformNoise(VOCAB),
    "hybrid": HybridNoise(VOCAB, mask_token_id=MASK),
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    model = dgemma.DiffusionGemma(CONFIG)
    with torch.no_grad():
        model.norm.weight.mul_(8)  # confident logits, so that a misplaced token changes the result
    return model


@pytest.fixture
def tokens():
    return torch.randint(2, MASK, (6, 9))


def causal_costs(model, tokens):
    """Return the cost of each token after the first, (B, T - 1)."""
    logits = model.causal_logits(tokens)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(len(tokens), -1)


def test_causal_likelihood_is_that_of_causal_logits(model, tokens):
    likelihood = evaluate(model, tokens, NOISES["mask"], num_samples=1)
    expected = causal_costs(model, tokens).double()
    torch.testing.assert_close(likelihood.rows.causal, expected.sum(1), atol=1e-4, rtol=0)
    assert likelihood.causal.value == pytest.approx(expected.mean().item(), abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize(
    ("conditioned", "self_cond"),
    [(False, False), (True, False), (False, True)],
    ids=["plain", "noise-conditioned", "self-conditioned"],
)
def test_bound_equals_the_loop_over_canvases_with_the_same_noise(kind, conditioned, self_cond, tokens, monkeypatch):
    """`encode` and `denoise` run on the canvases that `evaluate` made, including ragged rows."""
    noise = NOISES[kind]
    model = dgemma.DiffusionGemma(CONFIG.replace(noise_conditioning=conditioned))
    model.norm.weight.mul_(8)
    calls = []
    original = nelbo.integrand

    def listen(noise, logits, x, z, level, **keywords):
        nats = original(noise, logits, x, z, level, **keywords)
        calls.append((x, z, level, nats))
        return nats

    monkeypatch.setattr(nelbo, "integrand", listen)
    tokens, prompt_len, length = tokens[:4], torch.tensor([1, 3, 2, 1]), torch.tensor([9, 9, 8, 5])
    batch = TrainBatch(tokens=tokens, prompt_len=prompt_len, length=length)
    evaluate(model, batch, noise, num_samples=1, batch_size=4, self_cond=self_cond)
    canvases = zip(*(t.view(-1, 4) for t in calls[0]), strict=True)  # those with a scored token, in order
    filled = torch.where(torch.arange(12) < length[:, None], F.pad(tokens, (0, 3)), CONFIG.eos_token_id)
    for row in range(4):
        for canvas in range(-(-(length[row] - prompt_len[row]) // 4)):
            start = int(prompt_len[row]) + 4 * canvas
            x, z, level, nats = next(canvases)
            assert torch.equal(x, filled[row, start : start + 4])
            cache = model.encode(filled[row : row + 1, :start])
            first = model.denoise(z[None], cache, noise_level=level[:1])
            logits = first.logits
            if self_cond:
                proposable = None if kind == "uniform" else torch.arange(VOCAB) != MASK
                logits = model.denoise(z[None], cache, self_cond=first.shaped(allowed=proposable)).logits
            expected = original(noise, logits, x[None], z[None], level[:1])
            torch.testing.assert_close(nats, expected[0], atol=1e-4, rtol=1e-3)


def test_levels_and_positions_add_up_to_the_bound(model, tokens):
    for noise in NOISES.values():
        likelihood = evaluate(model, tokens, noise, num_samples=5)
        assert likelihood.by_level.nats.sum() + likelihood.reconstruction == pytest.approx(
            likelihood.nelbo.value, abs=1e-9
        )
        # All positions are equally frequent.
        assert likelihood.by_position.nats.mean() == pytest.approx(likelihood.nelbo.value, abs=1e-9)


def test_weights_that_are_nan_are_named_and_not_averaged(tokens):
    broken = dgemma.DiffusionGemma(CONFIG)
    torch.nn.init.constant_(broken.norm.weight, torch.nan)
    with pytest.raises(FloatingPointError, match="must be a number, got NaN in row 0 of the evaluation"):
        evaluate(broken, tokens, NOISES["mask"], num_samples=1)


def test_the_same_seed_gives_the_same_number_for_every_batch_size(model, tokens):
    first, again = (evaluate(model, tokens, NOISES["uniform"], batch_size=n, seed=5) for n in (6, 4))
    torch.testing.assert_close(first.rows.nats, again.rows.nats, atol=1e-4, rtol=1e-5)
    other = evaluate(model, tokens, NOISES["uniform"], seed=6)
    with pytest.raises(ValueError, match=r"evaluate seed must be an integer, or one per row, int64 \(6,\)"):
        evaluate(model, tokens, NOISES["uniform"], seed=torch.arange(7))
    assert (first.rows.nats - other.rows.nats).abs().max() > 1e-2


def test_lowering_the_lowest_level_only_moves_cost_from_the_text_itself_to_the_integral(model, tokens):
    """The noise is masks, and the network hardly reads its canvas.

    So drawing the text in one step at the lowest level costs as much as the part of the integral below that level.
    """
    rows = tokens.repeat(16, 1)
    high, low = (
        evaluate(model, rows, NOISES["mask"], num_samples=8, batch_size=96, lowest_level=level) for level in (0.3, 1e-4)
    )
    assert high.reconstruction > 100 * low.reconstruction
    assert high.reconstruction > 0.2 * high.nelbo.value
    assert high.nelbo.value == pytest.approx(low.nelbo.value, rel=0.1)


def test_frozen_and_truncated_tokens_are_not_scored(model, tokens):
    frozen = torch.zeros_like(tokens, dtype=torch.bool)
    frozen[:, 3] = True
    batch = TrainBatch(
        tokens=tokens,
        prompt_len=torch.ones(6, dtype=torch.int64),
        length=torch.tensor([9, 9, 9, 7, 7, 7]),
        truncated=torch.tensor([False] * 5 + [True]),
        frozen=frozen,
    )
    likelihood = evaluate(model, batch, NOISES["uniform"], num_samples=2)
    # Two canvases have 8 positions, and one token is frozen. Texts of 6 leave two positions. These are filled and
    # scored, except in the truncated text.
    assert likelihood.rows.tokens.tolist() == [7, 7, 7, 5, 5, 5]
    assert likelihood.rows.fill_tokens.tolist() == [0, 0, 0, 2, 2, 0]
    assert likelihood.by_position.nats[2] > 0
    assert likelihood.rows.tokens_by_position[:, 2].tolist() == [1, 1, 1, 1, 1, 0]


def test_fill_costs_nats_but_is_not_counted_among_the_tokens(model, tokens):
    """Texts of 6 tokens give the same sums if `evaluate` adds the fill or if the batch has it."""
    tokens[:, 6:] = CONFIG.eos_token_id
    ones = torch.ones(6, dtype=torch.int64)
    filled, written = (
        evaluate(
            model,
            TrainBatch(tokens=tokens, prompt_len=ones, length=length * ones),
            NOISES["mask"],
            num_samples=2,
            num_bytes=60,
        )
        for length in (6, 9)
    )
    assert (filled.num_tokens, filled.num_fill_tokens) == (30, 18)
    assert (written.num_tokens, written.num_fill_tokens) == (48, 0)
    assert filled.nelbo.value * 30 == pytest.approx(written.nelbo.value * 48)
    assert filled.causal.value * 30 == pytest.approx(causal_costs(model, tokens).sum().item(), rel=1e-4)
    assert filled.bits_per_byte.value == pytest.approx(written.bits_per_byte.value)
    assert filled.causal_bits_per_byte.value == pytest.approx(filled.rows.causal.sum().item() / 60 / math.log(2))
    torch.testing.assert_close(filled.by_position.nats, written.by_position.nats)
    marked = TrainBatch(tokens=tokens, prompt_len=ones, length=9 * ones, fill=(torch.arange(9) >= 6).expand(6, 9))
    same = evaluate(model, marked, NOISES["mask"], num_samples=2)
    assert (same.num_tokens, same.num_fill_tokens) == (30, 18)
    assert same.nelbo == pytest.approx(filled.nelbo)
    assert same.causal == pytest.approx(filled.causal)
    assert "30 tokens and 18 of fill in 6 rows" in str(filled)
    assert filled.summary()["num_fill_tokens"] == 18
    assert filled.summary()["causal_bits_per_byte"] == filled.causal_bits_per_byte.value


@pytest.mark.parametrize("prompt", [0, 1, 5])
def test_rows_without_an_answer_change_nothing_in_any_batch(model, tokens, prompt):
    prompt_len = torch.tensor([1, 1, 1, prompt, prompt, prompt])
    batch = TrainBatch(tokens=tokens, prompt_len=prompt_len, length=torch.tensor([9, 9, 9, prompt, prompt, prompt]))
    alone, together, apart = (
        evaluate(model, rows, NOISES["mask"], num_samples=1, batch_size=size)
        for rows, size in ((batch.select(slice(0, 3)), 3), (batch, 6), (batch, 3))
    )
    assert alone.nelbo.value == pytest.approx(together.nelbo.value, rel=1e-5)
    assert alone.nelbo.value == pytest.approx(apart.nelbo.value, rel=1e-5)
    assert apart.rows.tokens.tolist() == [8, 8, 8, 0, 0, 0]
    with pytest.raises(ValueError, match="must have a token to score"):
        evaluate(model, batch.select(slice(3, 6)), NOISES["mask"], num_samples=1)


def test_a_gap_is_measured_per_row(model, tokens):
    likelihood = evaluate(model, tokens, NOISES["mask"], num_samples=2, progress=False)
    per_token = 0.25
    gap = likelihood.gap(likelihood.rows.nats - per_token * likelihood.rows.tokens)
    assert gap.value == pytest.approx(per_token, abs=1e-9)
    assert gap.error == pytest.approx(0.0, abs=1e-6)
    assert likelihood.nelbo.error > 0.01  # the rows themselves differ


def test_intervals_over_texts_hold_when_rows_of_a_text_are_alike():
    """600 samples of 60 texts of one to six rows, which share a common deviation."""
    hits, hits_of_rows = 0, 0
    for _ in range(600):
        clusters = torch.arange(60).repeat_interleave(torch.randint(1, 7, (60,)))
        tokens = torch.randint(1, 5, (len(clusters), 1)).double()
        nats = tokens * (2 + torch.randn(60, 1).double()[clusters]) + torch.randn_like(tokens) * tokens.sqrt()
        over_texts = mean_of_rows(torch.zeros(2), nats, tokens, 0.9, clusters=clusters)
        over_rows = mean_of_rows(torch.zeros(2), nats, tokens, 0.9)
        assert over_texts.nats == over_rows.nats
        hits += abs(over_texts.nats.item() - 2) < over_texts.error.item()
        hits_of_rows += abs(over_rows.nats.item() - 2) < over_rows.error.item()
    # 90 % is expected; 600 samples have a standard deviation of 1.2 %, and 60 clusters cover slightly less.
    assert 0.85 < hits / 600 < 0.94
    assert hits_of_rows / 600 < 0.8


@pytest.mark.parametrize(
    ("confidence", "degrees", "tabulated"),
    [
        *((0.95, 1, 12.7062), (0.95, 2, 4.3027), (0.95, 3, 3.1824), (0.99, 5, 4.0321), (0.9, 4, 2.1318)),
        *((0.95, 30, 2.0423), (0.999, 6, 5.9588), (0.95, 120, 1.9799), (0.95, 10**6, 1.9600)),
    ],
)
def test_half_widths_are_those_of_the_tables(confidence, degrees, tabulated):
    assert half_width(confidence, degrees) == pytest.approx(tabulated, abs=1e-4)


def test_one_noise_level_of_one_row_has_no_interval(model, tokens):
    likelihood = evaluate(model, tokens[:1], NOISES["mask"], num_samples=1)
    assert likelihood.nelbo.error == math.inf
    table = str(likelihood)
    assert table.startswith("8 tokens in 1 row, 1 noise level per canvas\n")
    assert "inf" not in table
    assert "diffusion, estimate" in table


def test_evaluate_takes_the_rows_of_one_text_together(model, tokens):
    length = torch.full((6,), 9)
    batch = TrainBatch(tokens=tokens, prompt_len=torch.ones_like(length), length=length)

    def errors(text):
        likelihood = evaluate(model, replace(batch, text=text), NOISES["mask"], num_samples=2, batch_size=4)
        return likelihood.nelbo.error, str(likelihood).splitlines()[0], likelihood

    alone, line, likelihood = errors(None)
    assert "in 6 rows, " in line
    assert errors(torch.arange(6))[:2] == (alone, line.replace("rows", "rows of 6 texts"))
    assert errors(torch.zeros(6, dtype=torch.int64))[:2] == (alone, line.replace("rows", "rows of 1 text"))
    pairs = torch.tensor([5, 3, 3, 9, 9, 5])  # across the batches of four
    residual = likelihood.rows.nats - likelihood.nelbo.value * likelihood.rows.tokens
    together = torch.stack([residual[pairs == text].sum() for text in (3, 5, 9)])
    expected = 4.302653 * (together.square().sum() * 3 / 2).sqrt() / 48
    assert errors(pairs)[0] == pytest.approx(expected.item(), rel=1e-5)  # Student's t of three texts, from a table


def source(step, rows):
    """Rows of eight random tokens without a prompt."""
    tokens = torch.randint(13, (10, 8), generator=torch.Generator().manual_seed(step))[rows.start : rows.stop]
    length = torch.full((len(tokens),), 8)
    return TrainBatch(tokens=tokens, prompt_len=torch.zeros_like(length), length=length)


def test_a_source_gives_the_requested_rows_and_the_table_is_readable(model):
    likelihood = evaluate(model, source, NOISES["mask"], num_rows=10, batch_size=4, num_bytes=160)
    assert (len(likelihood.rows.nats), likelihood.num_tokens) == (10, 80)
    assert likelihood.bits_per_byte.value == pytest.approx(likelihood.nelbo.value / 2 / math.log(2), abs=1e-12)
    words = ("80 tokens in 10 rows", "95% interval", "diffusion, at most", "bits per byte, causal", "0.90 … 1.00")
    assert [each for each in words if each not in str(likelihood)] == []
    assert json.loads(json.dumps(likelihood.summary()))["nelbo"] == likelihood.nelbo.value
    single = evaluate(model, source, NOISES["mask"], num_rows=1, num_samples=1).summary()
    assert single["nelbo_error"] is None  # JSON has no infinity
    assert json.dumps(single, allow_nan=False)


def test_the_causal_mode_cannot_score_the_first_token_without_a_prompt(model):
    likelihood = evaluate(model, source, NOISES["mask"], num_rows=3, num_samples=1)
    assert (likelihood.rows.tokens.tolist(), likelihood.rows.causal_tokens.tolist()) == ([8] * 3, [7] * 3)
    expected = causal_costs(model, source(0, range(3)).tokens).double()
    torch.testing.assert_close(likelihood.rows.causal, expected.sum(1), atol=1e-4, rtol=0)


def test_rows_with_their_fill_must_fit_the_positions_of_the_model(tokens):
    """A prompt of one token and an answer of 6 fill two canvases of 4: 9 positions."""
    fits, short = (dgemma.DiffusionGemma(CONFIG.replace(max_position_embeddings=limit)) for limit in (9, 8))
    assert evaluate(fits, tokens[:, :7], NOISES["mask"], num_samples=1).num_tokens == 36
    with pytest.raises(ValueError, match="max_position_embeddings 8 with the fill, got 9"):
        evaluate(short, tokens[:, :7], NOISES["mask"], num_samples=1)


def test_impossible_evaluations_are_refused(model, tokens):
    mask = NOISES["mask"]

    def unread(step, rows):
        raise AssertionError("an hour of work, before the refusal")

    for match, call in {
        "must cover the model's 16 tokens": lambda: evaluate(model, tokens, UniformNoise(8)),
        "confidence must be in": lambda: evaluate(model, unread, mask, num_rows=1, confidence=95),
        "must not have the mask token": lambda: evaluate(model, tokens.index_fill(1, torch.tensor([3]), MASK), mask),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
