"""Predictions: a distribution over the vocabulary per canvas position, with every statistic that a sampler needs.

A `Prediction` is lazy. It holds the head's logits and the transforms that shape them. Entropy, argmax, confidence and
samples are computed on demand, one slice of positions at a time. For a large canvas and vocabulary, a second (B, C, V)
tensor exists only after `.logits` is read. `dgemma_kernels` has a class with the same interface, which reads its
statistics from kernels.
"""

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, NamedTuple, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from dgemma.checks import ValueRule, broadcasts, in_range, require, typed

_EVERY = "Use None to keep every token."
TopCount = Annotated[int, ValueRule("be >= 1", lambda top_k: top_k >= 1, _EVERY)]
# A top_p below about 1e-38 would be 0 in float32.
TopShare = Annotated[float, ValueRule("be in (0, 1] in float32", lambda top_p: 1e-30 <= top_p <= 1, _EVERY)]
_SAMPLE_CHUNK = 1024  # vocabulary entries per chunk of the two-level inverse CDF
_SLICE_ELEMENTS = 1 << 24  # float32 temporaries of a statistics pass stay under 64 MiB
_LEAST_LOG = -1e4  # the exponential is 0 in float64, too


class Top(NamedTuple):
    """The k most probable tokens, best first: both (B, C, k)."""

    probabilities: Tensor
    tokens: Tensor


class Statistics(NamedTuple):
    """The statistics of a prediction, (B, C) each."""

    entropy: Tensor
    argmax: Tensor
    confidence: Tensor
    margin: Tensor
    log_normalizer: Tensor


@runtime_checkable
class Transform(Protocol):
    """Reshapes a slice of positions: logits (B, c, V) and their positions on the canvas → (B, c, V)."""

    def __call__(self, logits: Tensor, positions: slice, /) -> Tensor: ...


@runtime_checkable
class JointLaw(Protocol):
    """A law over whole texts, whose marginals are a prediction; see `dgemma.constraints.joint.Joint`."""

    def sample(self, u: Tensor) -> Tensor: ...  # a text (B, C)
    def log_mean(self, weigh: Transform) -> Tensor: ...  # log E[product of the weights of a text's tokens], (B,)
    @property
    def best(self) -> Tensor: ...  # the most probable text (B, C)
    def project(self, draft: Tensor, decided: Tensor) -> Tensor: ...  # the text nearest to a draft (B, C)
    @property
    def prediction(self) -> "Prediction": ...  # before conditioning, with independent positions
    def condition_again(self, prediction: "Prediction") -> "Prediction": ...  # the same condition on another one


class Prediction:
    """A distribution over the vocabulary for each canvas position; statistics in float32 (float64 if the logits are).

    logits: (B, C, V), any floating dtype. `.shaped(...)` returns a new prediction, whose statistics describe the shaped
    distribution.

    Example: `Prediction(torch.randn(2, 8, 50)).shaped(temperature=0.8).entropy` has shape (2, 8).
    """

    automaton_ops: ClassVar[Any] = None  # an engine's kernels for the functions of `dgemma.constraints.paths`

    def __init__(self, logits: Tensor, transforms: tuple["Transform", ...] = (), joint: JointLaw | None = None) -> None:
        is_logits = isinstance(logits, Tensor) and logits.dim() == 3 and logits.is_floating_point()
        if type(self) is Prediction and not is_logits:  # a subclass may compute its logits later
            require(False, "Prediction logits", "be floats of shape (B, C, V)", logits)
        self._unshaped = logits  # read through `_raw`, which a subclass may override
        self.transforms = transforms
        self.joint = joint  # None: positions are independent
        # Plain attributes: torch.compile cannot trace the lock of a cached property.
        self._known_logits: Tensor | None = None
        self._known_statistics: Statistics | None = None

    @property
    def _raw(self) -> Tensor:
        """The head's logits, (B, C, V). A subclass may keep them elsewhere and read them here."""
        return self._unshaped

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(batch_size={self.batch_size}, canvas_len={self.canvas_len}, "
            f"vocab_size={self.vocab_size})"
        )

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits, (B, C, V)."""
        return self._raw.shape

    @property
    def batch_size(self) -> int:
        return self.shape[0]

    @property
    def canvas_len(self) -> int:
        return self.shape[1]

    @property
    def vocab_size(self) -> int:
        return self.shape[2]

    @property
    def device(self) -> torch.device:
        return self._raw.device

    @typed
    def shaped(
        self,
        *,
        temperature: Tensor | float | None = None,
        allowed: Tensor | None = None,
        top_k: TopCount | None = None,
        top_p: TopShare | None = None,
        cut: float = math.inf,
    ) -> "Prediction":
        """Reshape the distribution: keep `allowed` tokens, divide logits by `temperature`, cut to top-k, then top-p.

        temperature: a number, (B,) or (B, C). allowed: boolean, broadcastable to (B, C, V), with at least one True per
        position. `cut` is subtracted from the logits that top-k and top-p cut; after a finite `cut` they can
        still be drawn. Nothing is computed until a statistic is read. A joint law is conditioned again after shaping.

        Example: `prediction.shaped(temperature=0.7, top_p=0.95).sample(u)`.
        """
        if self.joint is not None:
            how: dict[str, Any] = {"temperature": temperature, "allowed": allowed, "top_k": top_k, "top_p": top_p}
            return self.joint.condition_again(self.joint.prediction.shaped(**how, cut=cut))
        transforms = self.transforms
        if allowed is not None:
            fits = allowed.dtype == torch.bool and broadcasts(allowed.shape, self.shape)
            require(fits, "Prediction.shaped allowed", f"be booleans that broadcast to {tuple(self.shape)}", allowed)
            transforms = (*transforms, Allow(allowed))
        if isinstance(temperature, Tensor):
            fits = tuple(temperature.shape) in ((), self.shape[:1], self.shape[:2])
            require(fits, "Prediction.shaped temperature", "have the shape (B,) or (B, C)", temperature)
        elif temperature is not None:
            fits, fix = math.isfinite(temperature) and temperature > 0, "Use .argmax for 0."
            require(fits, "Prediction.shaped temperature", "be finite and > 0", temperature, fix)
        if temperature is not None:
            transforms = (*transforms, Temper(temperature))
        if top_k is not None:
            transforms = (*transforms, TopK(top_k, cut))
        if top_p is not None:
            transforms = (*transforms, TopP(top_p, cut))
        return Prediction(self._raw, transforms)

    def with_bias(self, bias: Transform) -> "Prediction":
        """The prediction after one more transform of its shaped logits, for independent positions."""
        assert self.joint is None
        return Prediction(self._raw, (_LogitsOf(self), bias))

    def with_joint(self, joint: JointLaw, bias: Transform) -> "Prediction":
        """The prediction of a joint law, whose marginals are this prediction after `bias`."""
        return Prediction(self._raw, (_LogitsOf(self), bias), joint)

    def revised(self, revise: Callable[[Tensor], Tensor]) -> "Prediction":
        """The prediction after `revise` has changed its logits (B, C, V). A joint law is then conditioned again.

        Example: `prediction.revised(lambda logits: noise.to_mean(logits, state.canvas, state.noise_level))`.
        """
        if self.joint is None:
            return Prediction(revise(self.logits))
        return self.joint.condition_again(Prediction(revise(self.joint.prediction.logits)))

    @property
    def logits(self) -> Tensor:
        """The shaped logits, (B, C, V)."""
        pieces = list(self.pieces())
        logits = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        if self._may_keep():
            self._known_logits = logits
        return logits

    @property
    def unconditioned(self) -> "Prediction":
        """The prediction before conditioning on a language, which self-conditioning shows to the next forward.

        The model has seen its own predictions in training. Conditioned ones are sharp even where it is unsure, and it
        would trust them.
        """
        return self if self.joint is None else self.joint.prediction

    def as_self_cond(self) -> Any:
        """The logits, for self-conditioning. A subclass may return other tensors with the batch first."""
        return self.logits

    def pieces(self) -> Iterator[Tensor]:
        """Yield the shaped logits in slices of positions, (B, c, V) each. The whole tensor is not built."""
        return (self._logits_at(positions) for positions in self._slices())

    @property
    def entropy(self) -> Tensor:
        """Shannon entropy in nats, (B, C)."""
        return self.statistics.entropy

    @property
    def argmax(self) -> Tensor:
        """The most probable token, lowest id on ties, (B, C). For a joint law it is the most probable text."""
        return self.statistics.argmax

    @property
    def confidence(self) -> Tensor:
        """The probability of the argmax, (B, C)."""
        return self.statistics.confidence

    @property
    def margin(self) -> Tensor:
        """Probability of the best token minus that of the second best, (B, C)."""
        return self.statistics.margin

    @typed
    def log_prob(self, tokens: Tensor) -> Tensor:
        """Log-probability of `tokens`: (B, C) or (B, C, n) → the same shape."""
        fits = tokens.dim() in (2, 3) and tokens.shape[:2] == self.shape[:2] and in_range(tokens, self.vocab_size)
        require(fits, "Prediction.log_prob tokens", "be ids of shape (B, C) or (B, C, n)", tokens)
        index = tokens if tokens.dim() == 3 else tokens[..., None]
        log_prob = self._gather(index) - self.statistics.log_normalizer[..., None]
        return log_prob if tokens.dim() == 3 else log_prob[..., 0]

    @typed
    def top(self, k: int) -> Top:
        """The k most probable tokens and their probabilities, best first."""
        k = min(k, self.vocab_size)
        parts = [self._logits_at(positions).topk(k, dim=-1) for positions in self._slices()]
        logits, tokens = torch.cat([p.values for p in parts], dim=1), torch.cat([p.indices for p in parts], dim=1)
        return Top((logits - self.statistics.log_normalizer[..., None]).exp(), tokens)

    @typed
    def sample(self, u: Tensor) -> Tensor:
        """Inverse CDF in vocabulary order: one uniform per position, u (B, C) in [0, 1) → tokens (B, C).

        Token v is drawn if F(v - 1) <= u < F(v), where F is the cumulative probability. As in the GPU kernel there are
        two levels: chunk sums pick a chunk, and only that chunk is summed token by token. A joint law draws the
        positions together.
        """
        fits = u.is_floating_point() and u.shape == self.shape[:2]
        require(fits, "Prediction.sample u", f"be floats of shape {tuple(self.shape[:2])}", u)
        if self.joint is not None:
            return self.joint.sample(u)
        return torch.cat([_inverse_cdf(self._logits_at(part), u[:, part]) for part in self._slices()], dim=1)

    @property
    def statistics(self) -> Statistics:
        """Entropy, argmax, confidence, margin and log-normalizer, from one pass over the logits."""
        if self._known_statistics is not None:
            return self._known_statistics
        parts = [_describe(self._logits_at(positions)) for positions in self._slices()]
        statistics = Statistics(*(torch.cat(column, dim=1) for column in zip(*parts, strict=True)))
        if self.joint is not None:
            best = self.joint.best
            log_prob = self._gather(best[..., None])[..., 0] - statistics.log_normalizer
            statistics = statistics._replace(argmax=best, confidence=log_prob.exp())
        if self._may_keep():
            self._known_statistics = statistics
        return statistics

    def _gather(self, index: Tensor) -> Tensor:
        """The shaped logits of some tokens: (B, C, n) → (B, C, n)."""
        return torch.cat([self._logits_at(part).gather(-1, index[:, part]) for part in self._slices()], dim=1)

    def _may_keep(self) -> bool:
        """Return False if a cached result would lack the autograd graph that a later caller may need."""
        return torch.is_grad_enabled() or not self._unshaped.requires_grad

    def _logits_at(self, positions: slice) -> Tensor:
        """The shaped logits of one of the `_slices`; kept if one slice is the whole canvas."""
        if self._known_logits is not None:
            return self._known_logits[:, positions]
        logits = self._raw[:, positions]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        for transform in self.transforms:
            logits = transform(logits, positions)
        if logits.shape[1] == self.canvas_len and self._may_keep():
            self._known_logits = logits
        return logits

    def _slices(self) -> list[slice]:
        per_slice = max(1, _SLICE_ELEMENTS // (self.batch_size * self.vocab_size))
        return [slice(start, start + per_slice) for start in range(0, max(self.canvas_len, 1), per_slice)]


class SoftCap(NamedTuple):
    """cap · tanh(logits / cap): the published head's last operation, in float32."""

    cap: float

    def __call__(self, logits: Tensor, positions: slice) -> Tensor:
        return (logits / self.cap).tanh() * self.cap


class _LogitsOf(NamedTuple):
    """Replaces the logits by the shaped logits of another prediction, which may have cached them."""

    prediction: Prediction

    def __call__(self, logits: Tensor, positions: slice) -> Tensor:
        return self.prediction._logits_at(positions)


class Allow(NamedTuple):
    """Forbids all tokens that are not allowed."""

    allowed: Tensor

    def __call__(self, logits: Tensor, positions: slice) -> Tensor:
        allowed = self.allowed.reshape(*[1] * (3 - self.allowed.dim()), *self.allowed.shape)
        allowed = allowed[:, positions] if allowed.shape[1] > 1 else allowed
        return logits.masked_fill(~allowed, -torch.inf)


class Temper(NamedTuple):
    """Divides the logits by the temperature."""

    temperature: Tensor | float

    def __call__(self, logits: Tensor, positions: slice) -> Tensor:
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            if temperature.dim() == 2:
                temperature = temperature[:, positions]
            temperature = temperature.to(logits.dtype).reshape(*temperature.shape, *[1] * (3 - temperature.dim()))
        return logits / temperature


class TopK(NamedTuple):
    """Lowers all logits but the k largest by `cut`."""

    k: int
    cut: float

    def __call__(self, logits: Tensor, positions: slice) -> Tensor:
        threshold = logits.topk(min(self.k, logits.shape[-1]), dim=-1).values[..., -1:]
        return torch.where(logits < threshold, logits - self.cut, logits)


class TopP(NamedTuple):
    """Lowers all logits but those of the fewest tokens that together have the probability `p`, and equal ones."""

    p: float
    cut: float

    def __call__(self, logits: Tensor, positions: slice) -> Tensor:
        ordered = logits.sort(dim=-1, descending=True).values
        probabilities = ordered.softmax(-1)
        # Exclusive sum: the token that crosses p stays, so the best one always does.
        num_kept = (probabilities.cumsum(-1) - probabilities < self.p).sum(-1, keepdim=True)
        threshold = ordered.gather(-1, (num_kept - 1).clamp(min=0))  # none of NaN logits is kept
        return torch.where(logits < threshold, logits - self.cut, logits)


def _describe(logits: Tensor) -> Statistics:
    """The statistics of a (B, c, V) slice."""
    best, argmax = logits.max(-1)
    below = logits - best[..., None]
    # The best token's weight is 1. The others are summed without it, to keep their digits when it is nearly certain.
    others = below.exp().scatter(-1, argmax[..., None], 0.0)
    rest = others.sum(-1)
    total, log_total = 1 + rest, rest.log1p()
    # 0 · log 0 is 0: a forbidden token carries no entropy. From a much lower bound, its gradient would be NaN.
    mean_below = (others * below.clamp(min=_LEAST_LOG)).sum(-1) / total
    return Statistics(log_total - mean_below, argmax, 1 / total, (1 - others.amax(-1)) / total, best + log_total)


def _inverse_cdf(logits: Tensor, u: Tensor) -> Tensor:
    vocab_size = logits.shape[-1]
    chunk_len = min(_SAMPLE_CHUNK, vocab_size)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    weights = torch.nn.functional.pad(weights, (0, -vocab_size % chunk_len))
    weights = weights.unflatten(-1, (-1, chunk_len))  # (B, c, chunks, 1024)
    chunk_ends = weights.double().sum(-1).cumsum(-1)
    target = u.double()[..., None] * chunk_ends[..., -1:]
    chunk = _first_above(chunk_ends, target)
    before = torch.where(chunk > 0, chunk_ends.gather(-1, (chunk - 1).clamp(min=0)), 0.0)
    inside = weights.gather(-2, chunk[..., None].expand(*chunk.shape, chunk_len))[..., 0, :]
    token = _first_above(inside.double().cumsum(-1), target - before)
    return (chunk * chunk_len + token)[..., 0]


def _first_above(ends: Tensor, target: Tensor) -> Tensor:
    """Return the index of the first cell that ends above target.

    If rounding leaves none, return the last cell that is not empty.
    """
    last = (ends < ends[..., -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(ends, target, right=True), last)


def refuse_nan(where: str) -> NoReturn:
    """Raise for a NaN prediction, naming where it occurred."""
    raise FloatingPointError(
        f"Prediction.entropy must be a number, got NaN {where}. Check the weights and their dtype: float16 overflows "
        "where bfloat16 does not."
    )
