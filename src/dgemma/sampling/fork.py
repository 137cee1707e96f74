"""Fork: parallel where the model is sure, and one token from the left where it is not (ForkGRPO's rollout rule)."""

from dataclasses import dataclass
from typing import ClassVar

from dgemma.checks import Checked, Probability
from dgemma.sampling.base import Decision, DenoiseState, FixedOrder, Prediction
from dgemma.sampling.ranking import propose


@dataclass(frozen=True, kw_only=True)
class Fork(FixedOrder, Checked):
    """Commit every open position whose confidence is at least `tau`. If there is none, commit the leftmost open one.

    A step of the second kind is a fork: the model is not sure, and the token that it draws decides how the text goes
    on. Always taking the most certain position instead makes reinforcement learning collapse to few texts.

    Example: `Fork(tau=0.9)`.
    """

    tau: Probability = 0.9
    greedy: bool = False
    valid_for: ClassVar[frozenset[str]] = frozenset({"mask", "uniform"})

    def __call__(self, prediction: Prediction, state: DenoiseState) -> Decision:
        sure = state.open & (prediction.confidence >= self.tau)
        leftmost = state.open & (state.open.cumsum(-1) == 1)
        write = sure | (leftmost & ~sure.any(-1, keepdim=True))
        tokens = propose(prediction, state, greedy=self.greedy)
        return Decision(tokens=tokens, write=write, renoise=state.open & ~write)
