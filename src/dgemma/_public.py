"""The public names, `dgemma.NAME`: what users construct or call. `_unlisted.py` has the other names."""

import importlib
from typing import TYPE_CHECKING, Any

import dgemma.sampling as sampling
from dgemma.checkpoint.tokenizer import ByteTokenizer, Tokenizer
from dgemma.constraints.languages import Choice, Grammar, JsonSchema, Regex, ToolCalls
from dgemma.diffusion.noise import HybridNoise, MaskNoise, UniformNoise
from dgemma.model import presets
from dgemma.model.config import ModelConfig
from dgemma.model.diffusion import DiffusionGemma
from dgemma.run.generate import generate, stream
from dgemma.run.knobs import Knobs
from dgemma.run.many import generate_many
from dgemma.run.step import Denoiser, start_state, step
from dgemma.run.trajectory import Trajectory
from dgemma.sampling import Ancestral, Confidence, Decision, EntropyBound, Sampler, Threshold
from dgemma.study.observe import observe
from dgemma.study.sweep import sweep
from dgemma.tasks.autoregressive import generate_causal
from dgemma.tasks.guidance import Guided
from dgemma.tasks.infill import edit, infill
from dgemma.tasks.slots import Slot, calibrate, decide_many, slots
from dgemma.tasks.wrapped import wrap

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
    "JsonSchema",
    "Knobs",
    "MaskNoise",
    "ModelConfig",
    "Regex",
    "Sampler",
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

_FOLDERS = ("data", "train", "view")  # loaded on first use, so that `import dgemma` stays quick

if TYPE_CHECKING:
    from dgemma import data, train, view
else:

    def __getattr__(name: str) -> Any:
        if name in _FOLDERS:
            return importlib.import_module(f"dgemma.{name}")
        unlisted = importlib.import_module("dgemma._unlisted")
        if name in unlisted.__all__:
            return getattr(unlisted, name)
        raise AttributeError(f"module 'dgemma' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
