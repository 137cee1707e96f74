"""Policy gradients: reward and few forwards in one gradient, from groups of runs (GRPO, arXiv:2402.03300).

A run is a sequence of decisions, and every sampler has the exact law of its decisions. So the ratio of two policies is
exact, per canvas (GSPO, arXiv:2507.18071), and no bound stands in for it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import Count, above, at_least, check_rules, require
from dgemma.model.denoiser import Denoiser
from dgemma.model.diffusion import DiffusionGemma
from dgemma.train.batch import TrainBatch
from dgemma.train.learning.problems import Problems
from dgemma.train.learning.rewards import Reward
from dgemma.train.learning.runs import Runs, choose_steps, roll_out, sum_canvases
from dgemma.train.learning.teacher import Teacher, merge_steps, negative_log_likelihood
from dgemma.train.lora import start_weights
from dgemma.train.objective import Terms
from dgemma.train.optimizer import other_weights

_MOST_LOG_RATIO = 10.0
_LEAST_LOG_PROB = -1e6  # of a step: other weights may exclude a token from top-k or top-p, and -inf minus -inf is NaN

Advantage = Literal["z", "leave_one_out"]


@dataclass(kw_only=True, eq=False)
class PolicyGradient:
    """Reward for right texts and for few forwards, as an objective of `train`; its source is `problems`.

    Each prompt gets `group` runs of the present weights. The advantage of a run is z(reward) + speed_weight ·
    z(-forwards), both normalised within the group. A group without spread has the advantage 0, and a micro-batch of
    such groups takes no gradient pass. The loss of a run is the sum over its canvases of -min(r A, clip(r) A). Here r
    is the ratio of the canvas's probability under the present weights to that under the weights that made the run.
    It is 1 in the first of the `problems.updates` steps that share the runs.

    Rules that are not random count as given: the gradient is that of what was drawn. So only a sampler whose positions
    are drawn, too, learns its order.

    - options: those of `generate` for the runs, such as max_new_tokens, steps, sampler, temperature and stop.
    - advantage: "z", or "leave_one_out": the reward minus the mean of the group's others. With it, the gradient is that
      of the expected reward - speed_weight · forwards, without bias.
    - kl_weight: of the estimate exp(d) - 1 - d per step, d = log(q_start / q), whose mean is the KL divergence from the
      start. Canvases that top-k or top-p exclude under the present weights are left out; "run/excluded" is their share.
      `reference` has the start weights; with adapters, the default is the model without them.
    - num_steps: the gradient takes so many random steps of the runs of a micro-batch, weighted so that it stays
      unbiased. None: all.
    - through_self_cond: gradients through the predictions that steps pass on. Without, the gradient is biased, but
      takes less memory: with `num_steps`, only that of the chosen steps.
    - teacher: slower runs of the present weights; those that were right are targets, in the same gradient.
    - policy_weight: 0 learns from the teacher alone.
    - engine: makes the denoiser that generates the runs from the model, such as a batch-invariant accelerated copy.
      Their probabilities always come from the model itself.

    Example: `train(model, PolicyGradient(problems=problems, reward=rewards.numeric, tokenizer=tokenizer), problems,
    TrainConfig(steps=100, batch_size=problems.batch_size, lr=1e-6), out="run")`.
    """

    problems: Problems
    reward: Reward
    tokenizer: Tokenizer
    options: Mapping[str, Any] = field(default_factory=dict)
    group: Annotated[int, at_least(2)] = 8  # advantages compare the runs of a group
    speed_weight: Annotated[float, at_least(0)] = 0.0
    advantage: Advantage = "z"
    clip: Annotated[float, above(0)] = 0.2
    kl_weight: Annotated[float, at_least(0)] = 0.0
    reference: DiffusionGemma | None = field(default=None, repr=False)
    num_steps: Count | None = None
    through_self_cond: bool = True
    teacher: Teacher | None = None
    policy_weight: Annotated[float, at_least(0)] = 1.0
    engine: Callable[[DiffusionGemma], Denoiser] | None = field(default=None, repr=False)
    _earlier: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)  # the weights that make the runs
    _present: Mapping[str, nn.Parameter] = field(default_factory=dict, init=False, repr=False)
    _kept: dict[tuple[int, ...], tuple[Runs, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_rules(self)

    def __call__(self, model: DiffusionGemma, batch: TrainBatch, *, seeds: Tensor) -> Terms:
        """Return the terms of B prompts. Their runs depend on `problems` and the weights, `seeds` choose steps."""
        runs, old = self._runs(model, batch)
        advantages = self.advantages(runs)  # (B, G)
        zeros = torch.zeros(batch.batch_size, dtype=torch.float64, device=model.device)
        sums = {"policy": zeros, "run/ratio": zeros + 1, "run/clipped": zeros, "run/excluded": zeros}
        if (self.policy_weight and bool(advantages.any())) or self.kl_weight:
            of_runs = self._losses(model, runs, advantages.flatten(), old, seeds[0])
            sums |= {name: values.view(-1, self.group).mean(1) for name, values in of_runs.items()}
        else:
            no_gradient = sum(weight.sum() * 0.0 for weight in model.parameters() if weight.requires_grad)
            sums["policy"] = zeros + no_gradient
        if self.teacher is not None:
            sums |= self._teach(model, batch, self.teacher)
        sums["run/reward"], sums["run/forwards"] = runs.rewards.mean(1), runs.forwards.mean(1)
        sums["run/entropy"], sums["run/spread"] = runs.entropy, (advantages != 0).any(1).double()
        return Terms(sums=sums, counts=dict.fromkeys(sums, torch.ones_like(zeros)))

    def total_counts(self, batch: TrainBatch, seeds: Tensor) -> dict[str, Tensor]:
        return {"policy": torch.ones_like(seeds).sum()}

    def reduce(self, terms: Terms, totals: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the mean over prompts and runs."""
        weights = {"policy": self.policy_weight, "kl": self.kl_weight}
        if self.teacher is not None:
            weights["teacher"] = self.teacher.weight
        total = torch.stack([weights[name] * terms.sums[name].sum() for name in weights if name in terms.sums]).sum()
        if totals is None:
            return total / terms.counts["policy"].sum()
        # With fewer rows, `problems` would skip prompts in silence.
        rule, num_prompts = f"equal Problems.batch_size {self.problems.batch_size}", int(totals["policy"])
        require(num_prompts == self.problems.batch_size, "TrainConfig.batch_size", rule, num_prompts)
        return total / num_prompts

    def advantages(self, runs: Runs) -> Tensor:
        """Return the advantage of each run, (B, G)."""
        return self._relative(runs.rewards) + self.speed_weight * self._relative(-runs.forwards)

    def _relative(self, scores: Tensor) -> Tensor:
        """Return scores (B, G) relative to their group."""
        centred = scores - scores.mean(1, keepdim=True)
        centred = torch.where(scores.amax(1, keepdim=True) == scores.amin(1, keepdim=True), 0.0, centred)
        if self.advantage == "leave_one_out":
            return centred * (scores.shape[1] / (scores.shape[1] - 1))
        deviation = centred.square().mean(1, keepdim=True).sqrt()
        return centred / torch.where(deviation == 0, 1.0, deviation)

    def _losses(
        self, model: DiffusionGemma, runs: Runs, advantages: Tensor, old: Tensor | None, seed: Tensor
    ) -> dict[str, Tensor]:
        """Return of each run (R,): the loss, the mean ratio and clip fraction of its canvases, and the KL estimate."""
        blocks = runs.blocks
        weights = choose_steps(len(blocks), self.num_steps, seed)
        log_probs = self._score(model, runs, with_grad=self._with_grad(weights, blocks))  # (S, R)
        values = log_probs.detach()  # weights change only the gradient
        canvases = sum_canvases(values + weights[:, None] * (log_probs - values), blocks)
        log_ratio = canvases - (canvases.detach() if old is None else old)
        ratio = log_ratio.clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - self.clip, 1 + self.clip) * advantages)
        taken = sum_canvases(runs.trajectory.present.to(weights), blocks) > 0  # (blocks, R)
        share = taken / taken.sum(0)
        excluded = sum_canvases((values <= _LEAST_LOG_PROB).double(), blocks) > 0
        is_clipped = ((ratio - 1) * advantages.sign() > self.clip).double()
        terms = {
            "policy": -torch.where(taken, surrogate, 0.0).sum(0),
            "run/ratio": (share * ratio.detach()).sum(0),
            "run/clipped": (share * is_clipped).sum(0),
            "run/excluded": (share * excluded).sum(0),
        }
        if self.kl_weight:
            with torch.no_grad(), start_weights(model, self.reference, "PolicyGradient.reference") as start:
                difference = self._score(start, runs)
            difference = (difference - log_probs).clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO)
            estimate = difference.exp() - 1 - difference
            # The present weights never write an excluded canvas, so it says nothing about their divergence.
            terms["kl"] = (weights[:, None] * torch.where(excluded[blocks], 0.0, estimate)).sum(0)
        return terms

    def _teach(self, model: DiffusionGemma, batch: TrainBatch, teacher: Teacher) -> dict[str, Tensor]:
        """Return the loss of the teacher's right runs for each prompt, and their share, (B,)."""
        runs = self._roll_out(model, batch, slice(self.group, self.group + teacher.group), teacher.options)
        right = runs.rewards >= teacher.right
        sums = {"teacher": torch.zeros_like(runs.rewards[:, 0]), "run/taught": right.double().mean(1)}
        if bool(right.any()):
            merged = merge_steps(runs.trajectory, teacher.every)
            log_prob = merged.log_prob(model, strict=False, through_self_cond=self.through_self_cond)
            sums["teacher"] = negative_log_likelihood(log_prob, merged, right)
        return sums

    def _with_grad(self, weights: Tensor, blocks: Tensor) -> list[bool]:
        """Return which steps need gradients: the chosen ones, and those whose prediction reaches a chosen one."""
        needed = weights > 0
        if self.through_self_cond:
            later = torch.arange(len(blocks), device=blocks.device)
            reaches = (blocks[:, None] == blocks) & (later[:, None] <= later)
            needed = (reaches & needed).any(1)
        return needed.tolist()

    def _score(self, model: DiffusionGemma, runs: Runs, with_grad: list[bool] | None = None) -> Tensor:
        """Return the log-probabilities of each step's decisions, (S, R)."""
        log_probs = runs.trajectory.step_log_probs(
            model, strict=False, through_self_cond=self.through_self_cond, with_grad=with_grad
        )
        return log_probs.clamp(min=_LEAST_LOG_PROB)

    def _runs(self, model: DiffusionGemma, batch: TrainBatch) -> tuple[Runs, Tensor | None]:
        """Return the runs, and the log-probabilities of their canvases under earlier weights (blocks, R), or None."""
        assert batch.text is not None, "the source must be PolicyGradient.problems"
        if self.problems.updates == 1:
            return self._roll_out(model, batch, slice(self.group)), None
        key = tuple(batch.text.tolist())
        if key not in self._kept:
            with other_weights(self._present, self._earlier), torch.no_grad():
                runs = self._roll_out(model, batch, slice(self.group))
                self._kept[key] = runs, sum_canvases(self._score(model, runs), runs.blocks)
        return self._kept[key]

    def _roll_out(
        self, model: DiffusionGemma, batch: TrainBatch, copies: slice, changes: Mapping[str, Any] | None = None
    ) -> Runs:
        """Return the runs with these numbers (`copies`) of each prompt, with changed options."""
        assert batch.spans is not None
        assert batch.text is not None
        numbers = batch.text.cpu()
        return roll_out(
            model if self.engine is None else self.engine(model),
            [tokens[:length] for tokens, (_, length) in zip(batch.tokens, batch.spans, strict=True)],
            [self.problems.answers[place] for place in self.problems.places(numbers)],
            self.problems.run_seeds(numbers, copies.stop)[:, copies],
            reward=self.reward,
            tokenizer=self.tokenizer,
            options={**self.options, **(changes or {})},
        )

    def begin(self, step: int, weights: Mapping[str, nn.Parameter]) -> None:
        """Keep the weights that make the runs of the next `problems.updates` steps. `train` calls this."""
        num_processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        # Processes whose runs differ in length would wait for each other's sharded weights for ever.
        require(num_processes == 1, "PolicyGradient", "train in one process", num_processes)
        self._present = weights
        if self.problems.updates > 1 and step % self.problems.updates == 0:
            self._kept.clear()
            self._earlier = {name: weight.detach().clone() for name, weight in weights.items()}

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs: runs are generated again from the earlier weights."""
        return {f"earlier.{name}": weight for name, weight in self._earlier.items()}
