"""Self-distillation: slow runs of the same weights that were right are targets of the fast policy."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from dgemma.checks import Checked, Count, at_least
from dgemma.diffusion.decision import Decision
from dgemma.diffusion.law import Law, log_written
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState
from dgemma.run.recorded.steps import RecordedStep
from dgemma.run.recorded.trajectory import Trajectory
from dgemma.sampling.base import Sampler


@dataclass(frozen=True, kw_only=True)
class Teacher(Checked):
    """Slower runs for self-distillation in `PolicyGradient`.

    Each prompt gets `group` runs with `options`, which change those of the policy. Of the runs with a reward of at
    least `right`, every `every` steps are merged into one: the fast policy should write at once, on the canvas before
    them, what they wrote. The loss is the negative log-likelihood per written token, times `weight`.

    Example: `Teacher(options={"steps": 16}, every=8)` teaches two steps.
    """

    options: Mapping[str, Any]
    every: Count
    group: Count = 4
    weight: Annotated[float, at_least(0)] = 1.0
    right: float = 1.0


def merge_steps(trajectory: Trajectory, every: int) -> Trajectory:
    """Return a run that writes in one step what `trajectory` wrote in `every`.

    Every written token counts in its log-probability, also if a rule without chance chose it. A token that was written
    and renoised within the merged steps does not count.
    """
    plan, merged = trajectory.plan, []
    for block in range(len(trajectory.commits)):
        steps = [step for step in trajectory if step.block == block]
        parts = [steps[start : start + every] for start in range(0, len(steps), every)]
        merged += [_merge(part, index) for index, part in enumerate(parts)]
    # Later steps may write what top-k or top-p excludes in the first.
    knobs = replace(plan.knobs, sampler=_Given(), top_k=None, top_p=None)
    result = Trajectory(replace(plan, knobs=knobs, num_steps=-(-plan.num_steps // every)), top=0)
    result.steps, result.commits = merged, list(trajectory.commits)
    return result


def _merge(steps: list[RecordedStep], index: int) -> RecordedStep:
    first = steps[0]
    after = {name: getattr(first, name).clone() for name in ("next_canvas", "draft", "open", "done")}
    written, renoised = first.accepted.clone(), first.renoised.clone()
    for step in steps[1:]:
        rows = torch.isin(first.rows, step.rows)  # the others were done before
        for name, values in after.items():
            values[rows] = getattr(step, name)
        written[rows] = (written[rows] & ~step.renoised) | step.accepted
        renoised[rows] = (renoised[rows] & ~step.accepted) | step.renoised
    return replace(first, index=index, accepted=written, renoised=renoised, **after)


@dataclass(frozen=True)
class _Given(Sampler):
    """The law of written tokens, whichever rule chose them and their positions."""

    def law(self, prediction: Prediction, state: DenoiseState, decision: Decision) -> Law:
        written = log_written(prediction, decision.tokens, decision.write & ~state.frozen)
        return Law(written, torch.ones_like(state.done))


def negative_log_likelihood(log_prob: Tensor, trajectory: Trajectory, right: Tensor) -> Tensor:
    """Return the mean per written token of the `right` runs (B, G) of each prompt, (B,); 0 if there are none.

    log_prob (B·G,) are those of the merged runs.
    """
    written = trajectory.array("accepted").sum((0, 2)).to(log_prob)
    nats, tokens = (torch.where(right, values.view(right.shape), 0.0).sum(1) for values in (-log_prob, written))
    return nats / tokens.clamp(min=1)
