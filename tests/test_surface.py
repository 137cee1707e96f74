"""The public surface: the names at the top of dgemma, each with an example, and an import that stays quick."""

import inspect
import os
import subprocess
import sys

import pytest

import dgemma

SAMPLERS = """
Ancestral BlockRefinement Confidence EntropyBound FactorThreshold FirstHitting KLASS LeaveOneOutGibbs P2 ReMDM Threshold
TokenEditing
"""
STOP_RULES = "ConfidenceGap EndOfText StableAndConfident StepCap Unchanged"
NOISES = "HybridNoise MaskNoise UniformNoise"
BASES = "Decision DenoiseState Denoiser Noise Prediction Sampler StopRule"
MODEL = "ByteTokenizer DiffusionGemma ModelConfig Tokenizer wrap"
RUN = "Knobs LinearTemperature Trajectory generate generate_many settle start_state step stream"
TASKS = "Guided Slot calibrate decide_many edit generate_causal infill observe slots sweep"
CONSTRAINTS = "Choice Grammar JsonSchema Regex ToolCalls"
MODULES = "data presets schedule train view"
# Results and helpers that earlier versions listed at the top of the package. They are now in their modules.
EARLIER = """
BlockCommit CacheMark ConstantTemperature Conventions FilledTemplate Generation GenerationDefaults Infilling Moment
Observation Pass Plan PrefixCache RecordedStep Reply StepRecord Sweep SweepRow TokenBatch ToolCall apply_changes
default_sampler denoise_canvas describe_noise describe_sampler learnt_noise read_plan
"""


def test_the_public_names_are_these():
    names = " ".join((SAMPLERS, STOP_RULES, NOISES, BASES, MODEL, RUN, TASKS, CONSTRAINTS, MODULES)).split()
    assert sorted(dgemma.__all__) == sorted(names)
    assert dir(dgemma) == sorted(names)
    for name in names:
        assert getattr(dgemma, name) is not None


def test_every_public_class_and_function_has_an_example():
    public = {name: getattr(dgemma, name) for name in dgemma.__all__}
    described = {name: inspect.getdoc(value) or "" for name, value in public.items() if callable(value)}
    assert [name for name, text in described.items() if "Example" not in text] == []


def test_names_of_earlier_versions_still_work_and_are_not_listed():
    for name in EARLIER.split():
        assert getattr(dgemma, name).__name__ == name
    assert not set(EARLIER.split()) & set(dir(dgemma))
    with pytest.raises(AttributeError, match="module 'dgemma' has no attribute 'stepz'"):
        dgemma.stepz  # noqa: B018


@pytest.mark.slow
def test_folders_and_slow_packages_load_when_they_are_first_used():
    script = """
import sys, dgemma
assert not {"dgemma.train", "dgemma.view", "dgemma.data", "matplotlib"} & set(sys.modules)
dgemma.train.Objective, dgemma.view.to_html, dgemma.view.plots.plot_entropy, dgemma.data.sudoku
assert not {"matplotlib", "torch.distributed.fsdp"} & set(sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
