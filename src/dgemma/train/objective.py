"""The training objective: a denoising loss over canvases plus the causal loss of the same weights.

The defaults are the published loss: unweighted cross-entropy at every position of a canvas, plus
next-token cross-entropy. Where public recipes differ, there is a field; `recipes` has their settings. The likelihood
bounds in nelbo.py can be used as losses: MDLM's and LLaDA's for mask noise, Duo's for uniform and GIDD's for hybrid
noise. All work over blocks, as in BD3-LM.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from dgemma.checks import check_count, check_probability, check_size, check_types, require_field
from dgemma.diffusion.noise import HybridNoise, MaskNoise, Noise
from dgemma.model.attention import Mask
from dgemma.model.diffusion import DiffusionGemma
from dgemma.train import head, nelbo
from dgemma.train.batch import TrainBatch
from dgemma.train.canvases import (
    Canvases,
    NoisyCanvases,
    cut_canvases,
    cut_holes,
    draw_choice,
    noise_canvases,
)
from dgemma.train.one_pass import (
    AttentionKind,
    canvas_masks,
    canvas_positions,
    embed_canvases,
    predict_canvases,
    read_clean,
    text_masks,
    text_positions,
)
from dgemma.train.together import TogetherPass, Tokens, can_run_together

_CERTAIN = 1e4  # the largest evidence (`_evidence`): the softmax is one-hot, and values stay finite


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
    The shares of all micro-batches and processes add up to the loss of the batch.
    """

    def __call__(self, model: DiffusionGemma, batch: TrainBatch, *, seeds: Tensor) -> Terms: ...
    def total_counts(self, batch: TrainBatch, seeds: Tensor) -> Mapping[str, Tensor]: ...
    def reduce(self, terms: Terms, totals: Mapping[str, Tensor] | None = None) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss as a value: `objective(model, batch, seeds=...)` returns its terms, `reduce` returns the scalar loss.

    All draws are functions of each row's seed, so a row's terms do not depend on its batch.

    Example: `objective = Objective(noise=UniformNoise(512), canvas_len=32)`;
    `objective.reduce(objective(model, batch, seeds=torch.arange(8))).backward()`.
    """

    noise: Noise
    canvas_len: int
    fill_token: int = 1  # end-of-text, after the end of an answer
    # Per row: "one" canvas, drawn uniformly among those with text, or "all", in one pass.
    canvases: Literal["one", "all"] = "one"
    t_range: tuple[float, float] = (1e-4, 1 - 1e-4)  # range of the time t, drawn uniformly per canvas
    # To train one network for two noises: each canvas gets `masks` instead of `noise` with probability `masks_prob`.
    # Such a canvas is scored where it is masked.
    masks: MaskNoise | None = None
    masks_prob: float = 0.5
    holes_prob: float = 0.0  # probability that a canvas is frozen except for holes, to train infilling
    allowed: tuple[int, ...] | None = None  # the ids that uniform noise and self-conditioning are restricted to

    # The decoder's term: "cross_entropy" of the clean tokens; "leave_one_out", the same for logits that mean
    # p(x | z without this position); or "nelbo", the exact bound for logits as in `parametrisation`.
    decoder_loss: Literal["cross_entropy", "leave_one_out", "nelbo"] = "cross_entropy"
    parametrisation: nelbo.Parametrisation = "mean"
    # Weights of the bound. GIDD trains with weights "clipped" at `max_weight`, or "dynamic" ones.
    weights: Literal["exact", "clipped", "dynamic"] = "exact"
    max_weight: float = 2.0
    scored: Literal["all", "noised"] = "all"  # positions under cross-entropy: "all", or only those that were "noised"
    propose_mask: bool = False  # whether the mask token is in the softmax (LLaDA) or not (MDLM's SUBS)
    decoder_weight: float = 1.0

    self_cond_prob: float = 0.5  # probability that a canvas sees the prediction of a first, detached pass
    # The input of the other canvases: "zero_signal" is zeros, "zero_logits" is the mean embedding.
    self_cond_off: Literal["zero_signal", "zero_logits"] = "zero_signal"

    causal_weight: float = 1.0
    causal_scope: Literal["sequence", "answer"] = "sequence"  # prompt and answer, or only the "answer"
    causal_fill: bool = True  # whether the causal term scores the fill

    # The fill after a truncated answer is "scored" or "unscored", or the whole row is "rejected".
    truncated: Literal["scored", "unscored", "rejected"] = "scored"
    # "global": the mean over all tokens of a step. "process", "micro_batch" or "example" (a row): the mean over the
    # tokens of each one, then the mean of these means.
    reduction: Literal["example", "micro_batch", "process", "global"] = "global"
    attention: AttentionKind = "dense"  # or "blocks", which skips masked keys, for long rows on a GPU

    def __post_init__(self) -> None:
        if isinstance(self.t_range, list):
            object.__setattr__(self, "t_range", tuple(self.t_range))
        check_types(self)
        check_count(self, "canvas_len", fix="Use the model's canvas_length.")
        require_field(len(self.t_range) == 2, self, "t_range", "be two numbers")
        low, high = self.t_range
        if not 0 <= low <= high <= 1:
            raise ValueError(
                f"Objective.t_range must satisfy 0 <= low <= high <= 1, got {self.t_range}. Use (1e-4, 1 - 1e-4)."
            )
        check_probability(self, "self_cond_prob", fix="Use 0.5, as published.")
        check_probability(self, "holes_prob", fix="Use 0 to noise every token.")
        check_probability(self, "masks_prob", fix="Use 0.5 for equally many canvases of each noise.")
        for name in ("decoder_weight", "causal_weight"):
            check_size(self, name, fix="Use 0 to leave the term out.")
        if not self.decoder_weight and not self.causal_weight:
            raise ValueError("Objective.decoder_weight or causal_weight must be > 0, got 0 for both. Set one of them.")
        check_size(self, "max_weight", above=0, fix="Use 2.0, as in GIDD.")
        self._check_loss()

    def _check_loss(self) -> None:
        """Raise ValueError if the noise has no formula for the loss, or if a field is set that the loss ignores."""
        is_bound = self.decoder_loss == "nelbo"
        if self.decoder_loss != "cross_entropy":
            nelbo.check_process(self.noise)
        if self.weights != "exact" and not is_bound:
            raise ValueError(
                f"Objective.weights must be 'exact' for decoder_loss {self.decoder_loss!r}, got {self.weights!r}. Use "
                "decoder_loss='nelbo' for weights."
            )
        if self.parametrisation != "mean" and (not is_bound or self.noise.kind == "mask"):
            raise ValueError(
                f"Objective.parametrisation must be 'mean' except for bounds of uniform and hybrid noise, got "
                f"{self.parametrisation!r}. For leave-one-out cross-entropy, use decoder_loss='leave_one_out'."
            )
        if self.propose_mask and (self.noise.mask_token is None or (is_bound and self.noise.kind == "hybrid")):
            raise ValueError(
                f"Objective.propose_mask must be False with decoder_loss {self.decoder_loss!r} and {self.noise!r}, got "
                "True. Leave it out."
            )
        if self.weights == "dynamic" and self.noise.kind != "hybrid":
            raise ValueError(
                f"Objective.noise must be HybridNoise with weights 'dynamic', got {self.noise!r}. Use weights='exact'."
            )
        if self.decoder_loss == "leave_one_out" and self.noise.kind != "uniform":
            raise ValueError(
                f"Objective.noise must be UniformNoise with decoder_loss 'leave_one_out', got {self.noise!r}. Use "
                "'cross_entropy', which is the same loss under mask noise."
            )
        if is_bound and self.scored == "noised":
            raise ValueError(
                "Objective.scored must be 'all' with decoder_loss 'nelbo', got 'noised'. The bound has its own weights."
            )
        if self.masks is not None:
            self._check_masks(self.masks)
        if self.allowed is None:
            return
        object.__setattr__(self, "allowed", tuple(self.allowed))
        if not self.allowed or not all(0 <= token < self.noise.vocab_size for token in self.allowed):
            raise ValueError(
                f"Objective.allowed must be ids in [0, {self.noise.vocab_size}), got {self.allowed}. Use None for all."
            )
        if is_bound and self.noise.kind != "mask":
            raise ValueError(
                "Objective.allowed must be None with the bounds of uniform and hybrid noise, got ids. These bounds are "
                "over the whole vocabulary. Use a model whose vocabulary is the allowed set."
            )

    def _check_masks(self, masks: MaskNoise) -> None:
        if self.decoder_loss != "cross_entropy" or self.noise.kind != "uniform":
            raise ValueError(
                f"Objective.masks must be None except for the cross-entropy of uniform noise, got {masks!r} with "
                f"{self.noise!r} and decoder_loss {self.decoder_loss!r}. Leave it out."
            )
        if masks.vocab_size != self.noise.vocab_size:
            raise ValueError(
                f"Objective.masks must have the {self.noise.vocab_size} tokens of Objective.noise, got {masks!r}. Make "
                "both with config.vocab_size."
            )

    def __call__(self, model: DiffusionGemma, batch: TrainBatch, *, seeds: Tensor) -> Terms:
        """Return the terms of B rows; seeds (B,) are the only randomness.

        Example: `objective(model, batch, seeds=torch.arange(batch.batch_size)).sums["decoder"]`.
        """
        if self.noise.vocab_size != model.config.vocab_size:
            raise ValueError(
                f"Objective.noise must cover the model's {model.config.vocab_size} tokens, got {self.noise!r}. "
                "Make the noise with config.vocab_size."
            )
        canvases = self._cut(batch, seeds)
        canvases.check_positions(model.config.max_position_embeddings)
        sums, counts = {}, {}
        noisy = self._noise(canvases, seeds) if self.decoder_weight else None
        text_hidden, hidden = self._run(model, canvases, noisy)
        if noisy is not None and hidden is not None:
            scored = self._decoder_scored(canvases, noisy)
            losses = self._decoder_losses(model, canvases, noisy, hidden)
            sums["decoder"], counts["decoder"] = torch.where(scored, losses, 0.0).sum((1, 2)), scored.sum((1, 2))
        if self.causal_weight:
            scored, losses = canvases.causal_scored, self._causal_losses(model, canvases, text_hidden)
            sums["causal"], counts["causal"] = torch.where(scored, losses, 0.0).sum(1), scored.sum(1)
        return Terms(sums=sums, counts=counts)

    def total_counts(self, batch: TrainBatch, seeds: Tensor) -> dict[str, Tensor]:
        """Return what these rows add to the totals of the step, before any forward.

        "decoder" and "causal" count scored positions. "decoder_rows" and "causal_rows" count rows with scored
        positions. "micro_batches" is 1.

        Example: `objective.reduce(terms, totals)`, where totals are sums of this over micro-batches and processes.
        """
        canvases = self._cut(batch, seeds)
        one = torch.ones((), dtype=torch.int64, device=seeds.device)
        scored = {}
        if self.decoder_weight:
            needs_noise = self.scored == "noised" or self.masks is not None
            scored["decoder"] = (
                self._decoder_scored(canvases, self._noise(canvases, seeds)) if needs_noise else canvases.scored
            )
        if self.causal_weight:
            scored["causal"] = canvases.causal_scored
        counts = {"micro_batches": one}
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

    def _cut(self, batch: TrainBatch, seeds: Tensor) -> Canvases:
        if seeds.shape != batch.length.shape:  # a single seed would broadcast, and all rows would get the same noise
            raise ValueError(
                f"Objective seeds must have shape ({batch.batch_size},), one per row, got {tuple(seeds.shape)}. Use "
                "`row_seeds` to make them."
            )
        canvases = cut_canvases(
            batch,
            canvas_len=self.canvas_len,
            fill_token=self.fill_token,
            choose=draw_choice(seeds) if self.canvases == "one" else None,
            truncated=self.truncated,
            causal_scope=self.causal_scope if self.causal_weight else None,
            causal_fill=self.causal_fill,
        )
        return cut_holes(canvases, seeds, self.holes_prob) if self.holes_prob else canvases

    def _noise(self, canvases: Canvases, seeds: Tensor) -> NoisyCanvases:
        return noise_canvases(
            self.noise,
            canvases,
            seeds,
            t_range=self.t_range,
            self_cond_prob=self.self_cond_prob,
            masks=self.masks,
            masks_prob=self.masks_prob,
            allowed=self._allowed_mask(seeds.device),
        )

    def _decoder_scored(self, canvases: Canvases, noisy: NoisyCanvases) -> Tensor:
        if self.scored == "noised":
            return canvases.scored & noisy.replaced
        return canvases.scored & (noisy.replaced | ~noisy.masked[..., None])

    def _run(
        self, model: DiffusionGemma, canvases: Canvases, noisy: NoisyCanvases | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the last hidden states of the text (B, T, D) and of the canvases (B, K, C, D).

        The text is read as far as a canvas sees it or the causal term scores it.
        """
        num_seen = 0 if noisy is None else canvases.prefix_len
        tokens = canvases.tokens[:, : max(num_seen, canvases.causal_len)]
        documents = None if canvases.documents is None else canvases.documents[:, : tokens.shape[1]]
        if noisy is not None and num_seen and self.self_cond_prob and can_run_together(model):
            masks = text_masks(model, tokens, documents=documents, attention=self.attention)
            return self._run_together(model, tokens, masks, canvases, noisy)
        clean = None
        if tokens.shape[1]:
            clean = read_clean(model, tokens, documents=documents, attention=self.attention)
        text_hidden = None if clean is None else clean.hidden
        if noisy is None:
            return text_hidden, None
        seen = None if clean is None else clean.first(num_seen)
        masks, level = self._canvas_masks(model, canvases), _level(model, canvases, noisy)

        def predict(signal: Tensor | None) -> Tensor:
            return predict_canvases(model, noisy.z, canvases.starts, seen, masks, signal=signal, noise_level=level)

        return text_hidden, predict(self._signal(model, noisy, predict))

    def _run_together(
        self,
        model: DiffusionGemma,
        tokens: Tensor,
        masks: list[Mask | None],
        canvases: Canvases,
        noisy: NoisyCanvases,
    ) -> tuple[Tensor, Tensor]:
        noisy_masks = self._canvas_masks(model, canvases, canvases_first=True)
        of_canvases = Tokens(canvas_positions(canvases.starts, self.canvas_len), noisy_masks)
        run = TogetherPass(model, Tokens(text_positions(tokens), masks), of_canvases, canvases.prefix_len)
        text, level = model.embed(tokens), _level(model, canvases, noisy)

        def predict(signal: Tensor | None) -> Tensor:
            first = run.read_and_denoise(text, embed_canvases(model, noisy.z, signal, level))
            return first.view(*noisy.z.shape, -1)

        signal = self._signal(model, noisy, predict)
        text_hidden, hidden = run.denoise_again(text, embed_canvases(model, noisy.z, signal, level))
        return text_hidden, hidden.view(*noisy.z.shape, -1)

    def _canvas_masks(
        self, model: DiffusionGemma, canvases: Canvases, *, canvases_first: bool = False
    ) -> list[Mask | None]:
        return canvas_masks(
            model,
            canvases.starts,
            self.canvas_len,
            canvases.prefix_len,
            documents=canvases.packing,
            aligned=canvases.aligned,
            attention=self.attention,
            canvases_first=canvases_first,
        )

    def _signal(
        self, model: DiffusionGemma, noisy: NoisyCanvases, predict: Callable[[Tensor | None], Tensor]
    ) -> Tensor | None:
        """Return the self-conditioning signal (B, K, C, D) from a first pass, whose hidden states `predict` returns."""
        off = None
        if self.self_cond_off == "zero_logits":
            mean = model.soft_embedding(model.embed_tokens.weight.new_zeros(1, 1, model.config.vocab_size))
            off = mean.expand(*noisy.z.shape, -1)
        if not self.self_cond_prob:
            return off
        with torch.no_grad():
            first = predict(off)
        proposable = self.noise.proposable(self._allowed_mask(first.device), first.device)  # as in `generate`
        signal = head.soft_embedding(model, first, allowed=proposable)
        return torch.where(noisy.self_cond[..., None, None], signal, 0.0 if off is None else off)

    def _decoder_losses(
        self, model: DiffusionGemma, canvases: Canvases, noisy: NoisyCanvases, hidden: Tensor
    ) -> Tensor:
        """Return the loss of each position, (B, K, C)."""
        weight, cap = model.embed_tokens.weight, model.config.final_logit_softcapping
        x, z, level = canvases.x, noisy.z, noisy.level[..., None].expand(canvases.x.shape)  # (B, K, C)
        rows = hidden.flatten(0, 2)
        weights = self._bound_weights(x, z, level) if self.decoder_loss == "nelbo" else None
        if weights is not None and self.noise.kind != "mask":
            tokenwise = (t.reshape(-1, 1) for t in (x, z, level, weights))
            return head.map_logits(self._bound, rows, weight, *tokenwise, cap=cap).view_as(x)
        observed = evidence = None
        if self.decoder_loss == "leave_one_out":
            observed, evidence = z.flatten(), self._evidence(z, level).flatten()
        banned = None if self.propose_mask else self.noise.mask_token
        losses = head.cross_entropy(
            rows, weight, x.flatten(), cap=cap, observed=observed, evidence=evidence, banned=banned
        ).view_as(x)
        return losses if weights is None else losses * weights.to(losses.dtype)

    def _bound(self, logits: Tensor, x: Tensor, z: Tensor, level: Tensor, weights: Tensor) -> Tensor:
        """Return the bound of each position, (m,). logits are (m, V); x, z, level and weights are (m, 1)."""
        bound = nelbo.integrand(
            self.noise, logits[:, None], x, z, level, parametrisation=self.parametrisation, weights=weights
        )
        return bound[:, 0]

    def _bound_weights(self, x: Tensor, z: Tensor, level: Tensor) -> Tensor:
        """Return the weights of the bound, (B, K, C) float64."""
        if isinstance(self.noise, HybridNoise) and self.weights == "dynamic":
            # arXiv:2503.04482: the weight is 2 for masks, 1 for random tokens, and c / (N·(1 - t)) for clean tokens.
            # Here c is `uniform_rate`, N the number of tokens except the mask, and t the noise level.
            num_tokens = self.noise.vocab_size - 1
            clean = self.noise.uniform_rate(level) / (num_tokens * (1 - level))
            return torch.where(self.noise.masked(z), 2.0, torch.where(z == x, clean, 1.0)).clamp(max=self.max_weight)
        weights = nelbo.exact_weights(self.noise, x, z, level)
        return weights.clamp(max=self.max_weight) if self.weights == "clipped" else weights

    def _evidence(self, z: Tensor, level: Tensor) -> Tensor:
        """Return what the noisy token z adds to the logit of x = z: log(1 + nα/(1 - α)).

        n is the number of tokens that noise draws from, and α = 1 - level.
        """
        num_tokens = self.noise.vocab_size if self.allowed is None else len(set(self.allowed))
        evidence = torch.log1p(num_tokens * (1 - level) / level).clamp(max=_CERTAIN)
        allowed = self._allowed_mask(z.device)
        if allowed is None:
            return evidence
        return torch.where(allowed[z], evidence, _CERTAIN)

    def _allowed_mask(self, device: torch.device) -> Tensor | None:
        """Return the allowed tokens, (V,) bool; None for all."""
        return None if self.allowed is None else _mask_of(self.allowed, self.noise.vocab_size, device)

    def _causal_losses(self, model: DiffusionGemma, canvases: Canvases, hidden: Tensor | None) -> Tensor:
        """Return the loss of each token's successor, (B, causal_len)."""
        targets = canvases.tokens[:, 1 : canvases.causal_len + 1]
        if hidden is None:  # texts of one token
            return targets.float()
        rows, cap = hidden[:, : canvases.causal_len].flatten(0, 1), model.config.final_logit_softcapping
        return head.cross_entropy(rows, model.embed_tokens.weight, targets.flatten(), cap=cap).view_as(targets)


def _level(model: DiffusionGemma, canvases: Canvases, noisy: NoisyCanvases) -> Tensor | None:
    """Return the noise level of each position (B, K, C), 0 for frozen tokens; None if the model takes no level."""
    return torch.where(canvases.frozen, 0.0, noisy.level[..., None]) if model.takes_noise_level else None


@cache
def _mask_of(ids: tuple[int, ...], vocab_size: int, device: torch.device) -> Tensor:
    """Return a mask (V,) bool; cached, because copying the ids to a GPU makes the host wait."""
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, torch.tensor(ids), True).to(device)
