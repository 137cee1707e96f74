"""Laws of decisions: the probability that a sampler decides as it did, given its prediction.

The probability of a run is the product over its steps. Noise tokens are left out, because no weights affect them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgemma.diffusion.decision import Decision, routes
from dgemma.diffusion.prediction import Prediction, Transform
from dgemma.diffusion.state import DenoiseState


class Law(NamedTuple):
    """The law of a decision of B rows. One part of the decision was drawn, the other follows from the prediction.

    Example: `record.knobs.sampler.law(record.prediction, record.before, decision).log_prob`.
    """

    drawn: Tensor  # (B,) float64: the log-probability of the drawn part
    agrees: Tensor  # (B,) bool: the other part is what this prediction implies
    memory: Any = None  # of the sampler after the decision

    @property
    def log_prob(self) -> Tensor:
        """The log-probability of the decision, (B,); -inf where the prediction implies another one."""
        return torch.where(self.agrees, self.drawn, -torch.inf)


def law_of_rule(
    implied: Decision, prediction: Prediction, state: DenoiseState, decision: Decision, *, drawn: bool | Tensor
) -> Law:
    """The law of a sampler whose positions follow from the prediction.

    implied: the sampler's decision from this prediction. drawn: where written tokens are drawn from the prediction,
    (B, C) or for all positions. Elsewhere they follow from the prediction too.

    Example: `law_of_rule(self(prediction, state), prediction, state, decision, drawn=not self.greedy)`.
    """
    drawn = drawn & decision.write
    same = (implied.write == decision.write) & ((implied.renoise & ~implied.write) == decision.renoise)
    same &= drawn | ~decision.write | (implied.tokens == decision.tokens)
    return Law(log_written(prediction, decision.tokens, drawn), (same | state.frozen).all(-1), implied.memory)


def log_written(prediction: Prediction, tokens: Tensor, where: Tensor) -> Tensor:
    """The log-probability that a draw has these tokens (B, C) at some positions, `where` (B, C) bool; (B,) float64."""
    nothing = torch.zeros_like(tokens, dtype=torch.float64)
    return log_mean_of_tokens(prediction, TokenWeights(tokens, nothing, nothing.masked_fill(where, -torch.inf)))


class TokenWeights(NamedTuple):
    """Weighs a drawn token: exp(own) if it is the one of `tokens`, otherwise exp(other); all (B, C)."""

    tokens: Tensor
    own: Tensor
    other: Tensor

    def __call__(self, logits: Tensor, positions: slice) -> Tensor:
        tokens, own, other = (part[:, positions, None] for part in self)
        is_own = torch.arange(logits.shape[-1], device=logits.device) == tokens
        return logits + torch.where(is_own, own, other).to(logits.dtype)


def log_mean_of_tokens(prediction: Prediction, weights: TokenWeights) -> Tensor:
    """`log_mean` for token weights. If positions are independent, it reads one probability per position."""
    if prediction.joint is not None:
        return prediction.joint.log_mean(weights)
    tokens, own, other = weights
    log_prob = prediction.log_prob(tokens).double()
    prob = log_prob.exp()
    mean = safe_log(prob * own.exp() + (1 - prob) * other.exp())
    # Only the token itself counts: its log-probability is exact, even if its probability underflows.
    return torch.where(other == -torch.inf, log_prob + own, mean).sum(-1)


def log_mean(prediction: Prediction, weigh: Transform) -> Tensor:
    """Return the log of the mean of Π w_i(x_i) over draws x of the canvas, (B,) float64.

    `weigh` adds log w_i(v) to the logits (B, c, V) of some positions. Under a joint law, positions that are already
    decided must have the weight 1.

    Example: `log_mean(prediction, Allow(allowed))` is the log-probability that a draw has allowed tokens only.
    """
    if prediction.joint is not None:
        return prediction.joint.log_mean(weigh)
    return log_means(prediction, weigh).sum(-1)


def log_means(prediction: Prediction, weigh: Transform) -> Tensor:
    """`log_mean` of each position alone, (B, C) float64."""
    weighed = torch.cat([log_sum(piece) for piece in prediction.with_bias(weigh).pieces()], dim=1)
    return weighed.double() - prediction.statistics.log_normalizer


def log_transition(prediction: Prediction, state: DenoiseState, decision: Decision, *, kappa: float = 1.0) -> Tensor:
    """The log-probability of a decision of `transition`, for x0 drawn from the prediction; (B,) float64.

    At each position it is the probability of what was recorded (write a token, stay, renoise), summed over the x0 that
    can lead to it.
    """
    canvas = state.canvas

    def event(x0: Tensor) -> Tensor:
        """The log-probability of the recorded event, given x0 (B, C)."""
        clean, stay = routes(x0, state, kappa)
        noise = (1 - clean - stay).clamp(min=0.0)
        return safe_log(torch.where(decision.write, clean, torch.where(decision.renoise, noise, stay)))

    tokens = torch.where(decision.write, decision.tokens, canvas)
    other = event((canvas == 0).long())  # any x0 that is not on the canvas has the same routes
    own, other = event(tokens), other.masked_fill(decision.write, -torch.inf)
    weights = TokenWeights(tokens, *(part.masked_fill(state.frozen, 0.0) for part in (own, other)))
    return log_mean_of_tokens(prediction, weights)


def log_sum(values: Tensor) -> Tensor:
    """Log-sum over the last dimension, (..., n) → (...). Unlike torch's, it has a gradient if all values are -inf."""
    base = finite(values.amax(-1)).detach()
    return base + safe_log((values - base[..., None]).exp().sum(-1))


def safe_log(values: Tensor) -> Tensor:
    """The logarithm. At 0 it is -inf, with gradient 0 instead of infinity, so that no NaN flows back."""
    positive = values > 0
    return torch.where(positive, torch.where(positive, values, 1.0).log(), -torch.inf)


def finite(values: Tensor) -> Tensor:
    """Replace -inf, the maximum of an empty set, by 0, so that it can be subtracted."""
    return values.masked_fill(values == -torch.inf, 0.0)
