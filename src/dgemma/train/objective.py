"""The training objective: a loss over canvases plus the causal loss of the same weights.

The defaults are the published loss: unweighted cross-entropy at every position of a canvas, plus next-token
cross-entropy. `losses` has other losses of canvases, and `recipes` the settings of public recipes. A batch is cut into
canvases and noised (`canvases`), run through the network (`one_pass`), and scored by the tied head (`losses`, `head`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from dgemma.checks import Count, Probability, at_least, at_most, check_types, require, require_field, require_tensor
from dgemma.diffusion.noise import MaskNoise, Noise
from dgemma.model.diffusion import DiffusionGemma
from dgemma.train import head
from dgemma.train.batch import TrainBatch
from dgemma.train.canvases import Canvases, NoisyCanvases, cut_canvases, cut_holes, draw_choice, noise_canvases
from dgemma.train.losses import CrossEntropy, Loss
from dgemma.train.one_pass import run_text_and_canvases

_PUBLISHED_LOSS = CrossEntropy()


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of a loss by name: each row's sum (B,) and its number of scored positions (B,).

    Example: `objective(model, batch, seeds=seeds).sums["decoder"]`.
    """

    sums: Mapping[str, Tensor]
    counts: Mapping[str, Tensor]


@runtime_checkable
class Measure(Protocol):
    """The interface of objectives. The call is a function of the model, the rows and their seeds alone.

    `total_counts` returns, before any forward, how many positions each term of these rows has. `reduce` returns the
    scalar loss. If you pass the totals of the whole step, it returns the share of the loss that comes from these rows.
    The shares of all micro-batches and processes add up to the loss of the batch. `RowMean` makes one from a function.
    """

    def __call__(self, model: DiffusionGemma, batch: TrainBatch, *, seeds: Tensor) -> Terms: ...
    def total_counts(self, batch: TrainBatch, seeds: Tensor) -> Mapping[str, Tensor]: ...
    def reduce(self, terms: Terms, totals: Mapping[str, Tensor] | None = None) -> Tensor: ...


@runtime_checkable
class Stateful(Protocol):
    """The interface of objectives that also depend on earlier weights, such as `PolicyGradient`.

    `train` calls `begin` with the number of updates so far, before the first checkpoint and before each update. It
    saves the tensors of `state` in every checkpoint, and writes into them when it resumes.
    """

    def begin(self, step: int, weights: Mapping[str, nn.Parameter]) -> None: ...
    def state(self) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class RowMean:
    """The mean over rows of `losses(model, batch, seeds)` (B,), as an objective for `train`.

    Example: `train(model, RowMean(lambda model, batch, seeds: -log_prob(model, batch)), source, config, out="run")`.
    """

    losses: Callable[[DiffusionGemma, TrainBatch, Tensor], Tensor]

    def __call__(self, model: DiffusionGemma, batch: TrainBatch, *, seeds: Tensor) -> Terms:
        losses = self.losses(model, batch, seeds)
        require_tensor(losses, "RowMean.losses", f"return one loss per row, ({len(seeds)},)", shape=seeds.shape)
        return Terms(sums={"row": losses}, counts={"row": torch.ones_like(seeds)})

    def total_counts(self, batch: TrainBatch, seeds: Tensor) -> dict[str, Tensor]:
        return {"row": torch.ones_like(seeds).sum()}

    def reduce(self, terms: Terms, totals: Mapping[str, Tensor] | None = None) -> Tensor:
        return terms.sums["row"].sum() / (terms.counts if totals is None else totals)["row"].sum()


class Drawn(NamedTuple):
    """The canvases of a batch with their noise; None where the objective has no loss of canvases."""

    canvases: Canvases
    noisy: NoisyCanvases | None


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The objective as a value: `objective(model, batch, seeds=...)` returns terms, `reduce` returns the scalar loss.

    All draws are functions of each row's seed, so a row's terms do not depend on its batch.

    Example: `objective = Objective(noise=UniformNoise(512), canvas_len=32)`;
    `objective.reduce(objective(model, batch, seeds=torch.arange(8))).backward()`.
    """

    noise: Noise
    canvas_len: Count
    fill_token: int = 1  # end-of-text, after the end of an answer
    # Per row: "one" canvas, drawn uniformly among those with text, or "all" that have unfrozen tokens, in one pass.
    canvases: Literal["one", "all"] = "one"
    # Draws of noise for each canvas. One pass over the text serves all of them.
    num_draws: Annotated[int, at_least(1), at_most(4096)] = 1
    t_range: tuple[float, float] = (1e-4, 1 - 1e-4)  # range of the time t, drawn uniformly per canvas
    # To train one network for two noises: each canvas gets `masks` instead of `noise` with probability `masks_prob`.
    # Such a canvas is scored where it is masked. Only for `CrossEntropy`.
    masks: MaskNoise | None = None
    masks_prob: Probability = 0.5
    holes_prob: Probability = 0.0  # probability that a canvas is frozen except for holes, to train infilling
    allowed: tuple[int, ...] | None = None  # the ids that uniform noise and self-conditioning are restricted to

    loss: Loss = _PUBLISHED_LOSS  # of a canvas: `CrossEntropy`, `LeaveOneOut`, `Bound` or your own
    decoder_weight: Annotated[float, at_least(0)] = 1.0  # of `loss`

    self_cond_prob: Probability = 0.5  # probability that a canvas sees the prediction of a first, detached pass
    # The input of the other canvases: "zero_signal" is zeros, "zero_logits" is the mean embedding.
    self_cond_off: Literal["zero_signal", "zero_logits"] = "zero_signal"

    causal_weight: Annotated[float, at_least(0)] = 1.0
    causal_scope: Literal["sequence", "answer"] = "sequence"  # prompt and answer, or only the "answer"
    causal_fill: bool = True  # whether the causal term scores the fill

    # The fill after a truncated answer is "scored" or "unscored", or the whole row is "rejected".
    truncated: Literal["scored", "unscored", "rejected"] = "scored"
    # "global": the mean over all tokens of a step. "process", "micro_batch" or "example" (a row): the mean over the
    # tokens of each one, then the mean of these means.
    reduction: Literal["example", "micro_batch", "process", "global"] = "global"

    def __post_init__(self) -> None:
        check_types(self)
        is_range = len(self.t_range) == 2 and 0 <= self.t_range[0] <= self.t_range[1] <= 1
        require_field(is_range, self, "t_range", "satisfy 0 <= low <= high <= 1", "Use (1e-4, 1 - 1e-4).")
        has_term, vocab_size = bool(self.decoder_weight or self.causal_weight), self.noise.vocab_size
        require_field(has_term, self, "causal_weight", "be > 0 if decoder_weight is 0")
        self.loss.check_noise(self.noise, self.allowed)
        if self.masks is not None:
            has_masks = isinstance(self.loss, CrossEntropy) and self.masks.vocab_size == vocab_size
            require_field(has_masks, self, "masks", f"have the noise's {vocab_size} tokens, and loss be CrossEntropy")
        if self.allowed is not None:
            are_ids = bool(self.allowed) and all(0 <= token < vocab_size for token in self.allowed)
            require_field(are_ids, self, "allowed", f"be ids in [0, {vocab_size})", "Use None for all.")

    def __call__(self, model: DiffusionGemma, batch: TrainBatch, *, seeds: Tensor) -> Terms:
        """Return the terms of B rows; seeds (B,) are the only randomness.

        Example: `objective(model, batch, seeds=torch.arange(batch.batch_size)).sums["decoder"]`.
        """
        vocab_size, fix = model.config.vocab_size, "Make the noise with config.vocab_size."
        fits, rule = self.noise.vocab_size == vocab_size, f"cover the model's {vocab_size} tokens"
        require(fits, "Objective.noise", rule, self.noise, fix)
        canvases, noisy = self.draw(batch, seeds)
        canvases.check_positions(model.config.max_position_embeddings)
        hidden = run_text_and_canvases(model, canvases, noisy, self_cond_off=self.self_cond_off)
        sums, counts = {}, {}
        if noisy is not None and hidden.canvases is not None:
            scored, losses = noisy.scored, self.loss(model, canvases, noisy, hidden.canvases)
            sums["decoder"], counts["decoder"] = torch.where(scored, losses, 0.0).sum((1, 2)), scored.sum((1, 2))
        if self.causal_weight:
            scored, text = canvases.causal_scored, canvases.tokens[:, : canvases.causal_scored.shape[1] + 1]
            losses = head.next_token_losses(model, hidden.text, text)
            sums["causal"], counts["causal"] = torch.where(scored, losses, 0.0).sum(1), scored.sum(1)
        return Terms(sums=sums, counts=counts)

    def total_counts(self, batch: TrainBatch, seeds: Tensor) -> dict[str, Tensor]:
        """Return what these rows add to the totals of the step, before any forward.

        "decoder" and "causal" count scored positions. "decoder_rows" and "causal_rows" count rows with scored
        positions. "micro_batches" is 1.

        Example: `objective.reduce(terms, totals)`, where totals are sums of this over micro-batches and processes.
        """
        needs_noise = self.loss.scored == "noised" or self.masks is not None
        canvases, noisy = self.draw(batch, seeds, with_noise=needs_noise)
        scored = {}
        if self.decoder_weight:
            scored["decoder"] = canvases.scored if noisy is None else noisy.scored
        if self.causal_weight:
            scored["causal"] = canvases.causal_scored
        counts = {"micro_batches": torch.ones((), dtype=torch.int64, device=seeds.device)}
        for name, where in scored.items():
            counts[name] = where.sum()
            counts[f"{name}_rows"] = where.flatten(1).any(1).sum()
        return counts

    def reduce(self, terms: Terms, totals: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the scalar to minimise: the weighted terms, reduced according to `reduction`.

        totals: sums of `total_counts` over all micro-batches and processes of the step. The results of all
        micro-batches then add up to the loss of the step. None: these rows are the whole step. The reduction "process"
        also needs this process's counts as "process/decoder" and "process/causal", and the number of "processes".

        Example: `objective.reduce(objective(model, batch, seeds=seeds)).backward()`.
        """
        weights = {"decoder": self.decoder_weight, "causal": self.causal_weight}
        parts = [
            weights[name] * self._mean(name, sums, terms.counts[name], totals) for name, sums in terms.sums.items()
        ]
        return torch.stack(parts).sum()

    def _mean(self, name: str, sums: Tensor, counts: Tensor, totals: Mapping[str, Tensor] | None) -> Tensor:
        """Return the mean of a term under the reduction; a row without scored positions does not count."""
        if self.reduction == "example":
            num_rows = (counts > 0).sum() if totals is None else totals[f"{name}_rows"]
            return (sums / counts.clamp(min=1)).sum() / num_rows.clamp(min=1)
        here = counts.sum()
        if totals is None:
            return sums.sum() / here.clamp(min=1)
        if self.reduction == "micro_batch":
            return sums.sum() / here.clamp(min=1) / totals["micro_batches"]
        if self.reduction == "process":
            return sums.sum() / totals[f"process/{name}"].clamp(min=1) / totals["processes"]
        return sums.sum() / totals[name].clamp(min=1)

    def draw(self, batch: TrainBatch, seeds: Tensor, *, with_noise: bool = True) -> Drawn:
        """Cut the rows into canvases and put noise on these, without the model; seeds (B,) are the only randomness.

        Example: `objective.draw(batch, seeds).noisy.z` are the tokens that the network will see.
        """
        # A single seed would broadcast, and all rows would get the same noise.
        rule, fix = f"have shape ({batch.batch_size},), one per row", "Use `row_seeds` to make them."
        require_tensor(seeds, "Objective seeds", rule, shape=batch.length.shape, fix=fix)
        canvases = cut_canvases(
            batch,
            canvas_len=self.canvas_len,
            fill_token=self.fill_token,
            choose=draw_choice(seeds) if self.canvases == "one" else None,
            num_draws=self.num_draws,
            truncated=self.truncated,
            causal_scope=self.causal_scope if self.causal_weight else None,
            causal_fill=self.causal_fill,
        )
        if self.holes_prob:
            canvases = cut_holes(canvases, seeds, self.holes_prob)
        if not self.decoder_weight or not with_noise:
            return Drawn(canvases, None)
        noisy = noise_canvases(
            self.noise,
            canvases,
            seeds,
            t_range=self.t_range,
            self_cond_prob=self.self_cond_prob,
            masks=self.masks,
            masks_prob=self.masks_prob,
            allowed=None if self.allowed is None else flags_of_ids(self.allowed, self.noise.vocab_size, seeds.device),
            scored=self.loss.scored,
        )
        return Drawn(canvases, noisy)


@cache
def flags_of_ids(ids: tuple[int, ...], vocab_size: int, device: torch.device) -> Tensor:
    """Return flags (V,) bool, True for `ids`; cached, because copying the ids to a GPU makes the host wait."""
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, torch.tensor(ids), True).to(device)
