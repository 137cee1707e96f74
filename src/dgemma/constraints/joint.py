"""The prediction of a step, conditioned exactly on a language.

A step predicts every position independently, p(x) = Π p_i(x_i). Conditioned on the text being in the language, p is a
Markov chain over the automaton's states. Sums over its paths give the conditioned marginals and joint samples. Maxima
give the most likely accepted text, whatever follows its stop token. This is exact for the prediction of one step, which
is a product; it is not the model's joint law.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgemma.constraints import paths
from dgemma.constraints.automaton import log_flags
from dgemma.constraints.canvas_language import Language
from dgemma.constraints.paths import Passes
from dgemma.diffusion.law import log_means
from dgemma.diffusion.prediction import Prediction, Transform

# The cost in nats of contradicting a decided token. It exceeds any difference between the log-probabilities of
# texts, so a decided token stays wherever the language permits it. exp(-COST) is 0 in float64, so samples keep such a
# token with certainty.
COST = 1e6
_PREFERENCE = 1e3  # the cost of contradicting a draft's token at a position that is still open


def condition(prediction: Prediction, language: Language, canvas: Tensor, decided: Tensor) -> Prediction:
    """Condition a prediction on a language, and on the tokens of `canvas` at `decided` positions; both (B, C).

    The result is a `Prediction`. Its entropy, confidence and log-probabilities are those of the conditioned marginals.
    Its samples are joint samples, and its argmax is the most likely accepted text, so both are in the language.
    """
    joint = Joint(prediction, language, canvas, decided)
    return prediction.with_joint(joint, JointBias(joint))


@dataclass(frozen=True, eq=False)
class Joint:
    """The joint law of a canvas: a prediction conditioned on a language and on the tokens at `decided` positions.

    A decided token is replaced if no accepted text contains it there: the committed text must be in the language.
    """

    prediction: Prediction  # shaped, before conditioning
    language: Language
    canvas: Tensor  # (B, C) int64
    decided: Tensor  # (B, C) bool

    @property
    def _ops(self) -> Any:
        """The functions of `paths`, or their kernels."""
        return paths if self.prediction.automaton_ops is None else self.prediction.automaton_ops

    @cached_property
    def bias(self) -> Tensor:
        """The logarithm of M_i[k] = Σ_q forward_i[q] · backward_{i+1}[next_state(q, k)], (B, C, K).

        p_i(t) · M_i[class of t] is proportional to the conditioned marginal of token t. At a decided position its
        token does not count: the result there is the marginal as if only the others were decided.
        """
        bias: Tensor = self._ops.class_bias(self.language, self._passes)
        gaps = self.language.gaps
        return bias if gaps is None else bias.masked_fill(gaps[..., None], 0.0)

    def sample(self, u: Tensor) -> Tensor:
        """Draw a text from the joint law: one uniform per position, u (B, C) in [0, 1) → tokens (B, C).

        A uniform chooses the next state. Its remainder chooses, in vocabulary order, a token that leads there.
        """
        path, rest = self._ops.sample_path(self.language, self._weights, self._passes.backward, u)
        return self._spell(path, lambda prediction: prediction.sample(rest), self.canvas, self.decided)

    @cached_property
    def best(self) -> Tensor:
        """The most likely accepted text, (B, C)."""
        path = self._ops.best_path(self.language, self._best_weights, self._passes.best)
        return self._spell(path, lambda prediction: prediction.argmax, self.canvas, self.decided)

    def condition_again(self, prediction: Prediction) -> Prediction:
        """Condition another prediction in the same way."""
        return condition(prediction, self.language, self.canvas, self.decided)

    def log_mean(self, weigh: Transform) -> Tensor:
        """Return the log of the mean of Π w_i(x_i) over draws x of the canvas, (B,); see `dgemma.diffusion.law`."""
        weighed = Joint(self.prediction.with_bias(weigh), self.language, self.canvas, self.decided)
        mean = weighed._log_total - self._log_total
        if self.language.gaps is None:
            return mean
        return mean + log_means(self.prediction, weigh).masked_fill(~self.language.gaps, 0.0).sum(-1)

    @property
    def _log_total(self) -> Tensor:
        """The log-weight of all accepted texts, (B,)."""
        return self._passes.backward[:, 0].gather(1, self.language.start[:, None])[:, 0]

    def project(self, draft: Tensor, decided: Tensor) -> Tensor:
        """Return the accepted text nearest to `draft` (B, C).

        It keeps the draft's tokens at `decided` positions if an accepted text has them, then as many others as
        possible. A draft in the language is returned unchanged.
        """
        if self.prediction.automaton_ops is None and torch.equal(draft, self.best):
            return draft  # an engine does not compare, because that would wait for its results
        cost = torch.where(decided, COST, _PREFERENCE).double()
        weights = self._arcs(self._kept(self._sums_and_maxima[1], draft, cost))
        path = self._ops.best_path(self.language, weights, self._ops.best_pass(self.language, weights))
        return self._spell(path, lambda prediction: prediction.argmax, draft, torch.ones_like(decided))

    @cached_property
    def _sums_and_maxima(self) -> tuple[Tensor, Tensor]:
        return self._ops.class_sums(self.prediction, self.language.automaton)

    @property
    def _cost(self) -> Tensor:
        return torch.where(self.decided, COST, 0.0).double()

    @cached_property
    def _weights(self) -> Tensor:
        """The log-weight of every arc at every position, (B, C, E)."""
        return self._arcs(self._kept(self._sums_and_maxima[0], self.canvas, self._cost), total=True)

    @cached_property
    def _best_weights(self) -> Tensor:
        """The log-weight of the likeliest token of every arc, (B, C, E). After the end of the text all tokens count."""
        best = self._arcs(self._kept(self._sums_and_maxima[1], self.canvas, self._cost))
        has_ended = self.language.automaton.is_end[self.language.automaton.arc_source]
        return torch.where(has_ended, self._weights, best)

    @cached_property
    def _passes(self) -> Passes:
        return self._ops.passes(self.language, self._weights, self._best_weights)

    def _arcs(self, classes: Tensor, *, total: bool = False) -> Tensor:
        return self._ops.arc_weights(self.language, classes, total=total)

    def _kept(self, classes: Tensor, text: Tensor, cost: Tensor) -> Tensor:
        """The weights of classes (B, C, K) if contradicting `text` (B, C) costs `cost` (B, C).

        The weights are logarithms. Where the cost is above 0, the class of the text's token gets 0, so keeping it costs
        nothing, and every other class gets at most -cost.
        """
        own = self.language.automaton.token_class[text].long()[..., None]
        dearer = classes - classes.amax(-1, keepdim=True) - cost[..., None]
        kept = torch.where(cost[..., None] > 0, dearer.scatter(-1, own, 0.0), classes)
        if self.language.gaps is not None:
            gap_only = log_flags(torch.arange(classes.shape[-1], device=classes.device) == classes.shape[-1] - 1)
            kept = torch.where(self.language.gaps[..., None], gap_only, kept)
        return kept

    def _spell(self, path: Tensor, pick: Callable[[Prediction], Tensor], text: Tensor, keeps: Tensor) -> Tensor:
        """Return tokens (B, C) along a path of states (B, C + 1).

        Where `keeps` is True and the token of `text` fits the path, it is kept. Elsewhere `pick` chooses from the
        prediction over the tokens that lead from one state to the next.
        """
        automaton = self.language.automaton
        between = automaton.next_state[path[:, :-1]] == path[:, 1:, None]  # (B, C, K)
        if self.language.gaps is not None:
            between = between | self.language.gaps[..., None]
        bias = torch.where(between, 0.0, -torch.inf)
        picked = pick(self.prediction.with_bias(ClassBias(bias, automaton.token_class)))
        own = automaton.token_class[text].long()[..., None]
        return torch.where(keeps & between.gather(-1, own)[..., 0], text, picked)


class ClassBias(NamedTuple):
    """Adds bias (B, C, K) to the logits of the tokens in each class."""

    bias: Tensor
    token_class: Tensor  # (V,)

    def __call__(self, logits: Tensor, positions: slice) -> Tensor:
        return logits + self.bias[:, positions].to(logits.dtype).index_select(-1, self.token_class)


class JointBias(NamedTuple):
    """The bias of a joint law, computed when it is first needed."""

    joint: Joint

    def __call__(self, logits: Tensor, positions: slice) -> Tensor:
        return ClassBias(self.joint.bias, self.joint.language.automaton.token_class)(logits, positions)
