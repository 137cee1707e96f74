"""The exact negative ELBO of mask, uniform and hybrid noise, as an integrand over time.

Mask: MDLM's weighted cross-entropy (arXiv:2406.07524). Uniform: Duo (arXiv:2506.10892). Hybrid: GIDD
(arXiv:2503.04482). The last two share one formula. The noise process replaces any token by z at the rate r(z). Its
reverse jumps from z to j at the rate r(z)·q(j)/q(z), where q is the marginal given x. The network replaces q by q_θ,
the marginal given the prediction. The divergence of the two jump processes is Σ_j r(z)[ρ_j log(ρ_j/ρθ_j) - ρ_j + ρθ_j]
with ρ_j = q(j)/q(z), which equals

    r(z)/q(z) · [KL(q ‖ q_θ) + q(z)/q_θ(z) - 1 - log(q(z)/q_θ(z))].

Its expectation over z, integrated over t in (0, 1) and summed over positions, is an upper bound on -log p(x). The bound
is tight for an exact network that predicts a token from the other positions of z alone (leave-one-out), under any
schedule from α = 1 to 0.
"""

from typing import Literal

import torch
from torch import Tensor

from dgemma.checks import require
from dgemma.diffusion.noise import HybridNoise, MaskNoise, Noise, UniformNoise

Parametrisation = Literal["mean", "loo"]

_ENDS = 1e-20, 1 - 2.0**-53  # range of the noise level; at 0 and 1 the integrand is only defined as a limit


def integrand(
    noise: Noise,
    logits: Tensor,
    x: Tensor,
    z: Tensor,
    noise_level: Tensor,
    *,
    parametrisation: Parametrisation = "mean",
    weights: Tensor | None = None,
) -> Tensor:
    """Return each position's contribution to the NELBO at this level, per unit of the schedule's time, in nats.

    logits (B, C, V); x and z (B, C), the clean and the noisy tokens; noise_level (B,) or broadcastable to (B, C). The
    result is (B, C), float64 if the logits are, else float32. `parametrisation` says what the logits mean. "mean" is
    p(x | z), which cross-entropy learns. "loo" is p(x | z without this position). The bound is defined on "loo", so
    "mean" is converted to it. The mask token is never proposed (SUBS). Under mask noise, a clean token costs nothing.
    `weights` (B, C) replace `exact_weights`; the result then trains more easily, but is not a bound. Memory is a few
    copies of the logits.

    Example: `nelbo.integrand(noise, model.denoise(z, cache).logits, x, z, level).sum(-1)` estimates the bound on
    -log p(x), if the time of `level` is uniform.
    """
    logits = _proposable(noise, logits)
    if weights is None:
        weights = exact_weights(noise, x, z, noise_level)
    level = _inner_level(noise_level)
    if noise.kind == "mask":
        cost = torch.where(noise.masked(z), _cross_entropy(logits, x), 0.0)
    else:
        if parametrisation == "mean":
            logits = noise.to_loo(logits, z, level.expand(x.shape))
        cost = _jump_divergence(noise, logits, x, z, level)
    return (weights * cost).to(logits.dtype)


def exact_weights(noise: Noise, x: Tensor, z: Tensor, noise_level: Tensor) -> Tensor:
    """Return the weight of each position's divergence, r(z)/q(z) per unit of the schedule's time: (B, C) float64.

    Under mask noise the divergence is a cross-entropy, with a weight only where z is the mask.

    Example: `exact_weights(noise, x, z, level).clamp(max=2.0)` gives GIDD's clipped weights.
    """
    level = _inner_level(noise_level)
    speed = -noise.schedule.derivative(noise.schedule.time(1 - level))
    if noise.kind == "mask":
        return torch.where(noise.masked(z), speed / level, 0.0)
    _, odds = _floor_and_odds(noise, level)
    return speed * _hazard(noise, z, level) / (1 + odds * (z == x).double())


def reconstruction(
    noise: Noise,
    logits: Tensor,
    x: Tensor,
    z: Tensor,
    noise_level: Tensor,
    *,
    parametrisation: Parametrisation = "mean",
) -> Tensor:
    """Return -log p(x | z) per position, (B, C), in nats: the cost of drawing the text from z in one step.

    Arguments are those of `integrand`. Under mask noise, a clean token costs nothing.

    Example: the integral of `integrand` from level 1e-3 to 1, plus this at 1e-3, bounds -log p(x) for any network.
    """
    logits = _proposable(noise, logits)
    if noise.kind == "mask":
        return torch.where(noise.masked(z), _cross_entropy(logits, x), 0.0)
    if parametrisation == "loo":
        logits = noise.to_mean(logits, z, _inner_level(noise_level).expand(x.shape))
    return _cross_entropy(logits, x)


def _jump_divergence(noise: Noise, logits: Tensor, x: Tensor, z: Tensor, level: Tensor) -> Tensor:
    """Return the bracket of the module's formula, for leave-one-out logits: (B, C).

    `floor` is the probability that noise alone gives a token. In units of `floor`, q is 1 + odds at x and 1 elsewhere,
    and q_θ is 1 + odds·p. Then the large terms cancel, and the vocabulary enters through one sum of log1p.
    """
    floor, odds = _floor_and_odds(noise, level)
    # logsumexp sums pairwise; a softmax over 262,144 float32 entries can be wrong by 1e-4.
    probs = (logits - logits.logsumexp(-1, keepdim=True)).exp()
    p_x, p_z = (probs.gather(-1, token[..., None])[..., 0].double() for token in (x, z))
    log_sum = torch.log1p(odds.to(logits.dtype)[..., None] * probs).sum(-1).double()
    divergence = floor * ((1 + odds) * torch.log1p(odds) - odds * torch.log1p(odds * p_x) - log_sum)  # KL(q ‖ q_θ)

    is_clean = (z == x).double()
    excess = odds * (is_clean - p_z) / (1 + odds * p_z)  # q(z)/q_θ(z) - 1
    log_ratio = torch.log1p(odds * is_clean) - torch.log1p(odds * p_z)
    series = excess**2 * (1 / 2 - excess * (1 / 3 - excess / 4))  # excess - log(1 + excess) for a small excess
    ratio_part = torch.where(excess.abs() < 1e-3, series, excess - log_ratio)
    ratio_part = torch.where(noise.masked(z), 0.0, ratio_part)  # a mask is equally likely under both
    return divergence + ratio_part


def _floor_and_odds(noise: Noise, level: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability that noise alone gives a token, and the clean token's extra probability in that unit."""
    if isinstance(noise, HybridNoise):
        rate, num_tokens = noise.uniform_rate(level), noise.vocab_size - 1
        return rate / (1 + rate) / num_tokens, num_tokens * (1 - level) / rate
    return level / noise.vocab_size, noise.vocab_size * (1 - level) / level


def _hazard(noise: Noise, z: Tensor, level: Tensor) -> Tensor:
    """Return d log(P(noise gives z) / P(clean)) / d level, (B, C). It equals r(z)/q(z) where z is noise."""
    pure = 1 / (level * (1 - level))
    if not isinstance(noise, HybridNoise):
        return pure
    return pure * torch.where(noise.masked(z), 1.0, level + noise.gamma / 2 * (1 - 2 * level))


def _inner_level(noise_level: Tensor) -> Tensor:
    level = noise_level[:, None] if noise_level.dim() == 1 else noise_level
    return level.double().clamp(*_ENDS)  # (B, C) or (B, 1); one number per position, so float64 costs nothing


def _cross_entropy(logits: Tensor, x: Tensor) -> Tensor:
    return logits.logsumexp(-1) - logits.gather(-1, x[..., None])[..., 0]


def _proposable(noise: Noise, logits: Tensor) -> Tensor:
    """Return the logits in float32 or float64, without the mask token; raise if they do not fit the noise."""
    check_process(noise)
    num_tokens, rule = logits.shape[-1], f"cover the noise's {noise.vocab_size} tokens"
    require(num_tokens == noise.vocab_size, "nelbo logits", rule, num_tokens, "Pass the noise the model's vocab_size.")
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if noise.mask_token is None:
        return logits
    return logits.masked_fill(torch.arange(num_tokens, device=logits.device) == noise.mask_token, -torch.inf)


def check_process(noise: Noise) -> None:
    """Raise ValueError for noise of the user's own classes, for which these formulas might not be bounds."""
    rule, fix = "be MaskNoise, UniformNoise or HybridNoise itself", "Train with CrossEntropy."
    require(type(noise) in (MaskNoise, UniformNoise, HybridNoise), "nelbo noise", rule, noise, fix)
