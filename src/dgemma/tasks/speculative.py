"""Self-speculation: diffusion drafts a canvas, and the causal mode of the same weights verifies it in one pass.

The idea is that of S2D2 (arXiv:2603.25702). Here, draft and verification read the same uniforms, and a token is kept if
the causal mode draws it, too. So the text is that of `generate_causal` with the same seed, whatever the drafts are.
"""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from dgemma.checks import Count, typed
from dgemma.diffusion import draws
from dgemma.diffusion.prediction import Prediction
from dgemma.model.causal import CausalRule
from dgemma.model.denoiser import Denoiser
from dgemma.run.knobs import learnt_noise
from dgemma.run.options import takes_options
from dgemma.tasks.autoregressive import CausalOptions, start_causal


class Speculation(NamedTuple):
    """The new tokens (B, N), padded after a stop token, and each row's forwards (B,): drafts and verifications."""

    new_tokens: Tensor
    forwards: Tensor


@takes_options(CausalOptions)
@typed
@torch.no_grad()
def generate_speculative(
    model: Denoiser, prompt_tokens: Tensor, *, draft_steps: Count = 1, **options: Unpack[CausalOptions]
) -> Speculation:
    """Generate the tokens of `generate_causal`, several per forward if the drafts are good.

    draft_steps: denoising forwards before each verification. A verification keeps the tokens up to the first that the
    causal mode draws otherwise, which it replaces. The next draft sees them on its canvas, with noise after them, and
    the last prediction. Reading a finished canvas takes one more pass, as in `generate`, which is not counted. A pass
    over many tokens may round otherwise than one token at a time, so that a rare token differs.

    Example: `generate_speculative(model, prompt, max_new_tokens=64, temperature=0.8).new_tokens`.
    """
    state, cache, rule, num_tokens = start_causal(model, prompt_tokens, options)
    noise, at = learnt_noise(model), torch.arange(model.config.canvas_length, device=model.device)
    last, forwards, ended = state.token, torch.zeros_like(state.seeds), state.done
    blocks: list[Tensor] = []
    while len(blocks) * len(at) < num_tokens and not bool(ended.all()):
        # The canvas begins with the last token, which the cache does not hold yet. u[:, i] draws the token after i.
        u = _uniforms(state.seeds, len(blocks) * len(at) + at)
        fresh, prediction = noise.prior(u), None
        canvas, num_known = torch.cat((last, fresh[:, 1:]), 1), torch.ones_like(forwards)
        while bool((is_open := (num_known <= len(at)) & ~ended).any()):
            is_known = at < num_known[:, None]
            for _ in range(draft_steps):
                seen = torch.where(is_known, canvas, fresh)
                prediction = _shape(model.denoise(seen, cache, self_cond=prediction), rule)
                canvas = torch.where(is_known, canvas, prediction.sample(u.roll(1, 1)))
            mark = cache.mark()
            drawn = _shape(Prediction(model.causal_logits(canvas, cache)), rule).sample(u)
            cache.rollback(mark)
            # A known token stays, even if this pass rounds otherwise.
            is_right = (canvas == drawn.roll(1, 1)) | is_known
            num_right = is_right.long().cumprod(1).sum(1)
            following = torch.where(at == num_right[:, None] - 1, drawn, canvas.roll(-1, 1))
            canvas, num_known = torch.cat((last, following[:, :-1]), 1), num_right + 1
            forwards = forwards + is_open * (draft_steps + 1)
            stops = torch.isin(following, state.seeds.new_tensor(rule.eos_token_ids)) & (at < num_right[:, None])
            ended = ended | stops.any(1)
        cache = model.encode(canvas, cache)
        blocks.append(following)
        last = following[:, -1:]
    text = torch.cat(blocks, 1)[:, :num_tokens]
    is_stop = torch.isin(text, state.seeds.new_tensor(rule.eos_token_ids)).long()
    is_text = is_stop.cumsum(1) - is_stop == 0  # up to the stop token
    text = torch.where(is_text, text, rule.pad_token_id)
    return Speculation(text[:, : int(is_text.sum(1).max())], forwards)


def _uniforms(seeds: Tensor, numbers: Tensor) -> Tensor:
    """Return the uniforms (B, C) by which `generate_causal` draws the tokens with these numbers (C,)."""
    step, each = numbers.repeat(len(seeds)), seeds.repeat_interleave(len(numbers))
    return draws.uniform(each, torch.zeros_like(each), step, 1, "token").view(len(seeds), -1)


def _shape(prediction: Prediction, rule: CausalRule) -> Prediction:
    return prediction.shaped(temperature=rule.temperature, top_k=rule.top_k, top_p=rule.top_p)
