"""Predictions of the canvases of a batch, for `evaluate`: in one pass, or canvas by canvas for any other denoiser."""

from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.checks import Words, require
from dgemma.diffusion.noise import Noise
from dgemma.model.cache import Cache
from dgemma.model.denoiser import Denoiser
from dgemma.model.diffusion import DiffusionGemma
from dgemma.train import head
from dgemma.train.canvases import Canvases
from dgemma.train.one_pass import masks_of, predict_canvases, read_clean

OfLogits = Callable[..., Tensor]  # (logits (m, V), *values (m, 1)) → (m,)


class OnePass:
    """Predictions of a `DiffusionGemma`: the text is read once, then all canvases of a row are predicted together."""

    def __init__(self, model: DiffusionGemma, canvases: Canvases, proposer: Noise | None) -> None:
        self.model, self.canvases, self.proposer = model, canvases, proposer
        documents = None if canvases.documents is None else canvases.documents[0]
        self.clean = read_clean(model, canvases.tokens, documents=documents, images=canvases.images)
        self.masks = masks_of(model, canvases)

    def map_logits(self, function: OfLogits, z: Tensor, level: Tensor) -> Tensor:
        """Apply `function` to the logits, x, z and level of noisy canvases; z, level and the result are (B, K, C).

        The result is 0 where nothing is scored, and no logits are computed there.
        """
        hidden = self._predict(z, level, None)
        if self.proposer is not None:
            allowed = self.proposer.proposable(None, z.device)
            hidden = self._predict(z, level, head.soft_embedding(self.model, hidden, allowed=allowed))
        scored = self.canvases.scored
        cost = head.map_logits(
            function,
            hidden[scored],
            self.model.embed_tokens.weight,
            *(values[scored][:, None] for values in (self.canvases.x, z, level)),
            cap=self.model.config.final_logit_softcapping,
        )
        return cost.new_zeros(z.shape).masked_scatter(scored, cost)

    def causal_cost(self) -> Tensor | None:
        """Return the autoregressive cost of every token after the first, (B, T - 1)."""
        return head.next_token_losses(self.model, self.clean.hidden, self.canvases.tokens)

    def _predict(self, z: Tensor, level: Tensor, signal: Tensor | None) -> Tensor:
        """Return the last hidden states (B, K, C, D)."""
        return predict_canvases(
            self.model,
            z,
            self.canvases.starts,
            self.clean.first(self.canvases.prefix_len),
            self.masks,
            signal=signal,
            noise_level=level if self.model.takes_noise_level else None,
        )


class ByCanvas:
    """Predictions of any `Denoiser`, one canvas at a time, through `encode` and `denoise`."""

    def __init__(self, model: Denoiser, canvases: Canvases, proposer: Noise | None) -> None:
        rule, fix = f"have one text per row for a {type(model).__name__}", "Read the texts with scan."
        require(canvases.documents is None, "evaluate source", rule, Words("rows that pack several"), fix)
        self.model, self.canvases, self.proposer = model, canvases, proposer

    @cached_property
    def prefixes(self) -> list[Cache]:
        """The prefix of each canvas: the clean text before it."""
        position = torch.arange(self.canvases.prefix_len, device=self.canvases.tokens.device)
        tokens = self.canvases.tokens[:, : self.canvases.prefix_len]
        starts = self.canvases.starts.unbind(1)
        images = self.canvases.images
        return [self.model.encode_with(images, tokens, None, position < start[:, None]) for start in starts]

    def map_logits(self, function: OfLogits, z: Tensor, level: Tensor) -> Tensor:
        """Apply `function` as `OnePass.map_logits` does."""
        costs = []
        for number, prefix in enumerate(self.prefixes):
            canvas, levels, scored = z[:, number], level[:, number], self.canvases.scored[:, number]
            noise_level = levels
            if not self.model.takes_position_levels:  # the level of the scored tokens, for the whole canvas
                noise_level = torch.where(scored, levels, 0.0).amax(-1)
                levels = noise_level[:, None].expand_as(levels)
            prediction = self.model.denoise_at(noise_level, canvas, prefix)
            if self.proposer is not None:
                first = prediction.shaped(allowed=self.proposer.proposable(None, z.device))
                prediction = self.model.denoise_at(noise_level, canvas, prefix, first)
            values = (each[scored][:, None] for each in (self.canvases.x[:, number], canvas, levels))
            cost = function(prediction.logits[scored], *values)
            costs.append(cost.new_zeros(canvas.shape).masked_scatter(scored, cost))
        return torch.stack(costs, dim=1)

    def causal_cost(self) -> Tensor | None:
        """Return the autoregressive cost of every token after the first, (B, T - 1).

        None for a model without a causal mode, and for texts with images.
        """
        if not self.model.has_causal_mode or self.canvases.images is not None:
            return None
        rows = self.canvases.tokens.split(1)  # the logits of a row are large
        costs = (F.cross_entropy(self.model.causal_logits(row)[0, :-1], row[0, 1:], reduction="none") for row in rows)
        return torch.stack(list(costs))


def read_canvases(model: Denoiser, canvases: Canvases, *, proposer: Noise | None = None) -> OnePass | ByCanvas:
    """Read the text of the canvases, in the fastest way that the model allows.

    proposer: a noise requests self-conditioning, by a first pass that proposes the tokens which are not masks.
    """
    if isinstance(model, DiffusionGemma):
        return OnePass(model, canvases, proposer)
    return ByCanvas(model, canvases, proposer)
