"""Gibbs corrector for uniform diffusion: resample positions given all others (arXiv:2605.22765)."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from dgemma.checks import Checked, Count, at_least
from dgemma.diffusion import draws
from dgemma.diffusion.decision import transition
from dgemma.diffusion.law import log_transition, safe_log
from dgemma.sampling.base import Decision, DenoiseState, Law, Prediction, Sampler
from dgemma.sampling.ranking import best, is_choice, log_gumbel_choice, log_random_choice


@dataclass(frozen=True, kw_only=True)
class LeaveOneOutGibbs(Sampler, Checked):
    """Take ancestral steps. Between two of them, `corrections` steps correct the canvas at its noise level.

    A correction picks `num_positions` positions, and redraws the token of each from
    α·p(x | the other positions) + (1 - α)·uniform. If one position is picked at random, the distribution of the canvas
    at its noise level stays. If several positions are picked, or if the choice depends on the tokens, it changes.

    choice_temperature: None picks at random. With a number, the positions with the smallest margin are picked. The
    margin is the log-probability of the token on the canvas minus that of the best other token. Gumbel noise,
    multiplied by this number, is added to the ranking.

    Every step is a forward. Of N steps about N/(corrections + 1) are ancestral, including the first and the last; these
    divide the time of the schedule into equal parts. The state's `memory` is the noise level of the canvas, (B,).

    Example: `LeaveOneOutGibbs(corrections=2)` with `noise=UniformNoise(vocab_size)`.
    """

    corrections: Count = 2
    num_positions: Count = 1
    choice_temperature: Annotated[float, at_least(0)] | None = None
    parametrisation: Literal["mean", "loo"] = "mean"
    valid_for: ClassVar[frozenset[str]] = frozenset({"uniform"})
    redecides: ClassVar[frozenset[str]] = frozenset({"uniform"})
    stops_when_certain: ClassVar[bool] = False  # p(x0 | z) is confident because it sees the token itself

    def start(self, state: DenoiseState) -> Tensor:
        return state.noise_level

    def noise_level(self, state: DenoiseState) -> Tensor:
        return state.memory

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        predicts, next_level = self.clock(state)  # (B,)
        mean, loo = self._mean_and_loo(prediction, state)
        u = state.uniform("token")
        tokens = torch.where(predicts[:, None], mean.sample(u), loo.sample(u))

        ancestral = transition(tokens, replace(state, noise_level=state.memory, next_noise_level=next_level))
        picked = self._pick(loo, state)
        clean = state.uniform("event") < 1 - state.memory[:, None]
        row = predicts[:, None]
        return Decision(
            tokens=tokens,
            write=torch.where(row, ancestral.write, picked & clean),
            renoise=torch.where(row, ancestral.renoise, picked & ~clean),
            memory=next_level,
        )

    def law(self, prediction: Prediction, state: DenoiseState, decision: Decision) -> Law:
        predicts, next_level = self.clock(state)
        mean, loo = self._mean_and_loo(prediction, state)
        at_level = replace(state, noise_level=state.memory, next_noise_level=next_level)
        ancestral = log_transition(mean, at_level, decision)
        picked, level = decision.write | decision.renoise, state.memory[:, None]
        written = safe_log(1 - level) + loo.log_prob(decision.tokens).double()
        redrawn = torch.where(decision.write, written, torch.where(decision.renoise, safe_log(level), 0.0)).sum(-1)
        choice, agrees = self._choice(loo, state, picked)
        return Law(torch.where(predicts, ancestral, redrawn + choice), agrees | predicts, next_level)

    def _mean_and_loo(self, prediction: Prediction, state: DenoiseState) -> tuple[Prediction, Prediction]:
        noise, level = state.noise, state.memory
        if self.parametrisation == "mean":
            return prediction, Prediction(noise.to_loo(prediction.logits, state.canvas, level, allowed=state.allowed))
        mean = prediction.revised(lambda logits: noise.to_mean(logits, state.canvas, level, allowed=state.allowed))
        if prediction.joint is None:
            return mean, prediction
        return mean, Prediction(noise.to_loo(mean.logits, state.canvas, level, allowed=state.allowed))

    def clock(self, state: DenoiseState) -> tuple[Tensor, Tensor]:
        """Return which rows take an ancestral step now, and the noise level of each row after the step; both (B,)."""
        cycle = self.corrections + 1
        remaining = state.num_steps - 1 - state.step
        predicts = (state.step == 0) | (remaining % cycle == 0)
        still_to_come = (remaining + self.corrections) // cycle
        num_ancestral = 1 + (state.num_steps - 1 + self.corrections) // cycle
        reached = 1 - state.noise.schedule.alpha(still_to_come.double() / num_ancestral)
        # The last step ends at level 0, even if the schedule does not reach it.
        reached = torch.where(still_to_come > 0, reached, 0.0)
        return predicts, torch.where(predicts, reached, state.memory)

    def final(self, prediction: Prediction, state: DenoiseState) -> Tensor:
        """Return the canvas (B, C) if its noise level, the state's memory, is 0, else the argmax at open positions."""
        return torch.where(state.open & (state.memory > 0)[:, None], prediction.argmax, state.canvas)

    def _margin(self, loo: Prediction, state: DenoiseState) -> Tensor:
        alpha = 1 - state.memory[:, None]
        law = safe_log(state.noise.marginal(loo.logits.softmax(-1), alpha, allowed=state.allowed))  # (B, C, V)
        shown = state.canvas[..., None]
        return law.gather(-1, shown)[..., 0] - law.scatter(-1, shown, -torch.inf).amax(-1)

    def _choice(self, loo: Prediction, state: DenoiseState, picked: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probability that these positions are picked, and True where it is a possible choice; (B,) each."""
        fits = is_choice(picked, ~state.frozen, self.num_positions)
        if self.choice_temperature is None:
            return log_random_choice(picked, ~state.frozen), fits
        if self.choice_temperature == 0:
            return torch.zeros_like(state.memory), (self._pick(loo, state) == picked).all(-1)
        return log_gumbel_choice(-self._margin(loo, state) / self.choice_temperature, picked, ~state.frozen), fits

    def _pick(self, loo: Prediction, state: DenoiseState) -> Tensor:
        """Return the positions to redraw, (B, C) bool."""
        score = state.uniform("position")
        if self.choice_temperature is not None:
            score = self.choice_temperature * draws.gumbel(score) - self._margin(loo, state)
        return best(score, ~state.frozen, self.num_positions)
