"""The public names, `dgemma.NAME`: those that users construct or call, and then results, base classes and helpers."""

import importlib
from typing import TYPE_CHECKING, Any

import dgemma.sampling as sampling
from dgemma.checkpoint.images import ImageProcessor
from dgemma.checkpoint.tokenizer import ByteTokenizer, Tokenizer
from dgemma.constraints.languages import Choice, Grammar, JsonSchema, Regex, ToolCalls
from dgemma.diffusion import schedule
from dgemma.diffusion.noise import HybridNoise, MaskNoise, Noise, UniformNoise
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState
from dgemma.many.prefixes import SharedPrefixes
from dgemma.many.prompts import generate_many
from dgemma.model import presets
from dgemma.model.cache import PrefixCache
from dgemma.model.config import DenoiserConfig, GenerationDefaults, ModelConfig
from dgemma.model.denoiser import Denoiser
from dgemma.model.diffusion import DiffusionGemma
from dgemma.run.changes import apply_changes
from dgemma.run.generate import generate, stream
from dgemma.run.knobs import Knobs
from dgemma.run.options import default_sampler, learnt_noise
from dgemma.run.plan import read_plan
from dgemma.run.recorded.trajectory import Generation, Trajectory
from dgemma.run.records import StepRecord
from dgemma.run.step import settle, start_state, step
from dgemma.sampling import (
    Ancestral,
    Confidence,
    ConstantTemperature,
    Decision,
    EntropyBound,
    LeaveOneOutGibbs,
    LinearTemperature,
    Sampler,
    StableAndConfident,
    StepCap,
    StopRule,
    Threshold,
)
from dgemma.sampling.named import describe_noise, describe_sampler
from dgemma.study.observe import observe
from dgemma.study.sweep import sweep
from dgemma.tasks.autoregressive import generate_causal
from dgemma.tasks.guidance import Guided
from dgemma.tasks.infill import edit, infill
from dgemma.tasks.slots import Slot, calibrate, decide_many, slots
from dgemma.tasks.wrapped import TokenCache, wrap

__all__ = [
    "Ancestral",
    "ByteTokenizer",
    "Choice",
    "Confidence",
    "Decision",
    "Denoiser",
    "DiffusionGemma",
    "EntropyBound",
    "Grammar",
    "Guided",
    "HybridNoise",
    "ImageProcessor",
    "JsonSchema",
    "Knobs",
    "MaskNoise",
    "ModelConfig",
    "Regex",
    "Sampler",
    "SharedPrefixes",
    "Slot",
    "Threshold",
    "Tokenizer",
    "ToolCalls",
    "Trajectory",
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
    "sampling",
    "slots",
    "start_state",
    "step",
    "stream",
    "sweep",
    "train",
    "view",
    "wrap",
]
LISTED = tuple(__all__)
# Results, base classes and helpers. `dgemma.NAME` works, but `dir(dgemma)` does not list them.
__all__ += [
    "ConstantTemperature",
    "DenoiseState",
    "DenoiserConfig",
    "Generation",
    "GenerationDefaults",
    "LeaveOneOutGibbs",
    "LinearTemperature",
    "Noise",
    "Prediction",
    "PrefixCache",
    "StableAndConfident",
    "StepCap",
    "StepRecord",
    "StopRule",
    "TokenCache",
    "apply_changes",
    "default_sampler",
    "describe_noise",
    "describe_sampler",
    "learnt_noise",
    "read_plan",
    "schedule",
    "settle",
]

_FOLDERS = ("data", "train", "view")  # loaded on first use, so that `import dgemma` stays quick

if TYPE_CHECKING:
    from dgemma import data, train, view
else:

    def __getattr__(name: str) -> Any:
        if name in _FOLDERS:
            return importlib.import_module(f"dgemma.{name}")
        raise AttributeError(f"module 'dgemma' has no attribute {name!r}")
