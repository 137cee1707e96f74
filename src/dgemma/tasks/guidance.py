"""Classifier-free guidance as a `Denoiser` that mixes two predictions (LLaDA, arXiv:2502.09992)."""

import math
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from dgemma.checks import check_types, require_field, short_repr
from dgemma.diffusion.prediction import Prediction
from dgemma.model.cache import Cache
from dgemma.model.config import DenoiserConfig, GenerationDefaults
from dgemma.model.denoiser import Denoiser, check_denoiser
from dgemma.model.vision.images import Images


def mix(conditional: Tensor, unconditional: Tensor, strength: float) -> Tensor:
    """Mix log-probabilities or logits of any shape: u + (w + 1)(c - u), the distribution ∝ p_c^(w+1) · p_u^(-w).

    w = 0 returns c exactly, and w = -1 returns u. Tokens that either side forbids (-inf) stay forbidden.

    Example: `mix(conditional.logits, unconditional.logits, 1.5)`.
    """
    forbidden = (conditional == -torch.inf) | (unconditional == -torch.inf)
    return (conditional + strength * (conditional - unconditional)).masked_fill(forbidden, -torch.inf)


@dataclass(frozen=True, eq=False)
class GuidedCache:
    """A pair of prefix caches, with and without the prompt. Every operation applies to both."""

    conditional: Cache
    unconditional: Cache

    @property
    def batch_size(self) -> int:
        return self.conditional.batch_size

    @property
    def lengths(self) -> Tensor:
        """The number of tokens per row, including the prompt, (B,)."""
        return self.conditional.lengths

    @property
    def num_slots(self) -> int:
        """The length of the longest row in either prefix."""
        return max(self.conditional.num_slots, self.unconditional.num_slots)

    @property
    def num_seen(self) -> int:
        """The number of tokens read so far, including padding."""
        return self.conditional.num_seen

    def clone(self) -> Self:
        """An independent copy: extending one leaves the other unchanged."""
        return type(self)(self.conditional.clone(), self.unconditional.clone())

    def select(self, rows: Tensor) -> Self:
        """The cache of some rows: rows (R,) int64 → batch size R."""
        return type(self)(self.conditional.select(rows), self.unconditional.select(rows))

    def splice(self, rows: Tensor, donor: "GuidedCache") -> None:
        """Replace `rows` (R,) in place by the rows of a donor of batch size R."""
        self.conditional.splice(rows, donor.conditional)
        self.unconditional.splice(rows, donor.unconditional)


@dataclass(frozen=True, eq=False)
class Guided(Denoiser[GuidedCache]):
    """A denoiser that mixes its predictions with and without the prompt.

    strength is LLaDA's w: 0 is no guidance, -1 the model without its prompt. `unconditional` replaces the prompt in the
    second prefix: a token id for every position (LLaDA uses the mask token), or another prompt, (P,) or (B, P). Only
    the tokens of the first `encode` are replaced. Both prefixes get all later tokens, such as committed blocks. Both
    are self-conditioned on the guided prediction. A step takes two forwards.

    log p(x0 | z) = log p(x0) + log q(z | x0) + const, and both predictions share q. So for a single position, mixing
    predictions gives the exact prediction for the mixed prior p_c^(w+1) · p_u^(-w). This holds under mask and uniform
    noise, for networks that see a position's own token and for those that do not. For several positions it is a
    heuristic. The rule published for uniform noise (Schiff et al., arXiv:2412.10193) mixes the logarithms of the two
    reverse kernels, `mix(noise.posterior(...).log(), ...)`. A denoiser cannot do that, because it returns a prediction
    and not a kernel.

    Example: `generate(Guided(model, strength=1.0, unconditional=4), prompt, ...)`.
    """

    denoiser: Denoiser
    strength: float = field(kw_only=True)
    unconditional: int | Tensor = field(kw_only=True)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_denoiser("Guided", self.denoiser)
        for name in ("takes_noise_level", "takes_position_levels", "takes_images", "source", "image_tokens"):
            object.__setattr__(self, name, getattr(self.denoiser, name))
        check_types(self)
        require_field(-1 <= self.strength < math.inf, self, "strength", "be >= -1", "Use 0 for no guidance.")
        prompt = torch.as_tensor(self.unconditional)
        fits = prompt.dtype == torch.int64 and prompt.dim() <= 2 and (prompt.dim() > 0 or int(prompt) >= 0)
        require_field(fits, self, "unconditional", "be a token id, or a prompt (P,) or (B, P) int64")

    @property
    def num_forwards(self) -> int:  # type: ignore[override]
        return 2 * self.denoiser.num_forwards

    @property
    def config(self) -> DenoiserConfig:
        return self.denoiser.config

    @property
    def generation(self) -> GenerationDefaults:
        return self.denoiser.generation

    @property
    def device(self) -> torch.device:
        return self.denoiser.device

    def encode(
        self,
        tokens: Tensor,
        cache: GuidedCache | None = None,
        attention_mask: Tensor | None = None,
        images: Images | None = None,
    ) -> GuidedCache:
        """Read tokens (B, P) into both prefixes. Without a cache, the second prefix gets `unconditional`, no images."""
        if cache is None:
            prompt, prompt_mask = self._stand_in(tokens, attention_mask)
            return GuidedCache(
                self.denoiser.encode_with(images, tokens, attention_mask=attention_mask),
                self.denoiser.encode(prompt, attention_mask=prompt_mask),
            )
        # The prefixes may differ in length, so each gets only the mask of the new tokens.
        new = None if attention_mask is None else attention_mask[:, attention_mask.shape[1] - tokens.shape[1] :]
        return GuidedCache(
            self.denoiser.encode_with(images, tokens, cache.conditional, new),
            self.denoiser.encode_with(images, tokens, cache.unconditional, new),
        )

    def denoise(
        self,
        canvas: Tensor,
        cache: GuidedCache,
        self_cond: Prediction | Tensor | None = None,
        self_cond_mask: Tensor | None = None,
        **level: Tensor,
    ) -> Prediction:
        """The guided prediction for canvas (B, C); `level` is its `noise_level`, if the denoiser takes one."""
        conditional, unconditional = (
            self.denoiser.denoise(canvas, prefix, self_cond=self_cond, self_cond_mask=self_cond_mask, **level).logits
            for prefix in (cache.conditional, cache.unconditional)
        )
        return Prediction(mix(conditional, unconditional, self.strength))

    def _stand_in(self, tokens: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The tokens that replace the prompt in the unconditional prefix, and which of them are real."""
        prompt = torch.as_tensor(self.unconditional).to(tokens)
        if not prompt.dim():
            return prompt.expand_as(tokens), attention_mask
        return torch.atleast_2d(prompt).expand(tokens.shape[0], -1), None
