"""Typed choices: their probabilities are those of whole texts, also when options differ in length."""

import itertools
from types import SimpleNamespace

import pytest
import torch

import dgemma
import toy
from dgemma.tasks.slots import FilledTemplate, Slot, SlotAnswer, calibrate, decide_many, slots
from exact_networks import Network, random_joint

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
        logits = toy.exact_network(toy.mask_noise()).denoise(text).logits[:, known.shape[1] :]
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


@pytest.mark.parametrize("mode", ["sequential", "independent", "joint"])
@pytest.mark.parametrize(
    ("before", "options", "after"),
    [
        ([1], [[0], [1], [2]], [2]),
        ([], [list(pair) for pair in itertools.product(range(3), repeat=2)], [0]),
        ([], [[1], [1, 1]], [0]),
    ],
    ids=["one-token", "two-tokens", "prefix"],
)
def test_options_have_their_conditional_probability_in_every_mode(before, options, after, mode):
    filled = fill([[BOS, *before], Slot(options), after], mode=mode)

    def fits(text, option):
        whole = [*before, *option, *after]
        return text[: len(whole)] == whole

    expected = exact(options, fits)
    torch.testing.assert_close(filled.answers[0].probabilities, expected, rtol=1e-12, atol=0)
    assert filled.tokens.tolist() == [BOS, *before, *options[int(expected.argmax())], *after]


def test_options_of_different_lengths_are_compared_by_the_text_after_them():
    options = [[0], [1, 2], []]
    filled = fill([[BOS], Slot(options), [2]])
    expected = exact(options, lambda text, option: text[: len(option) + 1] == [*option, 2])
    torch.testing.assert_close(filled.answers[0].probabilities, expected, rtol=1e-12, atol=0)
    blind = fill([[BOS], Slot(options), [2]], horizon=0).answers[0].probabilities
    assert (
        blind - expected
    ).abs().max() > 0.01  # the negative control: without the text after it, the distribution differs


@pytest.mark.parametrize("horizon", [0, 1, 2])
def test_fixed_text_beyond_the_horizon_does_not_count(horizon):
    options, after = [[0], []], [1, 2]
    filled = fill([[BOS], Slot(options), after], horizon=horizon)
    scored = after[:horizon]
    expected = exact(options, lambda text, option: text[: len(option) + horizon] == [*option, *scored])
    torch.testing.assert_close(filled.answers[0].probabilities, expected, rtol=1e-12, atol=0)


class NoisyToy(ToyModel):
    """The exact uniform network of a random joint, which takes a noise level per position."""

    takes_noise_level = takes_position_levels = True
    joint = random_joint(3)

    def __init__(self):
        super().__init__()
        self.config.vocab_size = 3

    def denoise(self, canvas, cache, self_cond=None, noise_level=None):
        return Network(self.joint, toy.uniform_noise(), 3).at(noise_level).denoise(canvas)


@pytest.mark.parametrize("mode", ["sequential", "independent", "joint"])
def test_under_uniform_noise_levels_per_position_make_probabilities_exact(mode):
    template = [[BOS], Slot([[0], [2]]), [1], Slot([[0], [1]])]
    filled = slots(NoisyToy(), template, noise=toy.uniform_noise(), mode="joint", num_draws=2)
    law = NoisyToy.joint.view(3, 3, 3)[[0, 2], 1][:, [0, 1]]
    torch.testing.assert_close(filled.joint, law / law.sum(), rtol=1e-9, atol=0)
    first = slots(NoisyToy(), template, noise=toy.uniform_noise(), mode=mode).answers[0].probabilities
    of_both = law if mode == "joint" else NoisyToy.joint.view(3, 3, 3)[[0, 2], 1]
    torch.testing.assert_close(first, of_both.sum(1) / of_both.sum(), rtol=1e-9, atol=0)


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


def draw_often(template, **options):
    return decide_many(ToyModel(), [template] * 400, noise=toy.mask_noise(), greedy=False, batch_size=200, **options)


def test_drawn_choices_follow_the_probabilities():
    template = [[BOS], Slot([[0], [1], [2]])]
    drawn = torch.tensor([filled.answers[0].index for filled in draw_often(template)])
    share = torch.bincount(drawn, minlength=3) / 400
    assert (share - toy.FIRST).abs().max() < 4 * (0.25 / 400) ** 0.5  # four standard deviations at most


def test_each_distinct_canvas_is_predicted_once():
    model = ToyModel()
    slots(model, [[BOS], Slot([[0], [1], [2]]), [1]], noise=toy.mask_noise())
    assert model.num_rows == 1
    model = ToyModel()
    slots(model, [[BOS], Slot([[0, 0], [0, 1], [1, 0]]), [1]], noise=toy.mask_noise(), batch_size=1)
    assert model.num_rows == 3  # the canvases __, 0_ and 1_


PAIRS = list(itertools.product(range(3), (0, 2)))


def test_joint_probabilities_of_all_combinations_are_exact():
    filled = fill([[BOS], Slot([[0], [1], [2]]), Slot([[0], [2]]), [1]], mode="joint")
    expected = exact(PAIRS, lambda text, pair: text == [*pair, 1]).view(3, 2)
    torch.testing.assert_close(filled.joint, expected, rtol=1e-12, atol=0)
    first, second = (answer.probabilities for answer in filled.answers)
    torch.testing.assert_close(first, expected.sum(1), rtol=1e-12, atol=0)
    torch.testing.assert_close(second, expected.sum(0), rtol=1e-12, atol=0)
    best = PAIRS[int(expected.argmax())]
    assert filled.tokens.tolist() == [BOS, *best, 1]
    assert filled.log_prob == pytest.approx(float(expected.max().log()), rel=1e-12)


def test_joint_probabilities_compare_options_of_different_lengths_on_both_sides_of_fixed_text():
    filled = fill([[BOS], Slot([[0], []]), [1], Slot([[0], [2]])], mode="joint")
    texts = [[0, 1, 0], [0, 1, 2], [1, 0], [1, 2]]
    expected = exact(texts, lambda text, start: text[: len(start)] == start).view(2, 2)
    torch.testing.assert_close(filled.joint, expected, rtol=1e-12, atol=0)


def test_independent_slots_are_read_from_one_canvas_while_the_others_are_open():
    model = ToyModel()
    filled = slots(model, [[BOS], Slot([[0], [1]]), [1], Slot([[0], [2]])], noise=toy.mask_noise(), mode="independent")
    assert model.num_rows == 1
    first = exact([0, 1], lambda text, option: text[:2] == [option, 1])
    last = exact([0, 2], lambda text, option: text[1:] == [1, option])
    torch.testing.assert_close(filled.answers[0].probabilities, first, rtol=1e-12, atol=0)
    torch.testing.assert_close(filled.answers[1].probabilities, last, rtol=1e-12, atol=0)
    assert filled.log_prob == pytest.approx(float(first.max().log() + last.max().log()), rel=1e-12)


def test_a_temperature_flattens_the_law_and_a_threshold_abstains():
    template = [[BOS], Slot([[0], [1], [2]])]
    expected = toy.FIRST**0.5 / (toy.FIRST**0.5).sum()
    top = float(expected.max())
    for threshold, option in ((top - 1e-9, [0]), (top + 1e-9, None)):
        answer = fill(template, temperature=2.0, threshold=threshold).answers[0]
        torch.testing.assert_close(answer.probabilities, expected, rtol=1e-12, atol=0)
        assert (answer.index, answer.option, answer.abstains) == (0, option, option is None)


@pytest.mark.parametrize("mode", ["sequential", "joint"])
def test_a_bias_divides_by_the_probabilities_without_content(mode):
    options, more = Slot([[0], [1], [2]], name="first"), Slot([[0], [1]], name="last")
    bias = calibrate([fill([[BOS], options])])
    filled = fill([[BOS], options, [1], more], mode=mode, bias=bias)
    weights = exact(range(3), lambda text, option: text[:2] == [option, 1]) / toy.FIRST
    torch.testing.assert_close(filled["first"].probabilities, weights / weights.sum(), rtol=1e-12, atol=0)
    neutral = fill([[BOS], options], bias=bias)["first"].probabilities
    torch.testing.assert_close(neutral, torch.full_like(neutral, 1 / 3))
    with pytest.raises(ValueError, match="bias of slot 'first' must be 3 finite numbers"):
        fill([[BOS], options], bias={"first": [0.0]})
    with pytest.raises(ValueError, match="calibrate slots must have names"):
        calibrate([fill([[BOS], Slot([[0], [1]])])])


def test_combinations_are_drawn_from_the_joint_law():
    template = [[BOS], Slot([[0], [1]]), Slot([[0], [1]])]
    law = exact(list(itertools.product((0, 1), repeat=2)), lambda text, pair: text[:2] == list(pair))
    drawn = [2 * filled.answers[0].index + filled.answers[1].index for filled in draw_often(template, mode="joint")]
    share = torch.bincount(torch.tensor(drawn), minlength=4) / 400
    assert (share - law).abs().max() < 4 * (0.25 / 400) ** 0.5  # four standard deviations at most


def answered(*laws, joint=None):
    found = [
        SlotAnswer(slot=Slot(["yes", "no"]), index=0, probabilities=torch.tensor(law, dtype=torch.float64))
        for law in laws
    ]
    return FilledTemplate(tokens=torch.tensor([BOS]), answers=tuple(found), joint=joint)


def test_calibration_finds_the_temperature_of_the_known_answers():
    # A confidence of 0.9 that is right in 3 of 4 cases: (0.9 / 0.1)^(1 / T) = 3, so T = 2.
    results = [answered([0.9, 0.1], [0.1, 0.9]), answered([0.9, 0.1], [0.9, 0.1])]
    truths = [["yes", "no"], ["yes", "no"]]
    assert calibrate(iter(results), iter(truths)) == pytest.approx(2.0, rel=1e-9)
    # The same for combinations: 0.64 against 0.04, right in 4 of 5 cases, and 16^(1 / T) = 4.
    table = torch.tensor([[0.64, 0.0], [0.0, 0.04]], dtype=torch.float64)
    results = [answered([0.9, 0.1], [0.9, 0.1], joint=table / table.sum())] * 5
    assert calibrate(results, [["yes", "yes"]] * 4 + [["no", "no"]]) == pytest.approx(2.0, rel=1e-9)
    assert calibrate([answered([0.9, 0.1])], [["yes"]]) == pytest.approx(0.01)  # always right
    with pytest.raises(ValueError, match="calibrate results must have at least one answered slot"):
        calibrate([], [])
    for truth in ([], ["maybe"]):
        with pytest.raises(ValueError, match=r"truths\[0\] must have an option of each of the slots .*, got \["):
            calibrate([answered([0.9, 0.1])], [truth])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return dgemma.DiffusionGemma(dgemma.presets.tiny()).eval()


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


@pytest.mark.parametrize("mode", ["sequential", "independent", "joint"])
def test_a_batch_decides_each_template_as_if_it_were_alone(model, mode):
    ragged = [
        [[2, 40, 41, 42], Slot([[50], [51, 52]]), [60, 61], Slot([[70], [71]]), [80]],
        [[2, 43], Slot([[50], [51]]), Slot([[], [70, 72]])],
        [[2, 44, 45], Slot([[50], [53], [54]])],
    ]
    options = {"mode": mode, "greedy": False, "num_draws": 2, "horizon": 2, "temperature": 1.5}
    together = list(decide_many(model, ragged, seed=7, batch_size=3, progress=False, **options))
    for row, filled in enumerate(together):
        alone = slots(model, ragged[row], seed=7 + row, **options)
        assert torch.equal(filled.tokens, alone.tokens)
        for one, other in zip(filled.answers, alone.answers, strict=True):
            torch.testing.assert_close(one.probabilities, other.probabilities, rtol=1e-4, atol=1e-6)


def test_templates_are_read_as_they_are_needed_and_a_bad_one_is_named():
    taken = []

    def templates():
        for number in range(10**6):
            taken.append(number)
            yield [[BOS], Slot([[0], [1]])] if number < 5 else [[BOS]]

    answers = decide_many(ToyModel(), templates(), noise=toy.mask_noise(), batch_size=2)
    assert taken == []
    next(answers)
    assert taken == [0, 1]
    assert sum(1 for _ in itertools.islice(answers, 3)) == 3
    with pytest.raises(ValueError, match=r"decide_many templates\[5\] must begin .* and have a Slot in it"):
        next(answers)


def test_a_seed_beyond_64_bits_is_named():
    template = [[BOS], Slot([[0], [1]])]
    with pytest.raises(ValueError, match=r"decide_many templates\[1\] seed must be below 2\*\*63"):
        list(decide_many(ToyModel(), [template] * 2, noise=toy.mask_noise(), seed=2**63 - 1))


def test_a_tokenizer_reads_texts(model):
    tokenizer = dgemma.ByteTokenizer()
    filled = slots(model, ["Is 7 prime? ", Slot(["yes", "no"], name="prime"), "."], tokenizer=tokenizer)
    assert tokenizer.decode(filled.tokens) == f"Is 7 prime? {filled['prime'].option}."
    assert int(filled.tokens[0]) == tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("template", "options", "sentence"),
    [
        ([[2, 3]], {}, "have a Slot in it"),
        ([Slot([[5], [6]]), [2]], {}, "must begin with fixed text"),
        ([[2], Slot([[5] * 33])], {}, "must fit into a canvas of 32 tokens, got 33"),
        ([[2], Slot([[600], [5]])], {}, r"real token ids in \[0, 512\), got \[600\]"),
        (["text", Slot([[5], [6]])], {}, "must come with a tokenizer for its texts, got 'text'"),
        ([[2], *[Slot([[5], [6]], name="a")] * 2], {}, r"Slot\.name must be unique in a template, got \['a', 'a'\]"),
        (
            [[2], Slot([[5], [6]])],
            {"tail_token_id": 4, "noise": dgemma.MaskNoise(512)},
            "tail_token_id must be a real token below 512, or None, got 4",
        ),
        (
            [[2], Slot([[5], [6]]), [7] * 31, Slot([[5], [6]])],
            {"mode": "independent"},
            "must fit into a canvas of 32 tokens, got 33",
        ),
        (
            [[2], *[Slot([[token] for token in range(10, 30)])] * 3],
            {"mode": "joint"},
            "must have at most 4096 combinations of options, got 8000",
        ),
    ],
)
def test_templates_that_do_not_fit_are_refused(model, template, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        slots(model, template, **options)
