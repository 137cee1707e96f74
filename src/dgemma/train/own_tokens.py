"""Own tokens: canvases that show tokens which the model proposed, in place of noise (SUNDAE, arXiv:2112.06749).

Random noise never makes the mistakes of a sampler, such as a doubled word whose halves support each other. A model that
has seen only such noise trusts them. The proposals come from the first pass, which self-conditioning needs anyway.
"""

import torch
from torch import Tensor

from dgemma.diffusion.prediction import inverse_cdf
from dgemma.model.diffusion import DiffusionGemma
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
        scores = logits / _TEMPERATURE
        if proposable is not None:
            scores = scores.masked_fill(~proposable.flatten(), -torch.inf)
        token = inverse_cdf(scores, u)
        log_prob = scores.gather(1, token[:, None])[:, 0] - scores.logsumexp(1)
        return torch.stack((token.to(scores.dtype), log_prob), 1)  # ids below 2²⁴ are exact in float32

    cap = model.config.final_logit_softcapping
    drawn = head.map_logits(draw, hidden.flatten(0, 2), model.embed_tokens.weight, u_token.flatten(), cap=cap)
    token, log_prob = drawn.view(*noisy.z.shape, 2).unbind(-1)
    ranked = torch.where(noisy.replaced, log_prob, -torch.inf).argsort(-1, descending=True)
    rank = ranked.argsort(-1)
    written = is_shown & noisy.replaced & (rank < share * noisy.replaced.sum(-1, keepdim=True))
    return torch.where(written, token.long(), noisy.z)
