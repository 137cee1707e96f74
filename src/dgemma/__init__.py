"""dgemma: text diffusion, readable and fast. Start with `run/generate.py`."""

import importlib
from typing import TYPE_CHECKING, Any

from dgemma import _startup  # noqa: F401
from dgemma.checkpoint.tokenizer import ByteTokenizer, Reply, TokenBatch, Tokenizer, ToolCall
from dgemma.diffusion import schedule
from dgemma.diffusion.noise import HybridNoise, MaskNoise, Noise, UniformNoise
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState
from dgemma.model import presets
from dgemma.model.cache import CacheMark, PrefixCache
from dgemma.model.config import Conventions, GenerationDefaults, ModelConfig
from dgemma.model.diffusion import DiffusionGemma
from dgemma.run.changes import apply_changes
from dgemma.run.defaults import default_sampler, learnt_noise
from dgemma.run.generate import generate, stream
from dgemma.run.knobs import Knobs
from dgemma.run.loop import denoise_canvas
from dgemma.run.plan import Plan, read_plan
from dgemma.run.records import BlockCommit, Moment, StepRecord
from dgemma.run.step import Denoiser, start_state, step
from dgemma.run.trajectory import Generation, RecordedStep, Trajectory
from dgemma.sampling import (
    KLASS,
    P2,
    Ancestral,
    BlockRefinement,
    Confidence,
    ConfidenceGap,
    ConstantTemperature,
    Decision,
    EndOfText,
    EntropyBound,
    FactorThreshold,
    FirstHitting,
    LeaveOneOutGibbs,
    LinearTemperature,
    ReMDM,
    Sampler,
    StableAndConfident,
    StepCap,
    StopRule,
    Threshold,
    TokenEditing,
    Unchanged,
)
from dgemma.study.observe import Observation, Pass, observe
from dgemma.study.sweep import Sweep, SweepRow, sweep
from dgemma.tasks.autoregressive import generate_causal
from dgemma.tasks.guidance import Guided
from dgemma.tasks.infill import Infilling, edit, infill
from dgemma.tasks.slots import Choice, FilledTemplate, Slot, slots
from dgemma.values import describe_noise, describe_sampler

__all__ = [
    "KLASS",
    "P2",
    "Ancestral",
    "BlockCommit",
    "BlockRefinement",
    "ByteTokenizer",
    "CacheMark",
    "Choice",
    "Confidence",
    "ConfidenceGap",
    "ConstantTemperature",
    "Conventions",
    "Decision",
    "DenoiseState",
    "Denoiser",
    "DiffusionGemma",
    "EndOfText",
    "EntropyBound",
    "FactorThreshold",
    "FilledTemplate",
    "FirstHitting",
    "Generation",
    "GenerationDefaults",
    "Guided",
    "HybridNoise",
    "Infilling",
    "Knobs",
    "LeaveOneOutGibbs",
    "LinearTemperature",
    "MaskNoise",
    "ModelConfig",
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
    "Sampler",
    "Slot",
    "StableAndConfident",
    "StepCap",
    "StepRecord",
    "StopRule",
    "Sweep",
    "SweepRow",
    "Threshold",
    "TokenBatch",
    "TokenEditing",
    "Tokenizer",
    "ToolCall",
    "Trajectory",
    "Unchanged",
    "UniformNoise",
    "apply_changes",
    "data",
    "default_sampler",
    "denoise_canvas",
    "describe_noise",
    "describe_sampler",
    "edit",
    "generate",
    "generate_causal",
    "infill",
    "learnt_noise",
    "observe",
    "presets",
    "read_plan",
    "schedule",
    "slots",
    "start_state",
    "step",
    "stream",
    "sweep",
    "train",
    "view",
]

_ON_DEMAND = ("data", "train", "view")  # `import dgemma` stays quick: these load when they are first used

if TYPE_CHECKING:
    from dgemma import data, train, view
else:

    def __getattr__(name: str) -> Any:
        if name in _ON_DEMAND:
            return importlib.import_module(f"dgemma.{name}")
        raise AttributeError(f"module 'dgemma' has no attribute {name!r}")
