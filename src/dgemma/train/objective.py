"""What is minimised: a denoising loss over canvases and the causal loss of the same weights, switch by switch.

The defaults are the published fine-tuning objective: unweighted cross-entropy at every position of a canvas, plus next
token cross-entropy. Where public recipes disagree there is a named switch, and `recipes` holds each one's settings. The
bounds of `nelbo` are losses here too: MDLM and LLaDA (mask), Duo (uniform), GIDD (hybrid), each over blocks (BD3-LM).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from dgemma.diffusion.noise import HybridNoise, Noise
from dgemma.model.diffusion import DiffusionGemma
from dgemma.train import head, nelbo
from dgemma.train.batch import TrainBatch
from dgemma.train.canvases import Canvases, Noised, cut_canvases, draw_choice, noise_canvases
from dgemma.train.one_pass import ATTENTIONS, CleanText, predict_canvases, read_clean

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "canvases": ("one", "all"),
    "decoder_loss": ("cross_entropy", "leave_one_out", "nelbo"),
    "parametrisation": nelbo.PARAMETRISATIONS,
    "weights": ("exact", "clipped", "dynamic"),
    "scored": ("all", "noised"),
    "self_cond_off": ("zero_signal", "zero_logits"),
    "causal_scope": ("sequence", "answer"),
    "truncated": ("scored", "unscored", "rejected"),
    "reduction": ("example", "micro_batch", "process", "global"),
    "attention": ATTENTIONS,
}


_CERTAIN = 1e4  # evidence that leaves no doubt, and is finite


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What an objective measured: of each named term, every row's sum (B,) and how many positions it is over (B,).

    Example: `objective(model, batch, seeds=seeds).sums["decoder"]`.
    """

    sums: Mapping[str, Tensor]
    counts: Mapping[str, Tensor]


class Measure(Protocol):
    """What is minimised. A function of the model, the rows and their seeds: it draws nothing else.

    `total_counts` says, before any forward, how many positions each term of these rows will have; `reduce` makes the
    scalar. Given the totals of the whole step it returns these rows' part, so that the parts of all micro-batches and
    processes add up to the loss of the whole batch.
    """

    def __call__(self, model: DiffusionGemma, batch: TrainBatch, *, seeds: Tensor) -> Terms: ...
    def total_counts(self, batch: TrainBatch, seeds: Tensor) -> Mapping[str, Tensor]: ...
    def reduce(self, terms: Terms, totals: Mapping[str, Tensor] | None = None) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss, as a value. `objective(model, batch, seeds=...)` measures its terms, `reduce` makes them a scalar.

    All its draws are functions of each row's seed, so a row's terms do not depend on its batch.

    Example: `objective = Objective(noise=UniformNoise(512), canvas_len=32)`;
    `objective.reduce(objective(model, batch, seeds=torch.arange(8))).backward()`.
    """

    noise: Noise
    canvas_len: int
    fill_token: int = 1  # end-of-text, after an answer's end
    canvases: str = "one"  # of each row: "one", drawn uniformly among those that hold text, or "all", in one pass
    t_range: tuple[float, float] = (1e-4, 1 - 1e-4)  # t is uniform on it, one for each canvas
    allowed: tuple[int, ...] | None = None  # the ids that random noise draws from and self-conditioning is over

    # The decoder's term. "cross_entropy" of what was there; "leave_one_out": the same, of logits that mean p(x | z
    # without this position); "nelbo": the exact bound, whose logits mean what `parametrisation` says.
    decoder_loss: str = "cross_entropy"
    parametrisation: str = "mean"
    weights: str = "exact"  # of the bound; GIDD trains with those "clipped" at `max_weight`, or its "dynamic" ones
    max_weight: float = 2.0
    scored: str = "all"  # positions under cross-entropy: "all", or those that were "noised"
    propose_mask: bool = False  # whether the mask token takes part in the softmax (LLaDA); MDLM's SUBS leaves it out
    decoder_weight: float = 1.0

    self_cond_prob: float = 0.5  # how often a canvas sees a first, detached pass's prediction
    self_cond_off: str = "zero_signal"  # else: no signal, or that of "zero_logits", the mean embedding

    causal_weight: float = 1.0
    causal_scope: str = "sequence"  # prompt and answer, or the "answer" alone
    causal_fill: bool = True  # whether the fill is predicted word by word, too

    truncated: str = "scored"  # the fill behind a cut answer: "scored" all the same, "unscored", or the row "rejected"
    reduction: str = "global"  # token mean over the step; per "process"; per "micro_batch"; mean of "example" means
    attention: str = "dense"  # how it is computed: "blocks" skip what is hidden, for long rows on a GPU

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"Objective.{name} must be one of {choices}, got {getattr(self, name)!r}.")
        if self.canvas_len < 1:
            raise ValueError(f"Objective.canvas_len must be at least 1, got {self.canvas_len}.")
        object.__setattr__(self, "t_range", tuple(self.t_range))
        low, high = self.t_range
        if not 0 <= low <= high <= 1:
            raise ValueError(f"Objective.t_range must satisfy 0 <= low <= high <= 1, got {self.t_range}.")
        if not 0 <= self.self_cond_prob <= 1:
            raise ValueError(f"Objective.self_cond_prob must lie in [0, 1], got {self.self_cond_prob}.")
        for name in ("decoder_weight", "causal_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"Objective.{name} must be at least 0, got {getattr(self, name)}.")
        if not self.decoder_weight and not self.causal_weight:
            raise ValueError("Objective.decoder_weight and causal_weight must not both be 0: nothing would be learned.")
        if not self.max_weight > 0:
            raise ValueError(f"Objective.max_weight must be above 0, got {self.max_weight}.")
        self._check_loss()

    def _check_loss(self) -> None:
        """Losses that the noise has no formula for, and switches that the loss would not read."""
        is_bound = self.decoder_loss == "nelbo"
        if self.decoder_loss != "cross_entropy":
            nelbo.check_process(self.noise)
        if self.weights != "exact" and not is_bound:
            raise ValueError(f"Objective.weights must be 'exact' but for decoder_loss 'nelbo', got {self.weights!r}.")
        if self.parametrisation != "mean" and (not is_bound or self.noise.kind == "mask"):
            raise ValueError(
                f"Objective.parametrisation must be 'mean' but for the bounds of uniform and hybrid noise, got "
                f"{self.parametrisation!r}. Cross-entropy of such logits is decoder_loss 'leave_one_out'."
            )
        if self.propose_mask and (self.noise.mask_token is None or (is_bound and self.noise.kind == "hybrid")):
            raise ValueError(f"Objective.propose_mask must be False with {self.decoder_loss!r} of {self.noise!r}.")
        if self.weights == "dynamic" and self.noise.kind != "hybrid":
            raise ValueError(f"Objective.weights 'dynamic' must come with HybridNoise, got {self.noise!r}.")
        if self.decoder_loss == "leave_one_out" and self.noise.kind != "uniform":
            raise ValueError(
                f"Objective.decoder_loss 'leave_one_out' must come with UniformNoise, got {self.noise!r}. A mask says "
                "nothing of its token, so there both losses are one: use 'cross_entropy'."
            )
        if is_bound and self.scored == "noised":
            raise ValueError("Objective.scored must be 'all' with decoder_loss 'nelbo', whose weights say what counts.")
        if self.allowed is None:
            return
        object.__setattr__(self, "allowed", tuple(self.allowed))
        if not self.allowed or not all(0 <= token < self.noise.vocab_size for token in self.allowed):
            raise ValueError(f"Objective.allowed must hold ids in [0, {self.noise.vocab_size}), got {self.allowed}.")
        if is_bound and self.noise.kind != "mask":
            raise ValueError(
                "Objective.allowed must be None with the bounds of uniform and hybrid noise, which are over the whole "
                "vocabulary. Use a model whose vocabulary is the allowed set."
            )

    def __call__(self, model: DiffusionGemma, batch: TrainBatch, *, seeds: Tensor) -> Terms:
        """Measure the terms of B rows; seeds (B,) are all the randomness there is.

        Example: `objective(model, batch, seeds=torch.arange(batch.batch_size)).sums["decoder"]`.
        """
        if self.noise.vocab_size != model.config.vocab_size:
            raise ValueError(
                f"Objective.noise must cover the model's {model.config.vocab_size} tokens, got {self.noise!r}. "
                "Make the noise with config.vocab_size."
            )
        cut = self._cut(batch, seeds)
        cut.check_positions(model.config.max_position_embeddings)
        clean = self._read(model, cut)
        sums, counts = {}, {}
        if self.decoder_weight:
            noised = self._noise(cut, seeds)
            hidden = self._denoise(model, cut, noised, None if clean is None else clean.first(cut.prefix_len))
            scored = self._decoder_scored(cut, noised)
            losses = self._decoder_losses(model, cut, noised, hidden)
            sums["decoder"], counts["decoder"] = torch.where(scored, losses, 0.0).sum((1, 2)), scored.sum((1, 2))
        if self.causal_weight:
            scored, losses = cut.causal_scored, self._causal_losses(model, cut, clean)
            sums["causal"], counts["causal"] = torch.where(scored, losses, 0.0).sum(1), scored.sum(1)
        return Terms(sums=sums, counts=counts)

    def total_counts(self, batch: TrainBatch, seeds: Tensor) -> dict[str, Tensor]:
        """What these rows add to the step's totals, before any forward: "micro_batches"; by term, positions and rows.

        "decoder" and "causal" are the positions scored, "decoder_rows" and "causal_rows" the rows that have any.

        Example: `objective.reduce(terms, totals)`, where totals are the sums of this over micro-batches and processes.
        """
        cut = self._cut(batch, seeds)
        one = torch.ones((), dtype=torch.int64, device=seeds.device)
        scored = {}
        if self.decoder_weight:
            needs_noise = self.scored == "noised"
            scored["decoder"] = self._decoder_scored(cut, self._noise(cut, seeds)) if needs_noise else cut.scored
        if self.causal_weight:
            scored["causal"] = cut.causal_scored
        counts = {"micro_batches": one}
        for name, where in scored.items():
            counts[name] = where.sum()
            counts[f"{name}_rows"] = where.flatten(1).any(1).sum()
        return counts

    def reduce(self, terms: Terms, totals: Mapping[str, Tensor] | None = None) -> Tensor:
        """The scalar to minimise: weighted terms, reduced as `reduction` says.

        totals: sums of `total_counts` over every micro-batch of every process of the step; the results of these then
        add up to the step's loss. None: these rows are the whole step. With "process", also this process's own counts
        under "process/decoder" and "process/causal", and the number of "processes".

        Example: `objective.reduce(objective(model, batch, seeds=seeds)).backward()`.
        """
        weights = {"decoder": self.decoder_weight, "causal": self.causal_weight}
        parts = [
            weights[name] * self._mean(name, sums, terms.counts[name], totals) for name, sums in terms.sums.items()
        ]
        return torch.stack(parts).sum()

    def _mean(self, name: str, sums: Tensor, counts: Tensor, totals: Mapping[str, Tensor] | None) -> Tensor:
        """Σ of a row's sums over what the reduction divides by; a row with nothing scored costs and counts nothing."""
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

    def _cut(self, batch: TrainBatch, seeds: Tensor) -> Canvases:
        if seeds.shape != batch.length.shape:  # one seed would be every row's noise
            raise ValueError(
                f"Objective seeds must be one for each of {batch.batch_size} rows, got shape {tuple(seeds.shape)}. "
                "`row_seeds` makes them."
            )
        return cut_canvases(
            batch,
            canvas_len=self.canvas_len,
            fill_token=self.fill_token,
            choose=draw_choice(seeds) if self.canvases == "one" else None,
            truncated=self.truncated,
            causal_scope=self.causal_scope if self.causal_weight else None,
            causal_fill=self.causal_fill,
        )

    def _noise(self, cut: Canvases, seeds: Tensor) -> Noised:
        return noise_canvases(
            self.noise,
            cut,
            seeds,
            t_range=self.t_range,
            self_cond_prob=self.self_cond_prob,
            allowed=self._allowed_mask(seeds.device),
        )

    def _decoder_scored(self, cut: Canvases, noised: Noised) -> Tensor:
        return cut.scored & noised.replaced if self.scored == "noised" else cut.scored

    def _read(self, model: DiffusionGemma, cut: Canvases) -> CleanText | None:
        """The clean text, as far as anything looks at it or is scored after it."""
        num_tokens = max(cut.prefix_len if self.decoder_weight else 0, cut.causal_len)
        if num_tokens == 0:
            return None
        documents = None if cut.documents is None else cut.documents[:, :num_tokens]
        return read_clean(model, cut.tokens[:, :num_tokens], documents=documents, attention=self.attention)

    def _denoise(self, model: DiffusionGemma, cut: Canvases, noised: Noised, clean: CleanText | None) -> Tensor:
        """The last hidden states of the canvases, (B, K, C, D), after a first pass where self-conditioning asks."""

        def predict(signal: Tensor | None) -> Tensor:
            return predict_canvases(
                model,
                noised.z,
                cut.starts,
                clean,
                signal=signal,
                noise_level=noised.level if model.takes_noise_level else None,
                documents=cut.packing,
                aligned=cut.aligned,
                attention=self.attention,
            )

        off = None
        if self.self_cond_off == "zero_logits":
            mean = model.soft_embedding(model.embed_tokens.weight.new_zeros(1, 1, model.config.vocab_size))
            off = mean.expand(*noised.z.shape, -1)
        if not self.self_cond_prob:
            return predict(off)
        with torch.no_grad():
            first = predict(off)
        proposable = self.noise.proposable(self._allowed_mask(first.device), first.device)  # as in `generate`
        signal = head.soft_embedding(model, first, allowed=proposable)
        return predict(torch.where(noised.self_cond[..., None, None], signal, 0.0 if off is None else off))

    def _decoder_losses(self, model: DiffusionGemma, cut: Canvases, noised: Noised, hidden: Tensor) -> Tensor:
        """What each position costs, (B, K, C)."""
        weight, cap = model.embed_tokens.weight, model.config.final_logit_softcapping
        x, z, level = cut.x, noised.z, noised.level[..., None].expand(cut.x.shape)  # (B, K, C)
        rows = hidden.flatten(0, 2)
        weights = self._bound_weights(x, z, level) if self.decoder_loss == "nelbo" else None
        if weights is not None and self.noise.kind != "mask":
            given = (t.reshape(-1, 1) for t in (x, z, level, weights))
            return head.map_logits(self._bound, rows, weight, *given, cap=cap).view_as(x)
        observed = evidence = None
        if self.decoder_loss == "leave_one_out":
            observed, evidence = z.flatten(), self._evidence(z, level).flatten()
        banned = None if self.propose_mask else self.noise.mask_token
        losses = head.cross_entropy(
            rows, weight, x.flatten(), cap=cap, observed=observed, evidence=evidence, banned=banned
        ).view_as(x)
        return losses if weights is None else losses * weights.to(losses.dtype)

    def _bound(self, logits: Tensor, x: Tensor, z: Tensor, level: Tensor, weights: Tensor) -> Tensor:
        """logits (m, V), the others (m, 1) → (m,)."""
        bound = nelbo.integrand(
            self.noise, logits[:, None], x, z, level, parametrisation=self.parametrisation, weights=weights
        )
        return bound[:, 0]

    def _bound_weights(self, x: Tensor, z: Tensor, level: Tensor) -> Tensor:
        """(B, K, C) float64."""
        if isinstance(self.noise, HybridNoise) and self.weights == "dynamic":
            # arXiv:2503.04482: masks 2, random tokens 1, and what was kept as little as the bound gives it.
            num_tokens = self.noise.vocab_size - 1
            kept = self.noise.uniform_rate(level) / (num_tokens * (1 - level))
            return torch.where(self.noise.masked(z), 2.0, torch.where(z == x, kept, 1.0)).clamp(max=self.max_weight)
        weights = nelbo.exact_weights(self.noise, x, z, level)
        return weights.clamp(max=self.max_weight) if self.weights == "clipped" else weights

    def _evidence(self, z: Tensor, level: Tensor) -> Tensor:
        """log(1 + Kα/(1 - α)): how much more likely z is seen where it stood; K is how many tokens noise draws from."""
        num_tokens = self.noise.vocab_size if self.allowed is None else len(set(self.allowed))
        evidence = torch.log1p(num_tokens * (1 - level) / level).clamp(max=_CERTAIN)
        allowed = self._allowed_mask(z.device)
        if allowed is None:
            return evidence
        return torch.where(allowed[z], evidence, _CERTAIN)

    def _allowed_mask(self, device: torch.device) -> Tensor | None:
        """(V,) bool; None: all."""
        return None if self.allowed is None else _mask_of(self.allowed, self.noise.vocab_size, device)

    def _causal_losses(self, model: DiffusionGemma, cut: Canvases, clean: CleanText | None) -> Tensor:
        """What each token's successor costs, (B, causal_len)."""
        targets = cut.tokens[:, 1 : cut.causal_len + 1]
        if clean is None:  # texts of one token
            return targets.float()
        rows, cap = clean.hidden[:, : cut.causal_len].flatten(0, 1), model.config.final_logit_softcapping
        return head.cross_entropy(rows, model.embed_tokens.weight, targets.flatten(), cap=cap).view_as(targets)


@cache
def _mask_of(ids: tuple[int, ...], vocab_size: int, device: torch.device) -> Tensor:
    """(V,) bool, made once: copying ids to a GPU waits for it."""
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, torch.tensor(ids), True).to(device)
