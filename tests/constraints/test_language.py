"""Conditioning a prediction on a language is exact: samples, marginals and the most likely text, by enumeration."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from dgemma.constraints.automaton import Automaton
from dgemma.constraints.canvas_language import Language
from dgemma.constraints.joint import condition
from dgemma.constraints.tables import with_gaps
from dgemma.constraints.token_automaton import TokenAutomaton
from dgemma.diffusion.noise import UniformNoise
from dgemma.diffusion.prediction import Prediction
from dgemma.run import step
from dgemma.sampling import Ancestral, LeaveOneOutGibbs
from exact_law import (
    CANVAS_LEN,
    STOP,
    TEXTS,
    VOCAB_SIZE,
    accepted,
    conditional,
    law_of,
    random_language,
    total_variation,
)
from toy import fresh_state

SEEDS = range(6)


def random_logits(seed):
    return 2 * torch.randn(CANVAS_LEN, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def conditioned(logits, language, fixed=None, allowed=None, rows=1):
    canvas, is_fixed = torch.zeros(rows, CANVAS_LEN, dtype=torch.int64), torch.zeros(rows, CANVAS_LEN, dtype=torch.bool)
    for position, token in (fixed or {}).items():
        canvas[:, position], is_fixed[:, position] = token, True
    prediction = Prediction(logits.expand(rows, -1, -1)).shaped(allowed=allowed)
    everyone = language.select(torch.zeros(rows, dtype=torch.int64))
    return condition(prediction, everyone, canvas, is_fixed)


def sampler(logits, language, **options):
    return lambda u: conditioned(logits, language, rows=len(u), **options).sample(u)


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_joint_samples_follow_the_conditional_law(seed):
    logits, language = random_logits(seed), random_language(seed, stops=seed % 2 == 0)
    exact = conditional(logits.softmax(-1), language)
    assert total_variation(law_of(sampler(logits, language)), exact) < 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_marginals_are_those_of_the_conditional_law(seed):
    logits, language = random_logits(seed), random_language(seed)
    exact = conditional(logits.softmax(-1), language)
    marginals = torch.stack([(exact[:, None] * (token == TEXTS)).sum(0) for token in range(VOCAB_SIZE)], dim=-1)
    prediction = conditioned(logits, language)
    torch.testing.assert_close(prediction.logits[0].softmax(-1), marginals, rtol=0, atol=1e-12)
    torch.testing.assert_close(prediction.entropy[0], torch.special.entr(marginals).sum(-1), rtol=0, atol=1e-9)
    best = prediction.argmax[0]
    torch.testing.assert_close(prediction.confidence[0], marginals.gather(1, best[:, None])[:, 0], rtol=0, atol=1e-12)


def uniform_likelihood(canvas, level):
    """q(token of the canvas | x0) at each position for every x0, (C, V), under uniform noise."""
    likelihood = torch.full((CANVAS_LEN, VOCAB_SIZE), level / VOCAB_SIZE, dtype=torch.float64)
    likelihood[torch.arange(CANVAS_LEN), canvas] += 1 - level
    return likelihood


def up_to_stop(text):
    return tuple(text[: text.index(STOP) + 1] if STOP in text else text)


@pytest.mark.parametrize("seed", [0, 5])
def test_the_argmax_is_the_most_likely_text_whatever_follows_its_stop_token(seed):
    language, num_different = random_language(seed), 0
    for draw in range(40):
        logits = random_logits(100 * seed + draw)
        exact = conditional(logits.softmax(-1), language)
        law = Counter()
        for text, weight in zip(TEXTS.tolist(), exact.tolist(), strict=True):
            law[up_to_stop(text)] += weight
        best = max(law, key=law.__getitem__)
        assert up_to_stop(conditioned(logits, language).argmax[0].tolist()) == best
        num_different += up_to_stop(TEXTS[exact.argmax()].tolist()) != best
    assert num_different > 0  # the most likely canvas does not always have the most likely text


@pytest.mark.parametrize("kind", [Ancestral, LeaveOneOutGibbs])
@pytest.mark.parametrize("seed", SEEDS[:1])
def test_samplers_that_convert_a_prediction_draw_from_its_joint_law(kind, seed):
    """At its first step a sampler draws x0. Each position's law is p(x0 | others) times q(its token | x0)."""
    logits, language, level = random_logits(seed), random_language(seed), 0.6
    canvas, likelihood = torch.tensor([1, 0, 2]), uniform_likelihood([1, 0, 2], level)
    mean = logits.softmax(-1) * likelihood
    exact = conditional(mean / mean.sum(-1, keepdim=True), language)

    def draw(u):
        noisy = fresh_state(canvas.expand(len(u), -1), UniformNoise(VOCAB_SIZE), steps=4)
        levels = torch.full((len(u),), level, dtype=torch.float64)
        state = replace(noisy, noise_level=levels, memory=levels, injected={"token": u})
        return kind(parametrisation="loo")(conditioned(logits, language, rows=len(u)), state).tokens

    assert total_variation(law_of(draw), exact) < 1e-9


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_a_correction_redraws_a_position_given_the_others_and_the_language(seed):
    """Row i of the converted marginals is p(x_i | tokens of the other positions, language), by enumeration."""
    logits, language, level = random_logits(seed), random_language(seed), 0.6
    canvas, likelihood = torch.tensor([1, 0, 2]), uniform_likelihood([1, 0, 2], level)
    noise, levels = UniformNoise(VOCAB_SIZE), torch.tensor([level], dtype=torch.float64)
    mean = conditioned(logits, language).revised(lambda each: noise.to_mean(each, canvas[None], levels))
    loo = noise.to_loo(mean.logits, canvas[None], levels)[0].softmax(-1)
    for position in range(CANVAS_LEN):
        factors = logits.softmax(-1) * likelihood
        factors[position] = logits[position].softmax(-1)
        exact = conditional(factors, language)
        expected = torch.stack([exact[TEXTS[:, position] == token].sum() for token in range(VOCAB_SIZE)])
        torch.testing.assert_close(loo[position], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_decided_tokens_and_allowed_sets_are_part_of_the_condition(seed):
    logits, language = random_logits(seed), random_language(seed)
    text = TEXTS[accepted(language)][seed % int(accepted(language).sum())].tolist()
    exact = conditional(logits.softmax(-1), language, {1: text[1]})
    assert total_variation(law_of(sampler(logits, language, fixed={1: text[1]})), exact) < 1e-9
    allowed = torch.ones(1, CANVAS_LEN, VOCAB_SIZE, dtype=torch.bool)
    allowed[0, 0] = False
    allowed[0, 0, text[0]] = True
    masked = logits.masked_fill(~allowed[0], -torch.inf)
    exact = conditional(masked.softmax(-1), language)
    assert total_variation(law_of(sampler(logits, language, allowed=allowed)), exact) < 1e-9


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_a_shaped_joint_law_is_still_that_of_the_language(seed):
    """A temperature and an allowed set act on the probability of each accepted text, by enumeration."""
    logits, language = random_logits(seed), random_language(seed)
    allowed = torch.ones(CANVAS_LEN, VOCAB_SIZE, dtype=torch.bool)
    allowed[1, TEXTS[accepted(language)][0, 1] - 1] = False
    exact = conditional((logits / 2).masked_fill(~allowed, -torch.inf).softmax(-1), language)
    shaping = {"temperature": 2.0, "allowed": allowed[None]}
    found = law_of(lambda u: conditioned(logits, language, rows=len(u)).shaped(**shaping).sample(u))
    assert total_variation(found, exact) < 1e-9


def test_a_spliced_language_keeps_the_gaps_between_its_holes():
    """Row 0 has holes of one token, 0 or 1, on both sides of a gap. Row 1 is replaced, row 0 must not change."""
    whole = hole_language([1, 1, 0, 0], gap=1).select(torch.tensor([0, 0]))
    host = whole.splice(hole_language([1, 1, 0, 0], gap=0), torch.tensor([1]))
    logits = random_logits(3)
    probabilities = logits.softmax(-1)
    probabilities[0::2, 2:] = 0
    exact = probabilities.gather(1, TEXTS.T).prod(0)
    assert total_variation(law_of(sampler(logits, host.select(torch.tensor([0])))), exact / exact.sum()) < 1e-9
    assert host.gaps.tolist() == [[False, True, False], [True, False, False]]


def test_a_row_cannot_be_spliced_into_a_run_with_another_constraint():
    plain = fresh_state(torch.zeros(1, CANVAS_LEN, dtype=torch.int64), UniformNoise(VOCAB_SIZE), steps=4)
    first, second = (replace(plain, language=random_language(seed)) for seed in range(2))
    for donor in (second, plain):
        with pytest.raises(ValueError, match="must have the state's constraint"):
            first.splice(torch.tensor([0]), donor)


def hole_language(classes, gap):
    """One token of class 1 in every hole. The canvas is holes except at the position `gap`."""
    automaton = TokenAutomaton(np.array(classes), np.array([[-1, 1], [-1, -1]], np.int32), np.array([False, True]))
    tensors, (start,) = with_gaps(automaton, [0], VOCAB_SIZE)
    gaps = torch.arange(CANVAS_LEN)[None] == gap
    return Language(tensors, torch.tensor([start]), torch.tensor([[False, True, False]]), gaps=gaps)


def test_a_stop_token_may_stand_only_where_the_text_may_end():
    logits, language = random_logits(1), random_language(0)
    may_end = torch.tensor([[False, False, True]])
    language = language._replace(may_end=may_end)
    exact = conditional(logits.softmax(-1), language)
    assert total_variation(law_of(sampler(logits, language)), exact) < 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_a_projection_keeps_a_text_of_the_language_and_repairs_others(seed):
    logits, language = random_logits(seed), random_language(seed)
    joint = conditioned(logits, language, rows=len(TEXTS)).joint
    nothing = torch.zeros(TEXTS.shape, dtype=torch.bool)
    fits = accepted(language)
    projected = joint.project(TEXTS, nothing)
    assert torch.equal(projected[fits], TEXTS[fits])
    positions = VOCAB_SIZE ** torch.arange(CANVAS_LEN - 1, -1, -1)
    assert bool(fits[(projected * positions).sum(1)].all())
    distance = (projected != TEXTS).sum(1)
    nearest = (TEXTS[:, None] != TEXTS[fits]).sum(-1).amin(1)
    assert torch.equal(distance, nearest)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_projection_keeps_a_text_of_the_language_at_a_low_temperature(seed):
    """Logits of about 8, divided by 0.004, are larger than the cost of contradicting an open position."""
    logits, language = random_logits(seed) + 8, random_language(seed)
    fits = accepted(language)
    joint = conditioned(logits / 0.004, language, rows=int(fits.sum())).joint
    nothing = torch.zeros(TEXTS[fits].shape, dtype=torch.bool)
    assert torch.equal(joint.project(TEXTS[fits], nothing), TEXTS[fits])


@pytest.mark.parametrize("canvas_len", [256, 512])
def test_a_decided_token_outweighs_a_canvas_of_tokens_outside_top_k(canvas_len):
    """The texts are "aa...a" and "bb...b". Top-k permits only "a", and the last token is decided as "b"."""
    table = torch.tensor([[1, 2], [1, -1], [-1, 2]])
    automaton = Automaton.build(torch.tensor([0, 1], dtype=torch.int32), table, torch.zeros(3, dtype=torch.bool))
    language = Language(automaton, torch.tensor([0]), torch.tensor([[False, True, True]]))
    logits = torch.tensor([1.0, 0.0]).expand(1, canvas_len, -1)
    shaped = Prediction(logits).shaped(top_k=1, cut=step._LAST_RESORT)
    text = torch.ones(1, canvas_len, dtype=torch.int64)
    decided = torch.arange(canvas_len)[None] == canvas_len - 1
    prediction = condition(shaped, language, text, decided)
    assert prediction.argmax.all()
    assert prediction.sample(torch.full((1, canvas_len), 0.5, dtype=torch.float64)).all()
    draft = torch.where(decided, 1, 0)
    assert condition(shaped, language, text, torch.zeros_like(decided)).joint.project(draft, decided).all()


def test_the_law_of_free_tokens_is_exact_where_no_text_keeps_a_decided_one():
    """The first token is decided as 2, which no text has. After it, the texts have 0 and 1, or 1 and 0."""
    table = torch.full((5, 3), -1)
    table[0, :2], table[1, 0], table[1, 1], table[2, 1], table[3, 0] = 1, 2, 3, 4, 4
    automaton = Automaton.build(torch.arange(3, dtype=torch.int32), table, torch.zeros(5, dtype=torch.bool))
    language = Language(automaton, torch.tensor([0]), torch.arange(5)[None] == 4)
    logits = torch.tensor([[[0.0, 1.0, 5.0], [0.3, 0.0, 2.0], [0.0, 0.9, 0.0]]])
    decided = torch.tensor([[True, False, False]])
    law = condition(Prediction(logits), language, torch.tensor([[2, 0, 0]]), decided).logits.softmax(-1)
    expected = torch.tensor([0.3 + 0.9, 0.0]).softmax(-1)
    torch.testing.assert_close(law[0, 1, :2], expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(law[0, 2, :2], expected.flip(0), rtol=0, atol=1e-4)
