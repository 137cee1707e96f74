"""Own tokens: canvases that show tokens which the model proposed, in place of noise (SUNDAE, arXiv:2112.06749).

Random noise never makes the mistakes of a sampler, such as a doubled word whose halves support each other. A model that
has seen only such noise trusts them. The proposals come from the first pass, which self-conditioning needs anyway.
"""

import torch
from torch import Tensor

from dgemma.diffusion.prediction import Prediction
from dgemma.model.diffusion import DiffusionGemma
from dgemma.sampling.ranking import best
from dgemma.train import head
from dgemma.train.canvases import NoisyCanvases

_TEMPERATURE = 0.7  # of the draws. Samplers of small models use less than 1, too.


def show_own_tokens(model: DiffusionGemma, noisy: NoisyCanvases, hidden: Tensor, proposable: Tensor | None) -> Tensor:
    """Return canvases (B, K, C) with own tokens, from the last hidden states (B, K, C, D) of a first pass.

    proposable: the tokens that may be drawn; None for all.
    """
    assert noisy.own is not None
    is_shown, share, u_token = noisy.own

    def draw(logits: Tensor, u: Tensor) -> Tensor:
        prediction = Prediction(logits[None]).shaped(temperature=_TEMPERATURE, allowed=proposable)
        token = prediction.sample(u[None])
        log_prob = prediction.logits.log_softmax(-1).gather(-1, token[..., None])[0, :, 0]
        return torch.stack((token[0].to(log_prob.dtype), log_prob), 1)  # ids below 2²⁴ are exact in float32

    cap = model.config.final_logit_softcapping
    drawn = head.map_logits(draw, hidden.flatten(0, 2), model.embed_tokens.weight, u_token.flatten(), cap=cap)
    token, log_prob = drawn.view(*noisy.z.shape, 2).unbind(-1)
    candidates = (noisy.replaced & is_shown).flatten(0, 1)
    count = (share * noisy.replaced.sum(-1, keepdim=True)).flatten()
    written = best(log_prob.flatten(0, 1), candidates, count).view_as(noisy.z)
    return torch.where(written, token.long(), noisy.z)
