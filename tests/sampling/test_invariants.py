"""No sampler changes a frozen token, leaves an allowed set or commits noise, under any process."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch

import dgemma
from dgemma.diffusion.prediction import Prediction
from dgemma.run.knobs import Knobs
from dgemma.run.step import start_state, step
from dgemma.sampling import Confidence, EndOfText, ReMDM, StableAndConfident
from dgemma.sampling.temperature import LinearTemperature
from every_sampler import SAMPLERS, noises

VOCAB, CANVAS_LEN, STEPS = 7, 5, 4
# Rows differ in their shares of frozen positions and of allowed tokens, and in the sharpness of their logits.
ROWS = torch.tensor(list(product((0.0, 0.3, 0.9, 1.0), (0.0, 0.4, 1.0), (0.1, 2.0, 30.0))))
BATCH = len(ROWS)
FROZEN_SHARE, ALLOWED_SHARE, SHARPNESS = ROWS.view(BATCH, 3, 1, 1).unbind(1)  # (B, 1, 1) each
CASES = [(sampler, noise) for sampler in SAMPLERS for noise in noises(sampler, VOCAB)]


@dataclass(frozen=True)
class RandomDenoiser(dgemma.Denoiser):
    """Logits, from flat to sharp, that depend only on the canvas."""

    seed: int

    def denoise(self, canvas, cache, self_cond=None, self_cond_mask=None):
        table = torch.randn(CANVAS_LEN, VOCAB, VOCAB, generator=torch.Generator().manual_seed(self.seed))
        position = torch.arange(CANVAS_LEN).expand_as(canvas)
        neighbours = table[position, canvas.roll(1, dims=-1)] + table[position, canvas]
        return Prediction(SHARPNESS * neighbours)


def random_setting(seed, noise):
    """Random frozen tokens, inside or outside the allowed sets. Each position allows a token that is not a mask."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, CANVAS_LEN)
    frozen = torch.rand(shape, generator=generator) < FROZEN_SHARE[:, 0]
    tokens = torch.randint(VOCAB, shape, generator=generator)
    proposable = torch.tensor([v for v in range(VOCAB) if v != noise.mask_token])
    one = proposable[torch.randint(len(proposable), shape, generator=generator)]
    allowed = (torch.rand(*shape, VOCAB, generator=generator) < ALLOWED_SHARE).scatter(-1, one[..., None], True)
    return torch.where(frozen, tokens, -1), frozen, allowed


def check_run(sampler, noise, seed):
    canvas, frozen, allowed = random_setting(seed, noise)
    knobs = Knobs(
        sampler=sampler, temperature=LinearTemperature(), stop=StableAndConfident() | EndOfText(token_ids=(1,))
    )
    state = start_state(
        knobs,
        noise,
        seeds=seed + torch.arange(BATCH),
        canvas_len=CANVAS_LEN,
        num_steps=STEPS,
        canvas=canvas,
        frozen=frozen,
        allowed=allowed,
    )
    may_show = allowed.clone()
    if noise.mask_token is not None:
        may_show[..., noise.mask_token] = True  # as noise, the mask is exempt
        allowed[..., noise.mask_token] = False
    for _ in range(STEPS):
        state, _ = step(RandomDenoiser(seed), state, cache=None, knobs=knobs)
        assert torch.equal(state.canvas[frozen], canvas[frozen]), "a frozen token changed"
        assert torch.equal(state.draft[frozen], canvas[frozen]), "a frozen token would not be committed"
        assert not (state.open & frozen).any(), "a frozen position was opened"
        shown = may_show.gather(-1, state.canvas[..., None])[..., 0]
        assert (shown | frozen).all(), "the canvas left an allowed set"
    committed = allowed.gather(-1, state.draft[..., None])[..., 0]
    assert (committed | frozen).all(), "noise or a forbidden token would be committed"


@pytest.mark.parametrize(("sampler", "noise"), CASES, ids=[f"{s}-{n.kind}" for s, n in CASES])
def test_frozen_tokens_stay_and_allowed_sets_hold(sampler, noise):
    check_run(sampler, noise, seed=0)


def test_settings_that_exclude_each_other_are_refused():
    with pytest.raises(ValueError, match=r"Confidence\.order_temperature must be 0 for order 'random', got 3"):
        Confidence(order="random", order_temperature=3.0)
    with pytest.raises(ValueError, match=r'ReMDM\.eta must be None for strategy "conf", got 0.1'):
        ReMDM(strategy="conf", eta=0.1)
