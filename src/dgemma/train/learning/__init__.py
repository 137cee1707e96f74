"""Learning from runs: rewards, reinforcement learning and distillation, as objectives of `train`.

| file | subject |
|---|---|
| `rewards.py` | rewards: functions of texts and answers |
| `problems.py` | prompts with answers, as a source of batches |
| `runs.py` | groups of recorded runs, and their log-probabilities |
| `teacher.py` | `Teacher`: self-distillation from slower runs |
| `own_steps.py` | `OwnSteps`: the answer on canvases of the model's own steps |
| `consistency.py` | `Consistency`: a loss of canvases, taught by the model at a lower noise level |
| `policy.py` | `PolicyGradient`: reward and few forwards in one gradient |
"""

from dgemma.train.learning import rewards
from dgemma.train.learning.consistency import Consistency
from dgemma.train.learning.own_steps import OwnSteps
from dgemma.train.learning.policy import PolicyGradient
from dgemma.train.learning.problems import Problems
from dgemma.train.learning.rewards import REWARDS, Reward
from dgemma.train.learning.teacher import Teacher

__all__ = ["REWARDS", "Consistency", "OwnSteps", "PolicyGradient", "Problems", "Reward", "Teacher", "rewards"]
