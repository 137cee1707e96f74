"""Classifier-free guidance as a wrapper at the Denoiser seam: two predictions in, one out (LLaDA, arXiv:2502.09992)."""

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from dgemma.prediction import Prediction


def mix(conditional: Tensor, unconditional: Tensor, strength: float) -> Tensor:
    """u + (w + 1)(c - u) of two sets of log-probabilities or logits, any shape: the law ∝ p_c^(w+1) · p_u^(-w).

    w = 0 gives c back exactly and w = -1 gives u. What either side forbids (-inf) stays forbidden.

    Example: `mix(conditional.logits, unconditional.logits, 1.5)`.
    """
    forbidden = (conditional == -torch.inf) | (unconditional == -torch.inf)
    return (conditional + strength * (conditional - unconditional)).masked_fill(forbidden, -torch.inf)


@dataclass(eq=False)
class GuidedCache:
    """The prefix as it is and the prefix without its prompt; what is done to one is done to both.

    Anything else asked of it (`lengths`, `batch_size`, ...) is answered by the prefix as it is.
    """

    conditional: Any
    unconditional: Any
    unconditional_mask: Tensor | None = None  # (B, tokens seen): 1 for a real token; None if all are

    def clone(self) -> Self:
        """An independent copy: extending one leaves the other as it is."""
        return type(self)(self.conditional.clone(), self.unconditional.clone(), self.unconditional_mask)

    def select(self, rows: Tensor) -> Self:
        """The cache of some rows: rows (R,) int64 → batch size R."""
        mask = self.unconditional_mask
        mask = mask if mask is None else mask.index_select(0, rows)
        return type(self)(self.conditional.select(rows), self.unconditional.select(rows), mask)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("conditional", "unconditional"):  # not yet set while being copied
            raise AttributeError(name)
        return getattr(self.conditional, name)


@dataclass(frozen=True, eq=False)
class Guided:
    """A denoiser steered away from what it would write without the prompt.

    strength is LLaDA's w: 0 is no guidance, -1 the model without its prompt. `unconditional` says what stands in the
    prompt's place: a token id repeated over it (LLaDA: the mask token), or another prompt, (P,) or (B, P). Only the
    first `encode` hides its tokens; what is encoded onto a cache afterwards, committed blocks above all, both see. The
    self-conditioning of both is the guided prediction. Two forwards a step.

    Which law this is: log p(x0 | z) = log p(x0) + log q(z | x0) + const, and both predictions share q. So for a single
    position, under mask and uniform noise alike, with mean or leave-one-out networks, mixing predictions is the exact
    network of the mixed prior p_c^(w+1) · p_u^(-w). For more positions it is, as everywhere, a heuristic. The rule
    published for uniform noise (Schiff et al., arXiv:2412.10193) is another one: it mixes the logarithms of the two
    reverse kernels, `mix(noise.posterior(...).log(), ...)`, which no wrapper around the network can do.

    Example: `generate(Guided(model, strength=1.0, unconditional=4), prompt, ...)`.
    """

    denoiser: Any
    strength: float = field(kw_only=True)
    unconditional: int | Tensor = field(kw_only=True)

    def __post_init__(self) -> None:
        if not self.strength >= -1:
            raise ValueError(f"Guided.strength must be >= -1, got {self.strength}. Use 0 for no guidance.")
        if isinstance(self.unconditional, Tensor) and self.unconditional.dim() not in (1, 2):
            raise ValueError(
                f"Guided.unconditional must be a token id or a prompt (P,) or (B, P), got shape "
                f"{tuple(self.unconditional.shape)}. Pass token ids without further dimensions."
            )

    def encode(
        self, tokens: Tensor, cache: GuidedCache | None = None, attention_mask: Tensor | None = None
    ) -> GuidedCache:
        """Read tokens (B, P) into both prefixes; without a cache they are the prompt, which one does not see."""
        if cache is None:
            prompt, mask = self._unconditional_prompt(tokens, attention_mask)
            conditional = self.denoiser.encode(tokens, attention_mask=attention_mask)
            return GuidedCache(conditional, self.denoiser.encode(prompt, attention_mask=mask), mask)
        mask = self._extend_mask(cache, tokens, attention_mask)
        cache.conditional = self.denoiser.encode(tokens, cache.conditional, attention_mask)
        cache.unconditional = self.denoiser.encode(tokens, cache.unconditional, mask)
        cache.unconditional_mask = mask
        return cache

    def denoise(
        self,
        canvas: Tensor,
        cache: GuidedCache,
        self_cond: Prediction | Tensor | None = None,
        self_cond_mask: Tensor | None = None,
    ) -> Prediction:
        """The guided prediction for canvas (B, C)."""
        conditional, unconditional = (
            self.denoiser.denoise(canvas, prefix, self_cond=self_cond, self_cond_mask=self_cond_mask).logits
            for prefix in (cache.conditional, cache.unconditional)
        )
        return Prediction(mix(conditional, unconditional, self.strength))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "denoiser":  # not yet set while being copied
            raise AttributeError(name)
        return getattr(self.denoiser, name)

    def _unconditional_prompt(self, tokens: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.unconditional, int):
            return torch.full_like(tokens, self.unconditional), attention_mask
        prompt = self.unconditional.to(tokens).reshape(-1, self.unconditional.shape[-1])
        return prompt.expand(tokens.shape[0], -1), None

    def _extend_mask(self, cache: GuidedCache, tokens: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        """The mask behind the unconditional prefix and over the new tokens; None while all are real."""
        behind = cache.unconditional_mask
        if behind is None and attention_mask is None:
            return None
        if behind is None:
            behind = tokens.new_ones(tokens.shape[0], cache.unconditional.num_seen)
        new = torch.ones_like(tokens) if attention_mask is None else attention_mask[:, -tokens.shape[1] :]
        return torch.cat([behind.to(new), new], dim=1)
