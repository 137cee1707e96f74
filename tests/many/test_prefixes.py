"""Shared prefixes: prompts read what they share once, and write the same tokens as alone."""

import pytest
import torch

import dgemma
from dgemma import SharedPrefixes, Slot
from dgemma.train import LoRA, add_lora, drop_lora
from image_prompts import END, IMAGE, START, random_images
from kernel_inputs import make_model
from parity.test_generate import published_generate
from published import pair

OPTIONS = {"max_new_tokens": 8, "steps": 3}


@pytest.fixture
def model():
    """Canvases of 4 tokens, a sliding layer with a window of 5, and a full one."""
    return make_model(torch.device("cpu")).double()


def draw(*shape, seed=0):
    return torch.randint(5, 40, shape, generator=torch.Generator().manual_seed(seed)).tolist()


SYSTEM, DOCUMENT = draw(23), draw(9, seed=1)
PROMPTS = [
    *([*SYSTEM, *draw(length, seed=length)] for length in (3, 7, 1)),
    *([*SYSTEM, *DOCUMENT, *draw(length, seed=length)] for length in (2, 5)),
    *([*draw(12, seed=8), *draw(length, seed=length)] for length in (4, 6)),
    *(SYSTEM[:2], SYSTEM, SYSTEM, draw(30, seed=9)),
]


def write(model, prompts, prefixes=None, **options):
    return list(dgemma.generate_many(model, prompts, prefixes=prefixes, progress=False, **OPTIONS, **options))


def write_alone(model, prompts):
    runs = (dgemma.generate(model, torch.tensor([prompt]), seed=[at], **OPTIONS) for at, prompt in enumerate(prompts))
    return [run.new_tokens[0] for run in runs]


def assert_same(results, expected):
    for result, tokens in zip(results, expected, strict=True):
        assert torch.equal(result.new_tokens, tokens)


@pytest.mark.parametrize(
    "batch_size", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(11, marks=pytest.mark.slow)]
)
def test_prompts_with_common_prefixes_write_the_tokens_of_generate(model, batch_size):
    """In float64, where no rounding decides. Prefixes are nested, repeated, too short to share, or nobody else's."""
    prefixes, expected = SharedPrefixes(), write_alone(model, PROMPTS)
    assert_same(write(model, PROMPTS, prefixes, batch_size=batch_size), expected)
    assert prefixes.num_kept == 3  # SYSTEM; SYSTEM with DOCUMENT; the twelve tokens
    assert prefixes.num_tokens == sum(map(len, PROMPTS))
    assert prefixes.num_read < prefixes.num_tokens - 4 * len(SYSTEM)
    for _ in range(2):
        before = prefixes.num_read
        assert_same(write(model, PROMPTS, prefixes, batch_size=batch_size), expected)
    assert prefixes.num_read - before < 4 * len(PROMPTS)  # a prompt that comes again reads less than a canvas


def test_a_long_prefix_of_one_row_takes_no_room_from_another():
    """A row with 26 tokens of a prefix and a row that reads 24 are together longer than either may be."""
    torch.manual_seed(0)
    config = make_model(torch.device("cpu")).config.replace(max_position_embeddings=40)
    model, prefix = dgemma.DiffusionGemma(config).double(), draw(26)
    prompts = [[*prefix, 7], [*prefix, 8], [*prefix, 9], draw(24, seed=1)]
    prefixes = SharedPrefixes()
    assert_same(write(model, prompts, prefixes, batch_size=4), write_alone(model, prompts))
    assert prefixes.num_reused == 2 * len(prefix)


def test_prompts_with_a_common_prefix_write_the_tokens_of_transformers(monkeypatch):
    ours, theirs = pair(seed=3)
    prompts = torch.cat((torch.tensor(draw(40)).expand(3, -1), torch.randint(5, 512, (3, 11))), dim=1)
    options = {"max_new_tokens": 64, "max_denoising_steps": 6, "eos_token_id": [1]}
    want = published_generate(monkeypatch, theirs, prompts, torch.ones_like(prompts), [5, 6, 7], **options).sequences
    prefixes = SharedPrefixes()
    found = dgemma.generate_many(
        ours, prompts, prefixes=prefixes, batch_size=2, max_new_tokens=64, steps=6, seed=5, eos_token_ids=[1]
    )
    assert [row.new_tokens.tolist() for row in found] == want[:, 51:].tolist()
    assert prefixes.num_reused == 80


def test_each_turn_of_a_chat_reads_the_last_two_turns(model):
    chat = draw(60)
    turns = [chat[:end] for end in (10, 20, 30, 40, 50, 60)]
    prefixes = SharedPrefixes()
    read = []
    for at, turn in enumerate(turns):
        before = prefixes.num_read
        (result,) = write(model, [turn], prefixes, seed=at)
        read.append(prefixes.num_read - before)
        alone = dgemma.generate(model, torch.tensor([turn]), seed=[at], **OPTIONS)
        assert torch.equal(result.new_tokens, alone.new_tokens[0])
    assert read == [10, 20, 20, 20, 20, 20]


def logits(model, cache):
    return model.denoise(torch.arange(5, 5 + model.config.canvas_length).expand(cache.batch_size, -1), cache).logits


def test_an_image_is_a_part_of_the_prefix():
    torch.manual_seed(0)
    model = dgemma.DiffusionGemma(dgemma.presets.tiny(vision=True)).double().requires_grad_(False)
    grids = ((6, 9), (9, 9))
    first, other = random_images(grids), random_images(grids, seed=1)
    mixed = type(first).join([first.select([0]), other.select([1])])
    intro, text = torch.randint(128, 384, (40,)), torch.randint(128, 384, (40,))
    marks = [torch.tensor([START, *[IMAGE] * size, END]) for size in first.num_tokens]
    prompt = torch.cat((intro, marks[0], text, marks[1], text))
    prefixes, images = SharedPrefixes(), [first, other, mixed, first]
    cache = prefixes.encode(model, [prompt, prompt, prompt, torch.cat((prompt, text))], images)
    assert prefixes.num_kept == 3  # up to the first image; up to the second one after `first`; the whole prompt
    for row, (found, own) in enumerate(zip(logits(model, cache), images, strict=True)):
        tokens = prompt if row < 3 else torch.cat((prompt, text))
        torch.testing.assert_close(found, logits(model, model.encode(tokens[None], images=own))[0], rtol=0, atol=1e-12)


def test_the_budget_bounds_the_memory_and_the_least_recently_used_prefix_leaves(model):
    pairs = [[torch.tensor([*draw(30, seed=at), word]) for word in (6, 7)] for at in range(4)]
    one = SharedPrefixes()
    one.encode(model, pairs[0], [None, None])
    prefixes = SharedPrefixes(num_bytes=2 * one.num_bytes)
    for at in (0, 1, 0, 2):  # 1 leaves
        prefixes.encode(model, pairs[at], [None, None])
        assert prefixes.num_bytes <= 2 * one.num_bytes
    assert (prefixes.num_kept, prefixes.num_evicted) == (2, 1)
    for at, num_read in ((0, 2), (2, 2), (1, 32)):
        before = prefixes.num_read
        cache = prefixes.encode(model, pairs[at], [None, None])
        assert prefixes.num_read - before == num_read
        want = logits(model, model.encode(torch.stack(pairs[at])))
        torch.testing.assert_close(logits(model, cache), want, rtol=0, atol=1e-12)
    small, none = (SharedPrefixes(num_bytes=size) for size in (one.num_bytes - 1, 0))
    for too_small, num_read in ((small, 32), (none, 62)):
        too_small.encode(model, pairs[0], [None, None])
        assert (too_small.num_kept, too_small.num_read) == (0, num_read)


def test_a_hundred_thousand_kept_prefixes_would_not_be_compared(model):
    prefixes = SharedPrefixes()
    for at in range(300):
        prefixes.encode(model, [torch.tensor(draw(8, seed=at))] * 2, [None, None])
    assert prefixes.num_kept == 256


def test_other_weights_read_again(model):
    prefixes, prompts = SharedPrefixes(), [torch.tensor([*SYSTEM, word]) for word in (6, 7)]

    def check():
        want = logits(model, model.encode(torch.stack(prompts)))
        got = logits(model, prefixes.encode(model, prompts, [None, None]))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)

    check()
    for weight in add_lora(model, LoRA(rank=2)):
        weight.data.add_(0.1)
    check()
    drop_lora(model)
    check()
    with torch.no_grad():
        model.layers[0].mlp.up_proj.weight.mul_(2)
    check()
    assert prefixes.num_kept == 1
    model = make_model(torch.device("cpu")).double()  # another one
    check()
    assert (prefixes.num_kept, prefixes.num_reused) == (2, 5 * 23)


@pytest.mark.parametrize("mode", ["sequential", "joint"])
def test_decisions_about_one_text_read_it_once_and_are_those_of_each_alone(model, mode):
    templates = [[[*SYSTEM, *draw(size, seed=size)], Slot([[6], [7]]), [9], Slot([[8], [9]])] for size in (1, 4, 2)]
    prefixes = SharedPrefixes()
    found = list(dgemma.decide_many(model, templates, prefixes=prefixes, mode=mode, progress=False))
    assert prefixes.num_read == 23 + 7
    for at, (filled, template) in enumerate(zip(found, templates, strict=True)):
        alone = dgemma.slots(model, template, mode=mode, seed=at)
        for answer, want in zip(filled.answers, alone.answers, strict=True):
            torch.testing.assert_close(answer.probabilities, want.probabilities, rtol=0, atol=1e-12)
