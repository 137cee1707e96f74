"""Arguments of `generate`: every unambiguous form is accepted, and all others raise before any work is done."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import dgemma
from dgemma.run.arguments import read_allowed, read_seeds, read_token_ids
from dgemma.sampling import ConstantTemperature

VOCAB, CANVAS_LEN = 512, 32
NOISE = dgemma.UniformNoise(VOCAB)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = dgemma.DiffusionGemma(dgemma.presets.tiny())
    with torch.no_grad():
        model.embed_tokens.weight.mul_(20)
    return model.eval()


def prompt(batch_size=2):
    return torch.randint(5, VOCAB, (batch_size, 4), generator=torch.Generator().manual_seed(1))


def marks(*ids):
    """Booleans over the vocabulary, True at the ids."""
    keep = np.zeros(VOCAB, dtype=bool)
    keep[list(ids)] = True
    return keep


@pytest.mark.parametrize(
    "allowed",
    [
        [5, 9],
        {5, 9},
        range(5, 10, 4),
        torch.tensor([5, 9]),
        np.array([5, 9]),
        [np.int64(5), np.int64(9)],
        [torch.tensor(5), torch.tensor(9)],
        [[5, 9]],
        marks(5, 9),
        marks(5, 9).tolist(),
        torch.from_numpy(marks(5, 9)),
    ],
    ids=lambda allowed: f"{type(allowed).__name__}-{str(allowed)[:20]}",
)
def test_allowed_means_the_same_in_every_form(allowed):
    table = read_allowed("generate allowed", allowed, NOISE, (2, 64), CPU)
    assert table.shape == (1, 1, VOCAB)
    assert table.nonzero()[:, 2].tolist() == [5, 9]


@pytest.mark.parametrize(
    "allowed",
    [[[5], [6, 7]], [{5}, range(6, 8)], [torch.tensor([5]), torch.tensor([6, 7])], np.stack([marks(5), marks(6, 7)])],
    ids=["lists", "sets", "tensors", "booleans"],
)
def test_allowed_position_by_position_means_the_same_in_every_form(allowed):
    table = read_allowed("generate allowed", allowed, NOISE, (2, 64), CPU)
    assert table.nonzero().tolist() == [[0, 0, 5], [0, 1, 6], [0, 1, 7]]


DISTINCT = "must be booleans, or distinct token ids"


@pytest.mark.parametrize(
    ("allowed", "sentence"),
    [
        ([[65], 66], "Do not mix these forms"),
        ([True, 66], "Do not mix these forms"),
        ([[True, False], [True]], DISTINCT),
        ([True, False], "must broadcast to"),
        ([-1], DISTINCT),
        (torch.arange(VOCAB) % 2, "Convert a mask of 0 and 1 to booleans"),
        ([[65], []], "must leave at least one token at every position"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_ambiguous_allowed_set_is_refused(allowed, sentence):
    with pytest.raises(ValueError, match=f"generate allowed .*{sentence}|{sentence}"):
        read_allowed("generate allowed", allowed, NOISE, (2, 64), CPU)


@pytest.mark.parametrize("seed", [7, np.int64(7), torch.tensor(7), [7, 8], np.array([7, 8]), torch.tensor([7, 8])])
def test_seeds_in_every_form(seed):
    seeds = read_seeds(seed, prompt())
    assert seeds.dtype == torch.int64
    assert seeds.tolist() == [7, 8]


@pytest.mark.parametrize("ids", [1, np.int64(1), [1], (1,), {1}, torch.tensor([1]), np.array([1]), torch.tensor(1)])
def test_stop_tokens_in_every_form(ids):
    assert read_token_ids("eos_token_ids", ids) == (1,)


def test_numpy_and_torch_scalars_are_accepted_as_numbers(model):
    chosen = {"temperature": torch.tensor(0.5), "steps": np.int64(2), "top_k": np.int32(7), "top_p": np.float32(0.5)}
    out = dgemma.generate(
        model, prompt(), max_new_tokens=np.int64(CANVAS_LEN), record=True, stop=None, progress=False, **chosen
    )
    plan = out.trajectory.plan
    assert plan.knobs.temperature == ConstantTemperature(0.5)
    assert (plan.num_steps, plan.knobs.top_k, plan.knobs.top_p) == (2, 7, 0.5)
    assert all(type(value) is kind for value, kind in ((plan.num_steps, int), (plan.knobs.top_k, int)))


NOTHING_FROZEN = torch.zeros(2, 32, dtype=torch.bool)
TOKENS = torch.zeros(2, 32, dtype=torch.long)
BAD = [
    ({"noise": dgemma.UniformNoise(100)}, "vocab_size must be the model's 512"),
    ({"attention_mask": torch.ones(3, 4)}, r"attention_mask must be a tensor of shape \(2, 4\)"),
    ({"attention_mask": torch.full((2, 4), torch.nan)}, "attention_mask must be .* 1 for real tokens"),
    ({"eos_token_ids": [1, VOCAB]}, r"eos_token_ids must be a token id or several in \[0, 512\), got \[1, 512\]"),
    ({"canvas": TOKENS[:1]}, "canvas must be int64 tokens"),
    ({"canvas": TOKENS + 600}, r"canvas must be int64 tokens in \[0, 512\) or -1"),
    ({"canvas": TOKENS.repeat(1, 3)}, r"of shape \(2, 1 to 64\)"),
    ({"frozen": NOTHING_FROZEN}, "frozen must be .*Pass canvas too"),
    ({"canvas": TOKENS - 1, "frozen": ~NOTHING_FROZEN}, "mark real tokens of canvas.*Unfreeze it"),
    ({"canvas": TOKENS, "frozen": NOTHING_FROZEN[:, :30]}, r"of its shape \(2, 32\)"),
    ({"allowed": torch.ones(3, 32, 512, dtype=torch.bool)}, "allowed must broadcast"),
    ({"seed": 2**63 - 1}, r"seed must be an integer below 2\*\*63 - 2 \(row i has seed \+ i\)"),
    ({"seed": [1, 2, 3]}, "a list of 2, one per row"),
    ({"steps": 10**9}, "steps must be an integer of at least 1 and at most 1000000"),
    ({"max_new_tokens": 8190}, "stay within max_position_embeddings"),
    ({"noise_level": 0.5}, r"noise_level must be 1 without canvas, got 0\.5.*Pass the canvas that has this level"),
    ({"prompt_tokens": torch.zeros(2, 0, dtype=torch.long)}, "must hold at least one token per row"),
]


@pytest.mark.parametrize(("changes", "sentence"), BAD, ids=[str(changes)[:60] for changes, _ in BAD])
def test_arguments_that_do_not_fit_raise_one_sentence_before_any_work(model, changes, sentence, monkeypatch):
    monkeypatch.setattr(model, "encode", lambda *args: pytest.fail("work was done before the arguments were checked"))
    with pytest.raises(ValueError, match=sentence):
        dgemma.generate(model, **{"prompt_tokens": prompt(), "max_new_tokens": 64, **changes})


@pytest.mark.parametrize("mask", [[[0, 0, 0], [0, 0, 0]], [[1, 1, 1], [0, 0, 0]]], ids=["nowhere", "in-one-row"])
def test_a_prompt_of_padding_is_refused_like_an_empty_one(model, mask):
    with pytest.raises(ValueError, match=r"must hold at least one token per row, .* Start with the bos"):
        dgemma.generate(model, torch.full((2, 3), 5), attention_mask=torch.tensor(mask))


class Adjustable(dgemma.EntropyBound):
    """A frozen dataclass with a setting outside its fields, so that equality ignores the setting."""

    def __init__(self, window):
        super().__init__()
        self.window = window


@dataclass
class Thawed(dgemma.Sampler):
    window: int = 8


@dataclass(frozen=True)
class Wrapper(dgemma.Sampler):
    inner: dgemma.Sampler


class LooseRule(dgemma.StopRule):
    pass


@pytest.mark.parametrize(
    "change",
    [
        {"sampler": Thawed()},
        {"sampler": Adjustable(4)},
        {"sampler": Wrapper(Thawed())},
        {"stop": LooseRule()},
        {"stop": dgemma.StepCap(4) | LooseRule()},
    ],
    ids=["thawed", "attribute", "wrapped", "rule", "combined"],
)
def test_a_knob_that_could_change_after_capture_is_refused(change):
    whole = {"sampler": dgemma.EntropyBound(), "temperature": dgemma.LinearTemperature()}
    fix = r"must be a frozen dataclass .*, got .*\. Write @dataclass\(frozen=True, kw_only=True\) above the class\.$"
    with pytest.raises(ValueError, match=rf"^Knobs\.{next(iter(change))} {fix}"):
        dgemma.Knobs(**(whole | change))


def test_the_noise_level_applies_only_to_blocks_with_a_canvas(model):
    seen = []
    dgemma.generate(
        model,
        prompt(),
        max_new_tokens=3 * CANVAS_LEN,
        steps=4,
        stop=None,
        canvas=torch.full((2, CANVAS_LEN + 1), 9),
        noise_level=0.25,
        eos_token_ids=[],
        progress=False,
        on_step=lambda record: seen.append((int(record.block[0]), float(record.noise_level[0]))),
    )
    # The canvas reaches one token into the second block and not into the third.
    assert seen == [(0, 0.25), (1, 0.25), (2, 1.0), (2, 0.75), (2, 0.5), (2, 0.25)]
