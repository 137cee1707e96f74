"""dgemma: text diffusion, readable and fast. Start with `generate.py`."""

from dgemma import _startup, presets, schedule  # noqa: F401
from dgemma.causal import generate_causal
from dgemma.changes import apply_changes
from dgemma.config import Conventions, GenerationDefaults, ModelConfig
from dgemma.denoiser import Denoiser
from dgemma.generate import denoise_canvas, generate, run, start_state, step, stream
from dgemma.guidance import Guided
from dgemma.infill import Infilling, edit, infill
from dgemma.model import CacheMark, DiffusionGemma, PrefixCache
from dgemma.noise import HybridNoise, MaskNoise, Noise, UniformNoise, describe_noise, learnt_noise
from dgemma.observe import Observation, Pass, observe
from dgemma.plan import Knobs, Plan, read_plan
from dgemma.prediction import Prediction
from dgemma.records import BlockCommit, Generation, Moment, StepRecord
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
from dgemma.sampling.named import default_sampler, describe_sampler
from dgemma.slots import Choice, FilledTemplate, Slot, slots
from dgemma.state import DenoiseState
from dgemma.sweep import Sweep, SweepRow, sweep
from dgemma.tokenizer import ByteTokenizer, Reply, TokenBatch, Tokenizer, ToolCall
from dgemma.trajectory import RecordedStep, Trajectory

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
    "run",
    "schedule",
    "slots",
    "start_state",
    "step",
    "stream",
    "sweep",
]
