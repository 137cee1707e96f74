"""Results, base classes and helpers: `dgemma.NAME` works, but `dir(dgemma)` does not list them."""

from dgemma.checkpoint.tokenizer import Reply, TokenBatch, ToolCall
from dgemma.diffusion import schedule
from dgemma.diffusion.noise import Noise
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState
from dgemma.model.cache import CacheMark, PrefixCache
from dgemma.model.config import Conventions, DenoiserConfig, GenerationDefaults
from dgemma.run.changes import apply_changes
from dgemma.run.defaults import default_sampler, learnt_noise
from dgemma.run.loop import denoise_canvas
from dgemma.run.plan import Plan, read_plan
from dgemma.run.records import BlockCommit, Moment, RecordedStep, StepRecord
from dgemma.run.step import settle
from dgemma.run.trajectory import Generation
from dgemma.sampling import (
    KLASS,
    P2,
    BlockRefinement,
    ConfidenceGap,
    ConstantTemperature,
    EndOfText,
    FactorThreshold,
    FirstHitting,
    LeaveOneOutGibbs,
    LinearTemperature,
    ReMDM,
    StableAndConfident,
    StepCap,
    StopRule,
    TokenEditing,
    Unchanged,
)
from dgemma.study.observe import Observation, Pass
from dgemma.study.sweep import Sweep, SweepRow
from dgemma.tasks.infill import Infilling
from dgemma.tasks.slots import FilledTemplate
from dgemma.tasks.wrapped import TokenCache
from dgemma.values import describe_noise, describe_sampler

__all__ = [
    "KLASS",
    "P2",
    "BlockCommit",
    "BlockRefinement",
    "CacheMark",
    "ConfidenceGap",
    "ConstantTemperature",
    "Conventions",
    "DenoiseState",
    "DenoiserConfig",
    "EndOfText",
    "FactorThreshold",
    "FilledTemplate",
    "FirstHitting",
    "Generation",
    "GenerationDefaults",
    "Infilling",
    "LeaveOneOutGibbs",
    "LinearTemperature",
    "Moment",
    "Noise",
    "Observation",
    "Pass",
    "Plan",
    "Prediction",
    "PrefixCache",
    "ReMDM",
    "RecordedStep",
    "Reply",
    "StableAndConfident",
    "StepCap",
    "StepRecord",
    "StopRule",
    "Sweep",
    "SweepRow",
    "TokenBatch",
    "TokenCache",
    "TokenEditing",
    "ToolCall",
    "Unchanged",
    "apply_changes",
    "default_sampler",
    "denoise_canvas",
    "describe_noise",
    "describe_sampler",
    "learnt_noise",
    "read_plan",
    "schedule",
    "settle",
]
