"""The public names, `dgemma.NAME`."""

import importlib
from typing import TYPE_CHECKING, Any

from dgemma.checkpoint.tokenizer import ByteTokenizer, Tokenizer
from dgemma.constraints.languages import Choice, Grammar, JsonSchema, Regex, ToolCalls
from dgemma.diffusion import schedule
from dgemma.diffusion.noise import HybridNoise, MaskNoise, Noise, UniformNoise
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState
from dgemma.model import presets
from dgemma.model.config import ModelConfig
from dgemma.model.diffusion import DiffusionGemma
from dgemma.run.generate import generate, stream
from dgemma.run.knobs import Knobs
from dgemma.run.many import generate_many
from dgemma.run.step import Denoiser, settle, start_state, step
from dgemma.run.trajectory import Trajectory
from dgemma.sampling import (
    KLASS,
    P2,
    Ancestral,
    BlockRefinement,
    Confidence,
    ConfidenceGap,
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
from dgemma.study.observe import observe
from dgemma.study.sweep import sweep
from dgemma.tasks.autoregressive import generate_causal
from dgemma.tasks.guidance import Guided
from dgemma.tasks.infill import edit, infill
from dgemma.tasks.slots import Slot, calibrate, decide_many, slots
from dgemma.tasks.wrapped import wrap

__all__ = [
    "KLASS",
    "P2",
    "Ancestral",
    "BlockRefinement",
    "ByteTokenizer",
    "Choice",
    "Confidence",
    "ConfidenceGap",
    "Decision",
    "DenoiseState",
    "Denoiser",
    "DiffusionGemma",
    "EndOfText",
    "EntropyBound",
    "FactorThreshold",
    "FirstHitting",
    "Grammar",
    "Guided",
    "HybridNoise",
    "JsonSchema",
    "Knobs",
    "LeaveOneOutGibbs",
    "LinearTemperature",
    "MaskNoise",
    "ModelConfig",
    "Noise",
    "Prediction",
    "ReMDM",
    "Regex",
    "Sampler",
    "Slot",
    "StableAndConfident",
    "StepCap",
    "StopRule",
    "Threshold",
    "TokenEditing",
    "Tokenizer",
    "ToolCalls",
    "Trajectory",
    "Unchanged",
    "UniformNoise",
    "calibrate",
    "data",
    "decide_many",
    "edit",
    "generate",
    "generate_causal",
    "generate_many",
    "infill",
    "observe",
    "presets",
    "schedule",
    "settle",
    "slots",
    "start_state",
    "step",
    "stream",
    "sweep",
    "train",
    "view",
    "wrap",
]

_FOLDERS = ("data", "train", "view")  # loaded on first use, so that `import dgemma` stays quick
# Results and helpers are defined in their modules, and can be imported from here too.
_ELSEWHERE = {
    "checkpoint.tokenizer": ("Reply", "TokenBatch", "ToolCall"),
    "model.cache": ("CacheMark", "PrefixCache"),
    "model.config": ("Conventions", "DenoiserConfig", "GenerationDefaults"),
    "tasks.wrapped": ("TokenCache", "Wrapped"),
    "run.changes": ("apply_changes",),
    "run.defaults": ("default_sampler", "learnt_noise"),
    "run.loop": ("denoise_canvas",),
    "run.many": ("Completion",),
    "run.plan": ("Plan", "read_plan"),
    "run.records": ("BlockCommit", "Moment", "StepRecord"),
    "run.trajectory": ("Generation", "RecordedStep"),
    "sampling.temperature": ("ConstantTemperature",),
    "study.observe": ("Observation", "Pass"),
    "study.sweep": ("Sweep", "SweepExample", "SweepRow"),
    "tasks.infill": ("Infilling",),
    "tasks.slots": ("FilledTemplate",),
    "values": ("describe_noise", "describe_sampler"),
}
_MODULES = {name: module for module, names in _ELSEWHERE.items() for name in names}

if TYPE_CHECKING:
    from dgemma import data, train, view
else:

    def __getattr__(name: str) -> Any:
        if name in _FOLDERS:
            return importlib.import_module(f"dgemma.{name}")
        if name in _MODULES:
            return getattr(importlib.import_module(f"dgemma.{_MODULES[name]}"), name)
        raise AttributeError(f"module 'dgemma' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
