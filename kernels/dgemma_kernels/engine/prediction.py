"""Predictions of the fused denoiser: `dgemma.Prediction` with statistics from one sweep over the vocabulary.

The kernel applies soft-cap, temperature, top-k, top-p, bias and allowed tokens. `logits`, `log_prob` and `top` use
`dgemma.Prediction`'s PyTorch code on the same logits, one slice of positions at a time.
"""

import math
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dgemma.constraints.joint import ClassBias, JointBias
from dgemma.diffusion.prediction import Allow, JointLaw, Prediction, SoftCap, Statistics, Temper, TopK, TopP, Transform
from dgemma_kernels.engine.graphs import Turn, in_turn, use_here
from dgemma_kernels.ops.automaton import kernel as automaton
from dgemma_kernels.ops.vocabulary import kernel as vocabulary


class Logits:
    """The head's output (B, C, V) before the soft-cap, in a tensor that a later step may overwrite."""

    def __init__(self, tensor: Tensor, turn: Turn | None = None, embed: "_Embed | None" = None) -> None:
        """embed: computes the soft embedding of a prediction over these logits, or returns None if it cannot."""
        self.embed = embed
        self.shape, self.device, self.empty = tensor.shape, tensor.device, tensor.new_empty(0)
        self.turn = Turn(tensor.device) if turn is None else turn
        self._tensor: Tensor | None = tensor
        self._thread, self._is_copy = threading.get_ident(), False

    def read(self) -> Tensor:
        """Return the tensor. The caller holds the turn while it reads."""
        if self._tensor is None:
            raise RuntimeError(
                "This Prediction's logits were overwritten by a later step: the fused engine keeps only those of the "
                "last step. Read .logits, .top, .sample or .log_prob before the next step."
            )
        if self._is_copy:
            use_here(self._tensor)
        return self._tensor

    def __getstate__(self) -> dict[str, Any]:
        """The content of a copy or a pickle: a separate tensor, if it was not overwritten."""
        with self.turn:
            tensor = None if self._tensor is None else self._tensor.clone()
        return {**vars(self), "turn": None, "embed": None, "_tensor": tensor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, turn=Turn(state["device"]))

    def give_up(self) -> None:
        """Allow overwriting the tensor. Logits of another thread are copied, because it may still read them."""
        if self._tensor is not None:
            self._is_copy = self._thread != threading.get_ident()
            self._tensor = self._tensor.clone() if self._is_copy else None


_Embed = Callable[["FusedPrediction"], Tensor | None]


class VocabularySweep(NamedTuple):
    """The arguments of a sweep over the vocabulary, and its results."""

    shaping: vocabulary.Shaping
    statistics: vocabulary.VocabularyStatistics


class SoftEmbedding(NamedTuple):
    """The soft embedding of a prediction, which is all that the next step reads of it."""

    signal: Tensor  # (B, C, D)


class FusedPrediction(Prediction):
    """A `Prediction` over the fused head's logits; `signal` (B, C, D) is its soft embedding, once that is computed."""

    def __init__(self, logits: Logits, transforms: tuple[Transform, ...], joint: JointLaw | None = None) -> None:
        # The logits are only in `_source`, so that a copy or a pickle has them once.
        super().__init__(logits.empty, transforms, joint)
        self._source = logits
        self.signal: Tensor | None = None
        self.soften: Callable[[], None] | None = None  # computes `signal`, if this is the latest step of the denoiser

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy or a pickle, for which no denoiser computes a soft embedding."""
        return {**vars(self), "soften": None}

    @property
    def _raw(self) -> Tensor:
        return self._source.read()

    @property
    def shape(self) -> torch.Size:
        return self._source.shape

    @property
    def device(self) -> torch.device:
        return self._source.device

    @property
    def turn(self) -> Turn:
        return self._source.turn

    def shaped(
        self,
        *,
        temperature: Tensor | float | None = None,
        allowed: Tensor | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        cut: float = math.inf,
    ) -> Prediction:
        shaped = super().shaped(temperature=temperature, allowed=allowed, top_k=top_k, top_p=top_p, cut=cut)
        return FusedPrediction(self._source, shaped.transforms) if self.joint is None else shaped

    def as_self_cond(self) -> SoftEmbedding | Tensor:
        """The soft embedding, or logits if it can no longer be computed. Those are about a hundred times as large."""
        if self.signal is None and self.soften is not None:
            with self.turn:
                self.soften()
        if self.signal is None and self._source.embed is not None:
            self.signal = self._source.embed(self)
        return self.logits if self.signal is None else SoftEmbedding(self.signal)

    def with_bias(self, bias: Transform) -> "FusedPrediction":
        assert self.joint is None
        return FusedPrediction(self._source, (*self.transforms, bias))

    def with_joint(self, joint: JointLaw, bias: Transform) -> "FusedPrediction":
        return FusedPrediction(self._source, (*self.transforms, bias), joint)

    automaton_ops: ClassVar[Any] = automaton

    def shaped_rows(self) -> tuple[Tensor, vocabulary.LogitShaping] | None:
        """The arguments with which a kernel calls `vocabulary.processed`: logits (B·C, V), and shaping.

        None if the kernels do not apply.
        """
        if self._shaping is None:
            return None
        return self._rows, vocabulary.shape_logits(self._rows, self._shaping)

    def with_statistics(self, statistics: tuple[Tensor, ...]) -> "FusedPrediction":
        """Return the same prediction with these statistics, entropy first."""
        known = FusedPrediction(self._source, self.transforms, self.joint)
        known.statistics = Statistics(*statistics)
        return known

    def only_swept(self, logits: Logits) -> "FusedPrediction":
        """Return the same prediction over `logits`, with the results of the sweep only."""
        swept = FusedPrediction(logits, self.transforms)
        if self.sweep is not None:
            swept._shaping, swept.sweep = self._shaping, self.sweep
        return swept

    @in_turn
    def soft_probabilities(self, *, float8: bool) -> vocabulary.SoftProbabilities | None:
        """Return the self-conditioning distribution (B·C, V), its weights in the logits' dtype or in float8.

        None if the kernels do not apply.
        """
        if self.sweep is None:
            return None
        shaping, statistics = self.sweep
        return vocabulary.soft_probabilities(self._rows, statistics, shaping, float8=float8)

    @in_turn
    def sample(self, u: Tensor) -> Tensor:
        if self.joint is not None or self.sweep is None:
            return super().sample(u)
        shaping, statistics = self.sweep
        tokens = vocabulary.sample(self._rows, statistics, u.double().flatten().contiguous(), shaping)
        return tokens.view(self.batch_size, self.canvas_len)

    @property
    def _rows(self) -> Tensor:
        return self._raw.view(-1, self.vocab_size)

    @cached_property
    def statistics(self) -> Statistics:
        if self.sweep is None:
            with self.turn:
                return Prediction(self._raw, self.transforms, self.joint).statistics
        swept, shape = self.sweep.statistics, (self.batch_size, self.canvas_len)
        parts = (swept.entropy, swept.argmax, swept.confidence, swept.margin, swept.log_normalizer)
        statistics = Statistics(*(part.view(shape) for part in parts))
        if self.joint is None:
            return statistics
        best = self.joint.best
        return statistics._replace(argmax=best, confidence=(self._logit(best) - statistics.log_normalizer).exp())

    def _logit(self, tokens: Tensor) -> Tensor:
        """The processed logits of tokens (B, C), which must be allowed: (B, C)."""
        assert self._shaping is not None
        temperature, cap, _, bias, _ = self._shaping
        assert cap is not None
        with self.turn:
            x = self._rows.gather(1, tokens.reshape(-1, 1))[:, 0].float()
        x = (x / cap).tanh() * cap / temperature.repeat_interleave(len(x) // len(temperature))
        if bias is not None:
            x = x + bias.values.gather(1, bias.token_class[tokens].reshape(-1, 1).long())[:, 0]
        return x.view(tokens.shape)

    @cached_property
    def sweep(self) -> VocabularySweep | None:
        """One sweep over the vocabulary, None if the kernels do not apply."""
        if self._shaping is None:
            return None
        with self.turn:
            statistics = vocabulary.vocabulary_statistics(self._rows, self._shaping)
        return VocabularySweep(self._shaping, statistics)

    @in_turn
    def _logits_at(self, positions: slice) -> Tensor:
        return super()._logits_at(positions)

    @cached_property
    def _shaping(self) -> vocabulary.Shaping | None:
        """The arguments of the kernels, None if a transform is none of cap, mask, temperature, top-k, top-p, bias."""
        rest: list[Any] = list(self.transforms)
        cap = rest.pop(0)
        allow = rest.pop(0) if rest and isinstance(rest[0], Allow) else None
        temper = rest.pop(0).temperature if rest and isinstance(rest[0], Temper) else 1.0
        top_k = rest.pop(0).k if rest and isinstance(rest[0], TopK) and rest[0].cut == math.inf else None
        top_p = rest.pop(0).p if rest and isinstance(rest[0], TopP) and rest[0].cut == math.inf else None
        bias = rest.pop(0) if rest and isinstance(rest[0], ClassBias | JointBias) else None
        if rest or not isinstance(cap, SoftCap):
            return None
        if isinstance(temper, Tensor):
            temperature = temper.float().reshape(-1).contiguous()
        else:
            temperature = torch.full((1,), float(temper), device=self.device)
        if bias is not None:
            values = (bias.bias if isinstance(bias, ClassBias) else bias.joint.bias).flatten(0, 1).float()
            values = pad(values, (0, -values.shape[1] % 16))  # Triton specialises on multiples of 16
            token_class = bias.token_class if isinstance(bias, ClassBias) else bias.joint.language.automaton.token_class
            bias = vocabulary.Bias(values, token_class)
        floor = None if top_k is None else self._find_floor(top_k, allow)
        allowed = None if allow is None else self._pack(allow.allowed)
        if top_p is not None:
            with self.turn:
                unbiased = vocabulary.Shaping(temperature, cap.cap, allowed, floor=floor)
                floor = vocabulary.nucleus_floor(self._rows, unbiased, top_p)
        return vocabulary.Shaping(temperature, cap.cap, allowed, bias, floor)

    @in_turn
    def _find_floor(self, top_k: int, allow: Allow | None) -> Tensor:
        """The k-th largest logit of each position among the allowed ones, (B·C,).

        Cap and temperature keep the order of logits, so those of the head tell which are the largest.
        """
        if allow is None:
            return vocabulary.kth_largest(self._rows, top_k)
        masked = (allow(self._raw[:, part], part).flatten(0, 1) for part in self._slices())  # copies one at a time
        floors = [vocabulary.kth_largest(rows, top_k).view(self.batch_size, -1) for rows in masked]
        return torch.cat(floors, dim=1).flatten()

    def _pack(self, allowed: Tensor) -> Tensor:
        allowed = allowed.reshape(*[1] * (3 - allowed.dim()), *allowed.shape).expand(-1, -1, self.vocab_size)
        if allowed.shape[1] > 1 or allowed.shape[0] not in (1, self.batch_size):
            allowed = allowed.expand(self.batch_size, self.canvas_len, -1)
        return vocabulary.pack_allowed(allowed.reshape(-1, self.vocab_size))
