"""Typed choices: their probabilities are those of whole texts, also when options differ in length."""

import itertools
from types import SimpleNamespace

import pytest
import torch

import dgemma
import toy
from dgemma.tasks.slots import Slot, slots

BOS = 0


class ToyModel(dgemma.Denoiser):
    """The exact mask network of toy T0 as a model: bos, the three tokens of the text, then flat predictions."""

    generation = dgemma.GenerationDefaults()
    device = torch.device("cpu")

    def __init__(self, canvas_len=3):
        self.config = SimpleNamespace(canvas_length=canvas_len, vocab_size=toy.NUM_TOKENS + 1)
        self.num_rows = 0

    def encode(self, tokens, cache=None, attention_mask=None):
        return PlainCache(tokens if cache is None else torch.cat([cache.tokens, tokens], dim=1))

    def denoise(self, canvas, cache, self_cond=None):
        self.num_rows += len(canvas)
        known = cache.tokens[:, 1:]
        text = torch.cat([known, canvas], dim=1)[:, : toy.LENGTH]
        text = torch.nn.functional.pad(text, (0, toy.LENGTH - text.shape[1]), value=toy.MASK)
        logits = toy.Denoiser(toy.mask_noise()).denoise(text).logits[:, known.shape[1] :]
        logits = torch.nn.functional.pad(logits, (0, 0, 0, canvas.shape[1]), value=0.0)[:, : canvas.shape[1]]
        return dgemma.Prediction(logits)


class PlainCache:
    def __init__(self, tokens):
        self.tokens = tokens

    def select(self, rows):
        return PlainCache(self.tokens[rows])


def exact(options, matches):
    """P(option | the text matches one of them), by summing the joint law over all 27 texts."""
    weights = torch.zeros(len(options), dtype=torch.float64)
    for text, p in zip(toy.SEQUENCES.tolist(), toy.JOINT, strict=True):
        for k, option in enumerate(options):
            weights[k] += p * matches(text, option)
    return weights / weights.sum()


def fill(template, **options):
    return slots(ToyModel(), template, noise=toy.mask_noise(), **options)


def test_one_token_options_have_their_conditional_probability():
    filled = fill([[BOS, 1], Slot([[0], [1], [2]]), [2]])
    expected = exact([[0], [1], [2]], lambda text, option: text == [1, *option, 2])
    torch.testing.assert_close(filled.answers[0].probabilities, expected, rtol=1e-12, atol=0)
    assert filled.tokens.tolist() == [BOS, 1, int(expected.argmax()), 2]


def test_tokens_of_an_option_are_not_treated_as_independent():
    options = [list(pair) for pair in itertools.product(range(3), repeat=2)]
    filled = fill([[BOS], Slot(options), [0]])
    expected = exact(options, lambda text, option: text == [*option, 0])
    torch.testing.assert_close(filled.answers[0].probabilities, expected, rtol=1e-12, atol=0)


def test_options_of_different_lengths_are_compared_by_the_text_after_them():
    options = [[0], [1, 2], []]
    filled = fill([[BOS], Slot(options), [2]])
    expected = exact(options, lambda text, option: text[: len(option) + 1] == [*option, 2])
    torch.testing.assert_close(filled.answers[0].probabilities, expected, rtol=1e-12, atol=0)
    blind = fill([[BOS], Slot(options), [2]], horizon=0).answers[0].probabilities
    assert (
        blind - expected
    ).abs().max() > 0.01  # the negative control: without the text after it, the distribution differs


def test_an_option_may_be_a_prefix_of_another():
    options = [[1], [1, 1]]
    filled = fill([[BOS], Slot(options), [0]])
    expected = exact(options, lambda text, option: text[: len(option) + 1] == [*option, 0])
    torch.testing.assert_close(filled.answers[0].probabilities, expected, rtol=1e-12, atol=0)


def test_later_slots_depend_on_earlier_answers():
    template = [[BOS], Slot([[0], [1], [2]], name="first"), [1], Slot([[0], [2]], name="last")]
    filled = fill(template)
    first = exact([0, 1, 2], lambda text, option: text[:2] == [option, 1])
    chosen = int(first.argmax())
    last = exact([0, 2], lambda text, option: text == [chosen, 1, option])
    torch.testing.assert_close(filled["first"].probabilities, first, rtol=1e-12, atol=0)
    torch.testing.assert_close(filled["last"].probabilities, last, rtol=1e-12, atol=0)
    assert filled.log_prob == pytest.approx(float(first.max().log() + last.max().log()), rel=1e-12)
    assert filled["last"].option == [[0], [2]][int(last.argmax())]
    with pytest.raises(KeyError, match="No slot is named 'middle'"):
        filled["middle"]


def test_drawn_choices_follow_the_probabilities():
    template = [[BOS], Slot([[0], [1], [2]])]
    drawn = torch.tensor([fill(template, greedy=False, seed=seed).answers[0].index for seed in range(400)])
    share = torch.bincount(drawn, minlength=3) / 400
    assert (share - toy.FIRST).abs().max() < 4 * (0.25 / 400) ** 0.5  # four standard deviations at most


def test_each_distinct_canvas_is_predicted_once():
    model = ToyModel()
    slots(model, [[BOS], Slot([[0], [1], [2]]), [1]], noise=toy.mask_noise())
    assert model.num_rows == 1
    model = ToyModel()
    slots(model, [[BOS], Slot([[0, 0], [0, 1], [1, 0]]), [1]], noise=toy.mask_noise(), max_rows=1)
    assert model.num_rows == 3  # the empty gap, and after 0 and 1


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return dgemma.DiffusionGemma(dgemma.presets.tiny()).eval()


@pytest.mark.parametrize("noise", [dgemma.MaskNoise(512), dgemma.UniformNoise(512), dgemma.HybridNoise(512)])
def test_a_real_model_gives_a_distribution_over_the_options(model, noise):
    template = [[2, 40, 41], Slot([[50], [51, 52], [53]]), [60, 61], Slot([[70], [71]]), [80]]
    filled = slots(model, template, noise=noise)
    for choice in filled.answers:
        assert choice.probabilities.sum() == pytest.approx(1.0)
        assert choice.index == int(choice.probabilities.argmax())
    a, b = (list(choice.option) for choice in filled.answers)
    assert filled.tokens.tolist() == [2, 40, 41, *a, 60, 61, *b, 80]
    few_rows = slots(model, template, noise=noise, max_rows=2)
    for one, other in zip(filled.answers, few_rows.answers, strict=True):
        torch.testing.assert_close(one.probabilities, other.probabilities, rtol=1e-4, atol=1e-6)


def test_under_uniform_noise_probabilities_are_means_over_draws(model):
    template = [[2, 40, 41], Slot([[50], [51]]), [60, 61]]
    law = slots(model, template, num_draws=3, seed=4).answers[0].probabilities
    cache = model.encode(torch.tensor([[2, 40, 41]]))
    probabilities = []
    for draw in range(3):
        row = torch.tensor([0])
        u = dgemma.diffusion.draws.uniform(row + 4, row, row + draw, 32, "prior")
        canvas = (u * 512).long()
        canvas[0, 1:3] = torch.tensor([60, 61])
        probabilities.append(model.denoise(canvas, cache).logits[0, 0].double().softmax(-1)[[50, 51]])
    expected = torch.stack(probabilities).mean(0)
    torch.testing.assert_close(law, expected / expected.sum(), rtol=1e-5, atol=0)


def test_a_tokenizer_reads_texts(model):
    tokenizer = dgemma.ByteTokenizer()
    filled = slots(model, ["Is 7 prime? ", Slot(["yes", "no"], name="prime"), "."], tokenizer=tokenizer)
    assert tokenizer.decode(filled.tokens) == f"Is 7 prime? {filled['prime'].option}."
    assert int(filled.tokens[0]) == tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("template", "options", "sentence"),
    [
        ([[2, 3]], {}, "must have a Slot"),
        ([Slot([[5], [6]]), [2]], {}, "must begin with fixed text"),
        ([[2], Slot([[5] * 33])], {}, "must fit into a canvas of 32 tokens, got one of 33"),
        ([[2], Slot([[600], [5]])], {}, r"real token ids in \[0, 512\), got \[600\]"),
        ([[2], Slot([[4], [5]])], {"noise": dgemma.MaskNoise(512)}, "real token ids"),
        (["text", Slot([[5], [6]])], {}, "needs a tokenizer to read the text 'text'"),
        ([[2], Slot([[5], [6]])], {"num_draws": 0}, "num_draws must be an integer of at least 1"),
        ([[2], Slot([[5], [6]])], {"noise": dgemma.MaskNoise(11)}, r"MaskNoise\.vocab_size must be the model's 512"),
        ([[2], Slot([[5], [6]])], {"tail_token_id": 512}, "tail_token_id must be a real token below 512, got 512"),
        (
            [[2], Slot([[5], [6]])],
            {"tail_token_id": 4, "noise": dgemma.MaskNoise(512)},
            "tail_token_id must be a real token below 512, got 4",
        ),
    ],
)
def test_templates_that_do_not_fit_are_refused(model, template, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        slots(model, template, **options)


def test_options_must_differ():
    with pytest.raises(ValueError, match=r"Slot\.options must have at least one option and no duplicates"):
        Slot([[5], (5,)])


def test_two_slots_of_one_name_are_refused():
    template = [[2], Slot([[5], [6]], name="a"), [7], Slot([[5], [6]], name="a")]
    model = dgemma.DiffusionGemma(dgemma.presets.tiny())
    with pytest.raises(ValueError, match=r"Slot\.name must be unique in a template, got 'a' twice"):
        slots(model, template)
