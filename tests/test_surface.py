"""The public surface: the names at the top of dgemma, each with an example, and an import that stays quick."""

import ast
import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import dgemma

ROOT = Path(__file__).parents[1]
SAMPLERS = "Ancestral Confidence EntropyBound Threshold"
NOISES = "HybridNoise MaskNoise UniformNoise"
BASES = "Decision Denoiser Sampler"
MODEL = "ByteTokenizer DiffusionGemma ImageProcessor ModelConfig Tokenizer wrap"
RUN = "Knobs SharedPrefixes Trajectory generate generate_many start_state step stream"
TASKS = "Guided Slot calibrate decide_many edit generate_causal infill observe slots sweep"
CONSTRAINTS = "Choice Grammar JsonSchema Regex ToolCalls"
MODULES = "data presets sampling train view"


def test_the_public_names_are_these():
    names = " ".join((SAMPLERS, NOISES, BASES, MODEL, RUN, TASKS, CONSTRAINTS, MODULES)).split()
    assert sorted(dgemma.__all__) == sorted(names)
    assert dir(dgemma) == sorted(names)
    for name in names:
        assert getattr(dgemma, name) is not None
    with pytest.raises(AttributeError, match="module 'dgemma' has no attribute 'stepz'"):
        dgemma.stepz  # noqa: B018


def test_every_public_class_and_function_has_an_example():
    public = [getattr(module, name) for module in (dgemma, dgemma.sampling) for name in module.__all__]
    defined = [value for value in public if inspect.isclass(value) or inspect.isfunction(value)]
    described = {value.__name__: inspect.getdoc(value) or "" for value in defined}
    assert [name for name, text in described.items() if "Example" not in text] == []


def test_no_two_classes_or_types_have_the_same_name():
    roots = (ROOT / "src" / "dgemma", ROOT / "kernels" / "dgemma_kernels")
    nodes = [node for root in roots for path in root.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    count = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    variables = set()  # type variables: modules may use the same letter or word for theirs
    for node in nodes:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Name) and re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", target.id):
                if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in ("TypeVar", "ParamSpec"):
                    variables.add(target.id)
                else:
                    count[target.id] += 1
    assert [name for name, times in (count + Counter(variables)).items() if times > 1] == []


def test_names_of_values_are_nouns_and_not_these_participles():
    refused, found = {"given", "held", "said", "told"}, []
    for folder in ("src", "kernels", "tests", "examples", "docs"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text()
            may_define = re.search(rf"\b({'|'.join(refused)})\b *(\W?=|[:,)\]]| in\b)", source)  # parsing takes long
            for node in ast.walk(ast.parse(source)) if may_define else ():
                name = node.arg if isinstance(node, ast.arg) else getattr(node, "id", getattr(node, "attr", None))
                is_defined = isinstance(node, ast.arg) or isinstance(getattr(node, "ctx", None), ast.Store)
                if is_defined and name in refused:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert found == []


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
