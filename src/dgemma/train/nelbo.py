"""The exact negative ELBO of every noise process, as an integrand over time.

Mask: MDLM's weighted cross-entropy (arXiv:2406.07524). Uniform: Duo's (arXiv:2506.10892). Hybrid: GIDD's
(arXiv:2503.04482). The last two are one formula. A process replaces tokens at the rate r(z), and its reverse, which the
network imitates, jumps from z to j at the rate r(z)·q(j)/q(z), where q is the marginal given x and q_θ the one given
the prediction. Two jump processes differ by Σ_j r(z)[ρ_j log(ρ_j/ρθ_j) - ρ_j + ρθ_j], ρ_j = q(j)/q(z), which adds up
to

    r(z)/q(z) · [KL(q ‖ q_θ) + q(z)/q_θ(z) - 1 - log(q(z)/q_θ(z))].

Integrated over t in (0, 1), in expectation over z and summed over positions it bounds -log p(x) from above, with
equality for the exact leave-one-out network, under any schedule that runs from α = 1 to 0.
"""

import torch
from torch import Tensor

from dgemma.diffusion.noise import HybridNoise, MaskNoise, Noise, UniformNoise

PARAMETRISATIONS = ("mean", "loo")

_ENDS = 1e-20, 1 - 2.0**-53  # of the noise level: where the integrand is a limit, take what is next to it


def integrand(
    noise: Noise,
    logits: Tensor,
    x: Tensor,
    z: Tensor,
    noise_level: Tensor,
    *,
    parametrisation: str = "mean",
    weights: Tensor | None = None,
) -> Tensor:
    """What each position adds to the NELBO at this level, per unit of the schedule's time, in nats.

    logits (B, C, V); x and z (B, C), the clean and the noised tokens; noise_level (B,) or broadcastable to (B, C) →
    (B, C), float64 if the logits are and float32 otherwise. `parametrisation` says what the logits are about: "mean",
    p(x | z), which cross-entropy learns, or "loo", p(x | z without this position), which the bound wants and "mean" is
    converted to. The mask token is never proposed (SUBS), and a token that mask noise left alone costs nothing. Memory
    is a few copies of the logits: slice the positions where that is too much. `weights` (B, C) replace
    `exact_weights`: a loss that is easier to train, and no bound.

    Example: `nelbo.integrand(noise, model.denoise(z, cache).logits, x, z, level).sum(-1)` estimates -log p(x).
    """
    _check(noise, logits, parametrisation)
    logits = _without_mask(noise, logits if logits.dtype == torch.float64 else logits.float())
    if weights is None:
        weights = exact_weights(noise, x, z, noise_level)
    level = _per_position(noise_level)
    if noise.kind == "mask":
        cost = torch.where(noise.masked(z), _cross_entropy(logits, x), 0.0)
    else:
        if parametrisation == "mean":
            logits = noise.to_loo(logits, z, level.expand(x.shape))
        cost = _jump_divergence(noise, logits, x, z, level)
    return (weights * cost).to(logits.dtype)


def exact_weights(noise: Noise, x: Tensor, z: Tensor, noise_level: Tensor) -> Tensor:
    """What the bound multiplies a position's divergence by: r(z)/q(z) per unit of the schedule's time, (B, C) float64.

    Under mask noise the divergence is a cross-entropy, weighted where z is the mask.

    Example: `exact_weights(noise, x, z, level).clamp(max=2.0)` are GIDD's clipped weights.
    """
    level = _per_position(noise_level)
    speed = -noise.schedule.derivative(noise.schedule.time(1 - level))
    if noise.kind == "mask":
        return torch.where(noise.masked(z), speed / level, 0.0)
    _, odds = _floor_and_odds(noise, level)
    return speed * _hazard(noise, z, level) / (1 + odds * (z == x).double())


def integrand_by_count(noise: Noise, logits: Tensor, x: Tensor, z: Tensor) -> Tensor:
    """LLaDA's estimator of the mask NELBO (arXiv:2502.09992), for a z with l of its C positions masked by
    `mask_exactly`, l uniform on 1..C: C/l times the cross-entropy of the masked ones. → (B, C), nats.

    Its sum over positions has the same mean as `integrand`'s, and no 1/t to blow up.

    Example: `nelbo.integrand_by_count(noise, logits, x, nelbo.mask_exactly(noise, x, num_masked, u)).sum(-1)`.
    """
    _check(noise, logits, "mean")
    if noise.kind != "mask":
        raise ValueError(f"integrand_by_count noise must be MaskNoise, got {noise!r}. Use integrand.")
    masked = noise.masked(z)
    logits = _without_mask(noise, logits if logits.dtype == torch.float64 else logits.float())
    cost = torch.where(masked, _cross_entropy(logits, x), 0.0)
    return cost * (x.shape[1] / masked.sum(-1, keepdim=True).clamp(min=1))


def reconstruction(
    noise: Noise, logits: Tensor, x: Tensor, z: Tensor, noise_level: Tensor, *, parametrisation: str = "mean"
) -> Tensor:
    """-log p(x | z), position by position: what the bound costs below this level if the text is then drawn at once.

    Arguments as for `integrand` → (B, C), nats. A token that mask noise left alone is known.

    Example: the integral of `integrand` from level 1e-3 to 1, plus this at 1e-3, bounds -log p(x) for any network.
    """
    _check(noise, logits, parametrisation)
    logits = _without_mask(noise, logits if logits.dtype == torch.float64 else logits.float())
    if noise.kind == "mask":
        return torch.where(noise.masked(z), _cross_entropy(logits, x), 0.0)
    if parametrisation == "loo":
        logits = noise.to_mean(logits, z, _per_position(noise_level).expand(x.shape))
    return _cross_entropy(logits, x)


def mask_exactly(noise: Noise, tokens: Tensor, num_masked: Tensor, u: Tensor) -> Tensor:
    """Mask `num_masked` (B,) positions of tokens (B, C), those of the smallest u (B, C) → (B, C).

    Example: `nelbo.mask_exactly(noise, tokens, torch.tensor([3]), torch.rand(1, 8))` masks three of eight.
    """
    if noise.mask_token is None:
        raise ValueError(f"mask_exactly noise must have a mask token, got {noise!r}. Use MaskNoise.")
    rank = u.argsort(-1).argsort(-1)
    return torch.where(rank < num_masked[:, None], noise.mask_token, tokens)


def _jump_divergence(noise: Noise, logits: Tensor, x: Tensor, z: Tensor, level: Tensor) -> Tensor:
    """The bracket of the module's formula, for leave-one-out logits. (B, C)

    In units of `floor`, what noise alone gives a token, q is 1 + odds at x and 1 elsewhere, and q_θ is 1 + odds·p. So
    the large terms cancel on paper, and the vocabulary enters by one sum of log1p.
    """
    floor, odds = _floor_and_odds(noise, level)
    # logsumexp adds pairwise; a softmax over 262,144 float32 entries can be off by 1e-4.
    probs = (logits - logits.logsumexp(-1, keepdim=True)).exp()
    p_x, p_z = (probs.gather(-1, token[..., None])[..., 0].double() for token in (x, z))
    everywhere = torch.log1p(odds.to(logits.dtype)[..., None] * probs).sum(-1).double()
    divergence = floor * ((1 + odds) * torch.log1p(odds) - odds * torch.log1p(odds * p_x) - everywhere)  # KL(q ‖ q_θ)

    kept = (z == x).double()
    excess = odds * (kept - p_z) / (1 + odds * p_z)  # q(z)/q_θ(z) - 1
    log_ratio = torch.log1p(odds * kept) - torch.log1p(odds * p_z)
    series = excess**2 * (1 / 2 - excess * (1 / 3 - excess / 4))  # excess - log(1 + excess), where the two cancel
    ratio_part = torch.where(excess.abs() < 1e-3, series, excess - log_ratio)
    ratio_part = torch.where(noise.masked(z), 0.0, ratio_part)  # a mask is equally likely under both
    return divergence + ratio_part


def _floor_and_odds(noise: Noise, level: Tensor) -> tuple[Tensor, Tensor]:
    """What noise alone gives a token, and what the clean text adds to it there, in that unit."""
    if isinstance(noise, HybridNoise):
        rate, num_tokens = noise.uniform_rate(level), noise.vocab_size - 1
        return rate / (1 + rate) / num_tokens, num_tokens * (1 - level) / rate
    return level / noise.vocab_size, noise.vocab_size * (1 - level) / level


def _hazard(noise: Noise, z: Tensor, level: Tensor) -> Tensor:
    """How fast noise makes z, over the probability that it has: d log(noise(z) / clean) / d level. (B, C)

    It is r(z)/q(z) wherever z is noise.
    """
    pure = 1 / (level * (1 - level))
    if not isinstance(noise, HybridNoise):
        return pure
    return pure * torch.where(noise.masked(z), 1.0, level + noise.gamma / 2 * (1 - 2 * level))


def _per_position(noise_level: Tensor) -> Tensor:
    level = noise_level[:, None] if noise_level.dim() == 1 else noise_level
    return level.double().clamp(*_ENDS)  # (B, C) or (B, 1); one number a position, so float64 is free


def _cross_entropy(logits: Tensor, x: Tensor) -> Tensor:
    return logits.logsumexp(-1) - logits.gather(-1, x[..., None])[..., 0]


def _without_mask(noise: Noise, logits: Tensor) -> Tensor:
    if noise.mask_token is None:
        return logits
    return logits.masked_fill(torch.arange(noise.vocab_size, device=logits.device) == noise.mask_token, -torch.inf)


def check_process(noise: Noise) -> None:
    """Refuse a process of somebody's own: its bound is another formula, and what these give may lie below -log p(x).

    Example: `check_process(MaskNoise(512))` returns; a subclass of it is refused.
    """
    if type(noise) not in (MaskNoise, UniformNoise, HybridNoise):
        raise ValueError(
            "nelbo noise must be MaskNoise, UniformNoise or HybridNoise itself, whose bounds are known, got "
            f"{noise!r}. Train with decoder_loss 'cross_entropy'; the causal likelihood needs no bound."
        )


def _check(noise: Noise, logits: Tensor, parametrisation: str) -> None:
    check_process(noise)
    if parametrisation not in PARAMETRISATIONS:
        raise ValueError(f"nelbo parametrisation must be one of {PARAMETRISATIONS}, got {parametrisation!r}.")
    if logits.shape[-1] != noise.vocab_size:
        raise ValueError(
            f"nelbo logits must cover the noise's {noise.vocab_size} tokens, got {logits.shape[-1]}. "
            "Make the noise with the model's vocab_size."
        )
