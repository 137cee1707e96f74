"""Guided: the exact tilted distribution for single positions, and two prefixes that stay in step."""

from dataclasses import dataclass, replace

import pytest
import torch

import dgemma
from dgemma import presets
from dgemma.diffusion.noise import Noise
from dgemma.diffusion.prediction import Prediction
from dgemma.model.diffusion import DiffusionGemma
from dgemma.run.generate import generate
from dgemma.sampling.ancestral import Ancestral
from dgemma.tasks.guidance import Guided, GuidedCache, mix
from toy import LENGTH, NUM_TOKENS, SEQUENCES, likelihood, mask_noise, propagate, route_cells, uniform_noise

# Distributions of three independent positions, with the prompt (c) and without it (u).
WITH = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]], dtype=torch.float64)
WITHOUT = torch.tensor([[0.3, 0.3, 0.4], [0.5, 0.4, 0.1], [0.2, 0.5, 0.3]], dtype=torch.float64)


@dataclass(frozen=True)
class OnePositionTexts(dgemma.Denoiser):
    """The exact network of independent positions: p(x0) q(z | x0), with the cache as prior."""

    noise: Noise
    level: torch.Tensor | None = None

    def denoise(self, canvas, cache, self_cond=None, self_cond_mask=None):
        q = likelihood(self.noise, self.level).expand(len(canvas), -1, -1)  # (R, x, z)
        evidence = q.gather(2, canvas[:, None].expand(-1, NUM_TOKENS, -1)).transpose(1, 2)  # (R, C, x)
        logits = (cache * evidence).log()
        return Prediction(torch.nn.functional.pad(logits, (0, self.noise.vocab_size - NUM_TOKENS), value=-torch.inf))


@dataclass(frozen=True)
class GuidedTexts(dgemma.Denoiser):
    """The guided network at a level, in the form that the toy needs."""

    noise: Noise
    strength: float
    level: torch.Tensor | None = None

    def at(self, level):
        return replace(self, level=level)

    def denoise(self, canvas, cache=None):
        # A mask network needs no level. At level 1 all likelihoods except the mask's would be 0.
        level = torch.full_like(self.level, 0.5) if self.noise.kind == "mask" else self.level
        guided = Guided(OnePositionTexts(self.noise, level), strength=self.strength, unconditional=0)
        return guided.denoise(canvas, GuidedCache(WITH, WITHOUT))


@pytest.mark.parametrize("noise", [mask_noise(), uniform_noise()], ids=["mask", "uniform"])
@pytest.mark.parametrize("strength", [-1.0, -0.5, 0.0, 1.5])
def test_a_single_position_is_drawn_from_the_tilted_law(noise, strength):
    tilted = WITH ** (strength + 1) * WITHOUT**-strength
    tilted = tilted / tilted.sum(-1, keepdim=True)
    expected = tilted[torch.arange(LENGTH), SEQUENCES].prod(-1)  # (27,)
    law = propagate(
        Ancestral(),
        noise,
        steps=4,
        denoiser=GuidedTexts(noise, strength),
        cells={"event": route_cells},
        independent=True,
    ).law
    assert (law - expected).abs().sum().item() < 1e-12


def test_strength_zero_returns_the_conditional_bit_for_bit():
    conditional, unconditional = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0)) * 30
    assert torch.equal(mix(conditional, unconditional, 0.0), conditional)


def test_tokens_that_either_side_forbids_stay_forbidden():
    conditional = torch.tensor([0.0, -torch.inf, 0.0, -torch.inf])
    unconditional = torch.tensor([0.0, 0.0, -torch.inf, -torch.inf])
    for strength in (-1.0, 0.0, 2.0):
        assert mix(conditional, unconditional, strength).tolist() == [0.0] + [-torch.inf] * 3


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return DiffusionGemma(presets.tiny()).eval()


@pytest.fixture
def tokens(model):
    generator = torch.Generator().manual_seed(1)
    vocab = model.config.vocab_size
    shapes = {"prompt": (2, 5), "other": (1, 3), "block": (2, 4), "canvas": (2, 6)}
    return {name: torch.randint(5, vocab, shape, generator=generator) for name, shape in shapes.items()}


def logits(denoiser, canvas, cache):
    with torch.no_grad():
        return denoiser.denoise(canvas, cache).logits


def assert_is_what_a_plain_model_sees(model, guided_cache, canvas, with_prompt, without_prompt):
    """Check that both halves of a guided cache predict the same as prefixes that were encoded at once."""
    for strength, prefix in [(0.0, with_prompt), (-1.0, without_prompt)]:
        guided = Guided(model, strength=strength, unconditional=4)
        expected = logits(model, canvas, model.encode(prefix))
        torch.testing.assert_close(logits(guided, canvas, guided_cache), expected, atol=2e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("token", [4, torch.tensor(4)], ids=["int", "tensor"])
def test_one_prefix_lacks_the_prompt_and_both_have_the_committed_blocks(model, tokens, token):
    guided = Guided(model, strength=1.0, unconditional=token)
    prompt, block, canvas = tokens["prompt"], tokens["block"], tokens["canvas"]
    cache = guided.encode(prompt)
    hidden = torch.full_like(prompt, 4)
    assert_is_what_a_plain_model_sees(model, cache, canvas, prompt, hidden)
    cache = guided.encode(block, cache)
    cache = guided.encode(block[:, :0], cache, torch.ones(len(block), cache.num_seen))  # no new tokens change nothing
    assert_is_what_a_plain_model_sees(
        model, cache, canvas, torch.cat([prompt, block], 1), torch.cat([hidden, block], 1)
    )


@torch.no_grad()
def test_another_prompt_of_any_length_may_replace_the_prompt(model, tokens):
    prompt, block, other = tokens["prompt"], tokens["block"], tokens["other"]
    for unconditional in (other, other[0]):
        guided = Guided(model, strength=1.0, unconditional=unconditional)
        cache = guided.encode(block, guided.encode(prompt))
        assert_is_what_a_plain_model_sees(
            model, cache, tokens["canvas"], torch.cat([prompt, block], 1), torch.cat([other.expand(2, -1), block], 1)
        )


@torch.no_grad()
@pytest.mark.parametrize("with_other_prompt", [False, True], ids=["mask-token", "other-prompt"])
def test_padding_is_hidden_from_both(model, tokens, with_other_prompt):
    # Row 0's prompt is padded by two on the left; its result must be that of the three real tokens alone.
    prompt, block, other = tokens["prompt"], tokens["block"], tokens["other"]
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    guided = Guided(model, strength=1.0, unconditional=other if with_other_prompt else 4)
    cache = guided.encode(prompt, attention_mask=mask)
    cache = guided.encode(block, cache, torch.cat([mask, torch.ones_like(block)], 1))

    real = prompt[:1, 2:]
    alone = guided.encode(block[:1], guided.encode(real))
    expected = logits(guided, tokens["canvas"][:1], alone)
    torch.testing.assert_close(logits(guided, tokens["canvas"], cache)[:1], expected, atol=2e-5, rtol=0)


@torch.no_grad()
def test_rows_and_copies_of_a_guided_cache_stay_pairs(model, tokens):
    guided = Guided(model, strength=1.0, unconditional=4)
    cache = guided.encode(tokens["prompt"])
    before = logits(guided, tokens["canvas"], cache)
    copy_ = cache.clone()
    guided.encode(tokens["block"], copy_)
    assert torch.equal(logits(guided, tokens["canvas"], cache), before)
    row = cache.select(torch.tensor([1]))
    torch.testing.assert_close(logits(guided, tokens["canvas"][1:], row), before[1:], atol=2e-5, rtol=0)
    assert row.batch_size == 1
    assert cache.lengths.tolist() == [5, 5]


def test_generate_runs_a_guided_model_like_any_other(model, tokens):
    num_tokens = 2 * model.config.canvas_length
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])

    def write(denoiser, eos):
        return generate(
            denoiser, tokens["prompt"], attention_mask=mask, max_new_tokens=num_tokens, steps=3, eos_token_ids=eos
        )

    first, second = write(model, []).new_tokens.tolist()
    stop_token = next(token for token in first if token not in second)  # row 0 ends early, so caches are joined
    plain, same = write(model, [stop_token]), write(Guided(model, strength=0.0, unconditional=4), [stop_token])
    assert torch.equal(same.tokens, plain.tokens)
    assert same.cache.lengths.tolist() == plain.cache.lengths.tolist()
    assert same.cache.unconditional.lengths.tolist() == plain.cache.lengths.tolist()

    steered = write(Guided(model, strength=2.0, unconditional=4), [])
    assert not torch.equal(steered.tokens[:, 5:], torch.tensor([first, second]))
    turn = generate(
        Guided(model, strength=2.0, unconditional=4), tokens["block"], cache=same.cache, max_new_tokens=1, steps=2
    )
    assert turn.cache.lengths.tolist() == turn.cache.unconditional.lengths.tolist()


def test_a_guided_model_has_the_files_and_the_image_budget_of_its_model():
    model = dgemma.DiffusionGemma(dgemma.presets.tiny())
    model.source, model.image_tokens = "a folder", 70
    guided = Guided(model, strength=1.0, unconditional=4)
    assert (guided.source, guided.image_tokens) == ("a folder", 70)
