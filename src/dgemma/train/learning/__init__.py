"""Learning from runs: rewards, reinforcement learning and distillation, as objectives of `train`."""

from dgemma.train.learning import rewards
from dgemma.train.learning.consistency import Consistency
from dgemma.train.learning.own_steps import OwnSteps
from dgemma.train.learning.policy import PolicyGradient
from dgemma.train.learning.problems import Problems
from dgemma.train.learning.rewards import REWARDS, Reward
from dgemma.train.learning.teacher import Teacher

__all__ = ["REWARDS", "Consistency", "OwnSteps", "PolicyGradient", "Problems", "Reward", "Teacher", "rewards"]
