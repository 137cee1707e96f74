"""Samplers (one method per file), stop rules and temperatures. `base.py` defines what a sampler is."""

from dgemma.diffusion.decision import Decision
from dgemma.diffusion.law import Law, law_of_rule
from dgemma.sampling.ancestral import Ancestral
from dgemma.sampling.base import Sampler
from dgemma.sampling.confidence import Confidence
from dgemma.sampling.editing import TokenEditing
from dgemma.sampling.entropy_bound import EntropyBound
from dgemma.sampling.first_hitting import FirstHitting
from dgemma.sampling.fork import Fork
from dgemma.sampling.gibbs import LeaveOneOutGibbs
from dgemma.sampling.klass import KLASS
from dgemma.sampling.p2 import P2
from dgemma.sampling.psi import Psi
from dgemma.sampling.refinement import BlockRefinement
from dgemma.sampling.remdm import ReMDM
from dgemma.sampling.soft_bound import SoftEntropyBound
from dgemma.sampling.soft_threshold import SoftThreshold
from dgemma.sampling.stopping import ConfidenceGap, EndOfText, StableAndConfident, StepCap, StopRule, Unchanged
from dgemma.sampling.temperature import ConstantTemperature, LinearTemperature, Temperature
from dgemma.sampling.threshold import FactorThreshold, Threshold

__all__ = [
    "KLASS",
    "P2",
    "Ancestral",
    "BlockRefinement",
    "Confidence",
    "ConfidenceGap",
    "ConstantTemperature",
    "Decision",
    "EndOfText",
    "EntropyBound",
    "FactorThreshold",
    "FirstHitting",
    "Fork",
    "Law",
    "LeaveOneOutGibbs",
    "LinearTemperature",
    "Psi",
    "ReMDM",
    "Sampler",
    "SoftEntropyBound",
    "SoftThreshold",
    "StableAndConfident",
    "StepCap",
    "StopRule",
    "Temperature",
    "Threshold",
    "TokenEditing",
    "Unchanged",
    "law_of_rule",
]
