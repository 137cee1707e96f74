"""Noise processes: how text is corrupted, and the exact kernels that reverse it.

Every process here is one mixture: at a noise level the token x becomes z with

    q(z | x) = A·1(z = x) + (1 - A)·[S·1(z = mask) + (1 - S)·uniform(z)]

so two curves define a process: the clean share A and the mask share S of its noise. Masking (MDLM, arXiv:2406.07524): S
is 1. Uniform (UDLM, arXiv:2412.10193; DiffusionGemma): S is 0. Hybrid (GIDD, arXiv:2503.04482): S moves with the level.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dgemma.checks import check_types, require, require_field, typed
from dgemma.diffusion import draws
from dgemma.diffusion.schedule import Linear, Schedule


@dataclass(frozen=True)
class Noise:
    """A process over `vocab_size` tokens; `schedule` gives α(t), and noise_level is 1 - α.

    `marginal` and `posterior` take α, because Bayes' rule is written in it. All other methods take noise_level. Shape
    (B,) applies to whole rows of (B, C) tokens; other shapes must broadcast to (B, C).
    `allowed`, booleans that broadcast to (B, C, V), restricts the process to a set of tokens per position: in every
    method, uniform noise is then uniform over that set. None allows all tokens.

    Example: `UniformNoise(262144, schedule=PlainCosine())`.
    """

    kind: ClassVar[str]

    vocab_size: int
    schedule: Schedule = field(default=Linear(), kw_only=True)

    def __post_init__(self) -> None:
        check_types(self)
        require_field(2 <= self.vocab_size < 2**31, self, "vocab_size", "be >= 2", "Pass the model's.")

    def clean_share(self, noise_level: Tensor) -> Tensor:
        """A: the probability that a token is not replaced by noise."""
        return 1 - noise_level

    def mask_share(self, noise_level: Tensor) -> Tensor:
        """S: the part of the noise that is the mask token; the rest is uniform over the other tokens."""
        raise NotImplementedError

    @property
    def mask_token(self) -> int | None:
        """The id of the mask token, None if the process has none."""
        return None

    def masked(self, canvas: Tensor) -> Tensor:
        """Positions of the canvas with the mask token, (B, C) bool."""
        return torch.zeros_like(canvas, dtype=torch.bool) if self.mask_token is None else canvas == self.mask_token

    def proposable(self, allowed: Tensor | None, device: torch.device) -> Tensor | None:
        """Tokens that a sampler may write, (B or 1, C or 1, V) bool: the allowed ones without the mask; None is all."""
        if allowed is not None:
            allowed = allowed.reshape(*[1] * (3 - allowed.dim()), *allowed.shape)
        if self.mask_token is None:
            return allowed
        real = torch.arange(self.vocab_size, device=device) != self.mask_token
        return real[None, None] if allowed is None else allowed & real

    @typed
    def prior(self, u: Tensor, *, allowed: Tensor | None = None) -> Tensor:
        """Draw a canvas of pure noise: u (B, C) in [0, 1) → tokens (B, C). Uniform noise stays in the `allowed` set.

        Example: `UniformNoise(256).prior(torch.rand(2, 8, dtype=torch.float64))`.
        """
        return self.refill(u, torch.ones_like(u), allowed=allowed)

    @typed
    def refill(self, u: Tensor, noise_level: Tensor, *, allowed: Tensor | None = None) -> Tensor:
        """Draw noise of a level for positions that return to noise: u (B, C) in [0, 1) → tokens (B, C).

        Example: `noise.refill(state.uniform("noise"), state.next_noise_level, allowed=state.allowed)`.
        """
        _check_draws(u, allowed)
        return self._draw(u, noise_level, allowed)

    @typed
    def corrupt(
        self, tokens: Tensor, noise_level: Tensor, u_event: Tensor, u_token: Tensor, *, allowed: Tensor | None = None
    ) -> Tensor:
        """Draw from q(z | x): tokens, u_event, u_token (B, C) → z (B, C). Uniform noise may draw the token itself.

        Example: `noise.corrupt(tokens, torch.tensor([0.5]), torch.rand(1, 8), torch.rand(1, 8))`.
        """
        for u in (u_event, u_token):
            _check_draws(u, allowed)
            require(tokens.shape == u.shape, "Noise tokens", f"have the draws' shape {tuple(u.shape)}", tokens)
        level = _per_position(noise_level, tokens)
        return torch.where(u_event < self.clean_share(level), tokens, self._draw(u_token, level, allowed))

    @typed
    def marginal(self, x_probs: Tensor, alpha: Tensor, *, allowed: Tensor | None = None) -> Tensor:
        """q(z | x) for a distribution over x: x_probs (..., V), alpha (B,) or broadcastable to (...) → (..., V).

        Example: `MaskNoise(5).marginal(torch.eye(5)[0], torch.tensor(0.7))` is 0.7 for token 0 and 0.3 for the mask.
        """
        level, ids = _per_position(1 - alpha, x_probs[..., 0])[..., None], self._ids(x_probs)
        weight = self._weight(ids, level, allowed if allowed is None else allowed[..., None, :])
        if allowed is not None:
            weight = torch.where(allowed | self.masked(ids), weight, 0.0)
        return self.clean_share(level) * x_probs + weight

    @typed
    def posterior(
        self, z_t: Tensor, x_probs: Tensor, alpha_t: Tensor, alpha_s: Tensor, *, allowed: Tensor | None = None
    ) -> Tensor:
        """q(z_s | z_t, x) by Bayes' rule for a distribution over x: z_t (...), x_probs (..., V) → (..., V); α_s >= α_t.

        Both α have shape (B,) or broadcast to (...). With a leave-one-out prediction as x this is the exact reverse
        kernel; with p(x0 | z), the usual prediction, it is not. A token that no noise can have produced is copied.

        Example: `noise.posterior(canvas, loo.logits.softmax(-1), alpha_t, alpha_s)`.
        """
        alpha_t, alpha_s = _per_position(alpha_t, z_t), _per_position(alpha_s, z_t)
        ratio, fresh = self._bridge(z_t, 1 - alpha_t, 1 - alpha_s, allowed)
        stays = self._ids(x_probs) == z_t[..., None]
        joint = (ratio[..., None] * stays + fresh[..., None]) * self.marginal(x_probs, alpha_s, allowed=allowed)
        possible = self._weight(z_t, 1 - alpha_t, allowed) > 0
        return torch.where(possible[..., None], joint / joint.sum(-1, keepdim=True), stays.to(joint.dtype))

    def routes(
        self,
        x0: Tensor,
        canvas: Tensor,
        noise_level: Tensor,
        next_noise_level: Tensor,
        *,
        allowed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The probabilities, given x0, that z_s is x0 and that z_t stays; the rest is new noise.

        x0, canvas: (B, C) → two (B, C). A token that is not `allowed` counts as noise, so the last step replaces it.
        Any other token that no noise can have produced stays with probability 1.

        Example: `clean, stay = noise.routes(x0, canvas, noise_level, next_noise_level)`.
        """
        level, next_level = _per_position(noise_level, canvas), _per_position(next_noise_level, canvas)
        ratio, fresh = self._bridge(canvas, level, next_level, allowed)
        clean = self.clean_share(next_level) * (fresh + ratio * (x0 == canvas))
        stay = ratio * self._weight(canvas, next_level, allowed)
        total = clean + stay + fresh * (1 - self.clean_share(next_level))
        possible = self._weight(canvas, level, allowed) > 0
        total = torch.where(possible, total, 1.0)
        return torch.where(possible, clean / total, 0.0), torch.where(possible, stay / total, 1.0)

    def to_loo(self, logits: Tensor, z: Tensor, noise_level: Tensor, *, allowed: Tensor | None = None) -> Tensor:
        """Convert p(x0 | z) to p(x0 | z without this position): logits (B, C, V), z (B, C) → (B, C, V).

        The conversion is exact if noise_level and allowed are those that the network was trained with (see
        `Objective.allowed`). For a token that no noise can have produced, p(x0 | z) does not determine the result, and
        the logits are returned unchanged.

        Example: `noise.to_loo(prediction.logits, state.canvas, state.noise_level)`.
        """
        bump = self._evidence(z, noise_level, allowed).to(logits.dtype)
        return logits.scatter_add(-1, z[..., None], -bump[..., None])

    def to_mean(self, logits: Tensor, z: Tensor, noise_level: Tensor, *, allowed: Tensor | None = None) -> Tensor:
        """Convert p(x0 | z without this position) to p(x0 | z): logits (B, C, V), z (B, C) → (B, C, V).

        This is the inverse of `to_loo`. Where z cannot be noise, the result is certain that x0 = z.

        Example: `noise.to_mean(prediction.logits, state.canvas, state.noise_level)`.
        """
        bump = self._evidence(z, noise_level, allowed).to(logits.dtype)
        certain = torch.full_like(logits, -torch.inf).scatter(-1, z[..., None], 0.0)
        impossible = self._weight(z, _per_position(noise_level, z), allowed) <= 0
        return torch.where(impossible[..., None], certain, logits.scatter_add(-1, z[..., None], bump[..., None]))

    def _evidence(self, z: Tensor, noise_level: Tensor, allowed: Tensor | None) -> Tensor:
        """log q(z | x = z) - log q(z | another x), (B, C); 0 for a mask and where z cannot be noise."""
        level = _per_position(noise_level, z)
        weight = self._weight(z, level, allowed)
        informative = (weight > 0) & ~self.masked(z)
        return torch.log1p(self.clean_share(level) / torch.where(informative, weight, torch.inf))

    def _bridge(self, z_t: Tensor, level: Tensor, next_level: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        """The two terms of q(z_t | z_s) = ratio·1(z_t = z_s) + fresh.

        ratio is the probability that a token survives from s to t. fresh is the probability that noise added in between
        is z_t.
        """
        before, after = self.clean_share(level), self.clean_share(next_level)
        ratio = torch.where(after > 0, before / torch.where(after > 0, after, 1.0), 1.0)
        fresh = self._weight(z_t, level, allowed) - ratio * self._weight(z_t, next_level, allowed)
        return ratio.expand_as(fresh), fresh.clamp(min=0.0)

    def _weight(self, z: Tensor, level: Tensor, allowed: Tensor | None) -> Tensor:
        """The probability that a position is noise at this level and its token is z. z is treated as allowed."""
        share = self.mask_share(level)
        of_token = (1 - share) / self._num_uniform(allowed)
        return (1 - self.clean_share(level)) * torch.where(self.masked(z), share, of_token)

    def _num_uniform(self, allowed: Tensor | None) -> Tensor | int:
        """The number of tokens that the uniform part of the noise draws from, at each position of `allowed`."""
        return self.vocab_size if allowed is None else allowed.sum(-1)

    def _draw(self, u: Tensor, level: Tensor, allowed: Tensor | None) -> Tensor:
        """Draw noise by inverse CDF: u (B, C) → (B, C)."""
        raise NotImplementedError

    def _ids(self, like: Tensor) -> Tensor:
        return torch.arange(self.vocab_size, device=like.device)


@dataclass(frozen=True)
class UniformNoise(Noise):
    """Noise that replaces a token by a uniform draw from the vocabulary or the `allowed` set, possibly the same token.

    Example: `UniformNoise(262144)`.
    """

    kind: ClassVar[str] = "uniform"

    def mask_share(self, noise_level: Tensor) -> Tensor:
        return torch.zeros_like(noise_level)

    def _draw(self, u: Tensor, level: Tensor, allowed: Tensor | None) -> Tensor:
        return _pick(u, allowed) if allowed is not None else draws.integers(u, self.vocab_size)


@dataclass(frozen=True)
class _MaskingNoise(Noise):
    mask_token_id: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        rule, fix = f"be an id below {self.vocab_size}", "Pass the id of a token that never occurs in text."
        require_field(0 <= self.mask_token_id < self.vocab_size, self, "mask_token_id", rule, fix)

    @property
    def mask_token(self) -> int:
        return self.mask_token_id

    def _num_uniform(self, allowed: Tensor | None) -> Tensor | int:
        if allowed is None:
            return self.vocab_size - 1
        # A caller may pass `allowed` with the mask token; a state's does not have it.
        return (allowed & (self._ids(allowed) != self.mask_token_id)).sum(-1)


@dataclass(frozen=True)
class MaskNoise(_MaskingNoise):
    """Noise that replaces a token by the mask token.

    Example: `MaskNoise(262144, mask_token_id=4)`.
    """

    kind: ClassVar[str] = "mask"

    def mask_share(self, noise_level: Tensor) -> Tensor:
        return torch.ones_like(noise_level)

    def _draw(self, u: Tensor, level: Tensor, allowed: Tensor | None) -> Tensor:
        return torch.full_like(u, self.mask_token_id, dtype=torch.int64)


@dataclass(frozen=True)
class HybridNoise(_MaskingNoise):
    """GIDD: a mixture of mask and uniform noise, ((1 - t)·x + t·mask + c·uniform) / (1 + c), with t the noise level.

    c = B·(t(1 - t))^(gamma/2), with B such that `uniform_share` of the tokens are random at t = 1/2. The uniform part
    never draws the mask token. At t = 0 the text is clean, and at t = 1 it is all masks. α is 1 - t. For
    0 < t < 1 the share of clean tokens is less than α, because random tokens replace part of the text.

    Example: `HybridNoise(262144, mask_token_id=4, uniform_share=0.1)`.
    """

    kind: ClassVar[str] = "hybrid"

    uniform_share: float = 0.2
    gamma: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        fix = "Use MaskNoise for 0, UniformNoise for 1."
        require_field(0 < self.uniform_share < 1, self, "uniform_share", "lie in (0, 1)", fix)
        # Above 2, random tokens would disappear faster than the text, which no corruption process does.
        require_field(0 < self.gamma <= 2, self, "gamma", "lie in (0, 2]", "Use 1, the published value.")

    def clean_share(self, noise_level: Tensor) -> Tensor:
        return (1 - noise_level) / (1 + self.uniform_rate(noise_level))

    def mask_share(self, noise_level: Tensor) -> Tensor:
        # At t = 0, where c is 0 as well, the share is the limit.
        t = noise_level.clamp(min=torch.finfo(noise_level.dtype).tiny)
        return t / (t + self.uniform_rate(t))

    def uniform_rate(self, t: Tensor) -> Tensor:
        """c: the weight of random tokens; clean text has the weight 1 - t, and the mask t."""
        scale = 2**self.gamma * self.uniform_share / (1 - self.uniform_share)
        return scale * (t * (1 - t)) ** (self.gamma / 2)

    def _draw(self, u: Tensor, level: Tensor, allowed: Tensor | None) -> Tensor:
        share = self.mask_share(_per_position(level, u)).expand_as(u)
        rest = ((u - share) / torch.where(share < 1, 1 - share, 1.0)).clamp(min=0.0)
        if allowed is not None:
            token = _pick(rest, allowed & (self._ids(u) != self.mask_token_id))
        else:
            token = draws.integers(rest, self.vocab_size - 1)
            token = token + (token >= self.mask_token_id)
        return torch.where(u < share, self.mask_token_id, token)


def _per_position(level: Tensor, tokens: Tensor) -> Tensor:
    """Turn a level per row into one per position: (B,) → (B, 1)."""
    return level[:, None] if level.dim() == 1 and tokens.dim() == 2 else level


def _pick(u: Tensor, allowed: Tensor) -> Tensor:
    """Draw uniformly from each position's allowed ids: u (B, C), allowed (..., V) → (B, C)."""
    ends = allowed.cumsum(-1, dtype=torch.int32)  # the number of allowed ids up to each
    # One set for all positions is searched without copies: (B, C, V) of a large vocabulary would be gigabytes.
    ends = ends.flatten() if allowed.numel() == allowed.shape[-1] else ends.expand(*u.shape, -1).contiguous()
    count = ends[..., -1]
    rank = torch.minimum((u * count).int(), count - 1)
    return torch.searchsorted(ends, rank if ends.dim() == 1 else rank[..., None], right=True).reshape(u.shape)


def _check_draws(u: Tensor, allowed: Tensor | None) -> None:
    """Refuse dtypes with which torch would draw other tokens in silence."""
    require(u.is_floating_point(), "Noise u", "be floats of shape (B, C)", u)
    if allowed is not None:
        require(allowed.dtype == torch.bool, "Noise allowed", "be booleans that broadcast to (B, C, V)", allowed)
