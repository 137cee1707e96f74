"""Results of a likelihood evaluation: numbers with confidence intervals, curves, a table to print."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dgemma.checks import Words, require
from dgemma.intervals import Estimate, half_width
from dgemma.printing import without_nan


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Nats per bin of a coordinate: `edges` (n + 1,), `nats` (n,) and half-widths of intervals `error` (n,)."""

    edges: Tensor
    nats: Tensor
    error: Tensor


@dataclass(frozen=True, kw_only=True)
class RowSums:
    """Sums over the tokens of each of R rows, in float64 on the host."""

    text: Tensor  # (R,) int64: the text that the row belongs to; -1: a text of one row
    nats: Tensor  # (R,) the bound
    tokens: Tensor  # (R,) scored tokens of the text itself
    fill_tokens: Tensor  # (R,) scored tokens after its end; their nats are included in the sums
    causal: Tensor  # (R,) nats
    causal_tokens: Tensor  # (R,) of the text itself
    by_sampler: Tensor  # (R,) nats under a sampler; NaN without one
    reconstruction: Tensor  # (R,) the part of the bound below the lowest level
    by_level: Tensor  # (R, bins) the part of the bound per bin of noise levels
    by_sample: Tensor  # (R, num_samples) the part of the bound from each noise level; sums to `nats - reconstruction`
    by_position: Tensor  # (R, C) the bound per canvas position, summed over canvases
    tokens_by_position: Tensor  # (R, C) text and fill

    @classmethod
    def join(cls, parts: "list[RowSums]") -> "RowSums":
        """Return the rows of all parts, in order."""
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__})

    @property
    def clusters(self) -> Tensor:
        """The cluster of each row, (R,) int64 from 0. A cluster is a text, or a row if there is only one text."""
        own = torch.arange(len(self.text))
        clusters = torch.where(self.text < 0, -1 - own, self.text).unique(return_inverse=True)[1]
        return clusters if clusters.any() else own


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """The result of `evaluate`, in nats per token of the text. Printed, the result is a table.

    The model must also write the end-of-text that fills a last canvas. So sums include the nats of this fill. They are
    divided by `num_tokens`, which does not include the `num_fill_tokens`. `by_level` is the part of the bound per noise
    level. It adds up to `nelbo` minus `reconstruction`, the part below the lowest level. `by_position` has means per
    canvas position over all scored tokens, fill included. All numbers are computed from `rows`. Intervals come from the
    spread between texts. If there is only one text, or rows name no text, they come from the spread between rows. For a
    single row, the interval of `nelbo` comes from the spread between its noise levels. It says how well the bound of
    this text is estimated, nothing about other texts.
    """

    rows: RowSums
    num_samples: int
    confidence: float
    num_bytes: int | None = None

    def __post_init__(self) -> None:
        has_tokens = bool(self.rows.tokens.any())
        require(has_tokens, "evaluate source", "have a token to score", Words("none in any row"), "Check the data.")

    @cached_property
    def nelbo(self) -> Estimate:
        rows = self.rows
        nelbo = self._per_token(rows.nats, rows.tokens)
        if len(rows.tokens) > 1 or self.num_samples == 1:
            return nelbo
        # Stratified levels have different means, which differences of neighbours contain least.
        levels = rows.by_sample[0]
        variance = (levels - levels.roll(1)).square().sum() / 2
        error = half_width(self.confidence, len(levels) - 1) * float(variance) ** 0.5
        return nelbo._replace(error=error / int(rows.tokens))

    @cached_property
    def causal(self) -> Estimate:
        return self._per_token(self.rows.causal, self.rows.causal_tokens)

    @cached_property
    def by_sampler(self) -> Estimate | None:
        """The exact likelihood under the sampler of `evaluate`; None without one."""
        if bool(self.rows.by_sampler.isnan().any()):
            return None
        return self._per_token(self.rows.by_sampler, self.rows.tokens)

    @property
    def reconstruction(self) -> float:
        return self._per_token(self.rows.reconstruction, self.rows.tokens).value

    @cached_property
    def by_level(self) -> Curve:
        edges = torch.linspace(0, 1, self.rows.by_level.shape[1] + 1, dtype=torch.float64)
        return self._curve(edges, self.rows.by_level, self.rows.tokens[:, None])

    @cached_property
    def by_position(self) -> Curve:
        edges = torch.arange(self.rows.by_position.shape[1] + 1, dtype=torch.float64)
        return self._curve(edges, self.rows.by_position, self.rows.tokens_by_position)

    def _curve(self, edges: Tensor, nats: Tensor, tokens: Tensor) -> Curve:
        return mean_of_rows(edges, nats, tokens, self.confidence, clusters=self.rows.clusters)

    def _per_token(self, nats: Tensor, tokens: Tensor) -> Estimate:
        curve = self._curve(torch.zeros(2), nats[:, None], tokens[:, None])
        return Estimate(curve.nats.item(), curve.error.item())

    @property
    def num_tokens(self) -> int:
        """Number of scored tokens of the texts."""
        return int(self.rows.tokens.sum())

    @property
    def num_fill_tokens(self) -> int:
        """Number of scored tokens after the ends of the texts."""
        return int(self.rows.fill_tokens.sum())

    @property
    def num_texts(self) -> int | None:
        """Number of texts that the rows belong to; None if some rows have no text number."""
        return len(self.rows.text.unique()) if (self.rows.text >= 0).all() else None

    @property
    def bits_per_byte(self) -> Estimate | None:
        """The bound per byte of the scored text, in bits; None without `num_bytes`."""
        return self._per_byte(self.nelbo)

    @property
    def causal_bits_per_byte(self) -> Estimate | None:
        """The causal likelihood per byte, in bits. A first token without a prediction costs the mean of the others."""
        return self._per_byte(self.causal)

    def gap(self, nats: Tensor) -> Estimate:
        """Return how far the bound lies above another measure of the same rows, nats (R,), per token.

        The interval is usually narrower than that of either measure, because the spread between rows cancels.

        Example: `likelihood.gap(chain.nll(tokens))` is the excess of a model over the exact likelihood of a Markov
        chain.
        """
        return self._per_token(self.rows.nats - nats.cpu(), self.rows.tokens)

    def _per_byte(self, nats: Estimate) -> Estimate | None:
        if self.num_bytes is None:
            return None
        scale = self.num_tokens / self.num_bytes / math.log(2)
        return Estimate(nats.value * scale, nats.error * scale)

    def summary(self) -> dict[str, Any]:
        """Return the numbers as plain Python, for JSON; None for a number that is unknown or infinite."""
        none = Estimate(math.nan, math.nan)
        bits, causal_bits = self.bits_per_byte or none, self.causal_bits_per_byte or none
        sampled = self.by_sampler or none
        numbers = {
            "nelbo": self.nelbo.value,
            "nelbo_error": self.nelbo.error,
            "causal": self.causal.value,
            "causal_error": self.causal.error,
            "by_sampler": sampled.value,
            "by_sampler_error": sampled.error,
            "reconstruction": self.reconstruction,
            "bits_per_byte": bits.value,
            "causal_bits_per_byte": causal_bits.value,
            "num_rows": len(self.rows.tokens),
            "num_texts": self.num_texts,
            "num_tokens": self.num_tokens,
            "num_fill_tokens": self.num_fill_tokens,
            "num_samples": self.num_samples,
            "confidence": self.confidence,
            "by_level": self.by_level.nats.tolist(),
            "by_level_error": self.by_level.error.tolist(),
            "by_position": self.by_position.nats.tolist(),
        }
        return {name: without_nan(value) for name, value in numbers.items()}

    def __str__(self) -> str:
        share, num_rows = f"{self.confidence:.0%} interval", len(self.rows.tokens)
        bound = "diffusion, at most" if num_rows > 1 else "diffusion, estimate"
        rows = f"{num_rows:,} row{'s' * (num_rows != 1)}"
        if self.num_texts is not None:
            rows += f" of {self.num_texts:,} text{'s' * (self.num_texts != 1)}"
        fill = f" and {self.num_fill_tokens:,} of fill" if self.num_fill_tokens else ""
        tokens = f"{self.num_tokens:,} token{'s' * (self.num_tokens != 1)}{fill}"
        lines = [
            f"{tokens} in {rows}, {self.num_samples} noise level{'s' * (self.num_samples != 1)} per canvas",
            f"{'':22}{'nats/token':>10}   {share:20}{'perplexity':>10}",
        ]
        for name, nats in ((bound, self.nelbo), ("by the sampler", self.by_sampler), ("causal", self.causal)):
            if nats is None or math.isnan(nats.value):  # without a sampler, or a model without a causal mode
                continue
            interval = f"{nats.value - nats.error:.4f} … {nats.value + nats.error:.4f}"
            interval = interval if math.isfinite(nats.error) else "–"  # a single row
            lines.append(f"{name:22}{nats.value:10.4f}   {interval:20}{math.exp(min(nats.value, 700)):10.2f}")
        for name, bits in (("bits per byte", self.bits_per_byte), ("bits per byte, causal", self.causal_bits_per_byte)):
            if bits is not None and not math.isnan(bits.value):
                lines.append(f"{name:22}{bits.value:10.4f}")
        lines.append(f"{'noise level':22}{'nats/token':>10}   its share of the bound")
        lines.append(f"{'  below the lowest':22}{self.reconstruction:10.4f}")
        largest = max(self.by_level.nats.max().item(), 1e-9)
        edges = self.by_level.edges.tolist()
        for low, high, part in zip(edges[:-1], edges[1:], self.by_level.nats.tolist(), strict=True):
            value = f"{part:10.4f}" if part else f"{'–':>10}"  # no level in this bin was drawn
            bar = "█" * round(24 * max(0.0, part) / largest)
            lines.append(f"  {f'{low:.2f} … {high:.2f}':20}{value}   {bar}".rstrip())
        return "\n".join(lines)


def mean_of_rows(
    edges: Tensor, nats: Tensor, tokens: Tensor, confidence: float, *, clusters: Tensor | None = None
) -> Curve:
    """Return Σ nats / Σ tokens over rows, per column: nats (R, n), tokens (R, n) or (R, 1).

    Intervals use Student's t. Rows with the same number in `clusters` (R,), from 0, may depend on each other: their
    residuals are added first. For a single cluster, the interval is infinite. None: all rows are independent.
    """
    total = tokens.sum(0)
    mean = nats.sum(0) / total
    residual = nats - mean * tokens
    if clusters is not None:
        residual = residual.new_zeros(int(clusters.max()) + 1, residual.shape[1]).index_add(0, clusters, residual)
    count = len(residual)
    if count == 1:
        return Curve(edges=edges, nats=mean, error=torch.full_like(mean, torch.inf))
    variance = residual.square().sum(0) * count / (count - 1)
    return Curve(edges=edges, nats=mean, error=half_width(confidence, count - 1) * variance.sqrt() / total)
